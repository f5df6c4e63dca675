"""From an identity to verified tensors or changes: the replica's way from a bucket to a staged snapshot.

    resolve chain -> fetch every file, several at once -> check headers, apply deltas oldest first -> staged
                             "downloading"                               "verifying"                    "staged"

Owns: `stage`, the one entry for a replica, and `rebuild`, which gives a publisher or a check the full content.

Promises: what is returned has passed every check of section 4 of the hot-load contract: size and SHA-256, headers,
tensor sets and layouts, the checksum of each tensor against the delta and against the manifest. Changes are absolute
values. Until then nothing that is held was written to; a failure leaves only files in the cache.

Does not do: keeping files (cache.py), installing, or promoting the host copy (mirror.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hotloop.errors import SnapshotError
from hotloop.snapshots.apply import Content, apply_delta, collect_changes, open_anchor
from hotloop.snapshots.chain import Chain, Held, Link, resolve_chain
from hotloop.snapshots.codecs.base import TensorBytes, TensorChange
from hotloop.snapshots.fetch import Fetcher, MemoryFetcher, open_fetched_shard
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.manifest import MAX_CHAIN_LENGTH, Manifest
from hotloop.snapshots.progress import Meter, OnProgress, ignore_progress
from hotloop.snapshots.reader import RemoteFile, SnapshotInfo, SnapshotReader
from hotloop.snapshots.shard import Shard

_REFETCHED = ("checksum_mismatch", "decode_failed", "size_mismatch", "malformed_shard", "object_corrupt")
"""Faults that a damaged copy in the cache can cause; one refetch tells it from a damaged object."""
_FETCH_WORKERS = 8
HintsFor = Callable[[str], Hints]


class HeldContent(Protocol):
    """Tensors that a replica already has on the host, checked by checksums."""

    @property
    def held(self) -> Held:
        """Identity and digest of the content."""

    @property
    def tensors(self) -> Mapping[str, TensorBytes]:
        """Every tensor; the views stay valid and unchanged until the next promotion."""

    @property
    def adler32(self) -> Mapping[str, int]:
        """Checksum of each tensor."""


@dataclass(slots=True)
class Built:
    """Content of our own, and which snapshot it is."""

    held: Held
    content: Content


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """Verified content, ready to be installed."""

    identity: str
    policy_version: int | None
    digest: str
    """Manifest digest, or the content digest of a foreign directory."""
    manifest: Manifest | None
    chain: tuple[str, ...]
    """The identities that were applied, oldest first."""
    base: str | None
    """The held identity that `changes` refer to; None when `tensors` is complete by itself."""
    changes: tuple[TensorChange, ...]
    """Only tensors that differ from the base; empty when `base` is None."""
    tensors: Mapping[str, TensorBytes]
    """The whole content when `base` is None, else empty."""
    files: tuple[RemoteFile, ...]
    """Every file of the chain from its anchor on, oldest snapshot first, held or not, as far as the bucket has it.
    Protected in the cache as long as this snapshot loads or serves."""
    config: bytes = b""
    """The nearest `config.json` of the chain."""
    info: SnapshotInfo | None = field(default=None, repr=False)

    @property
    def is_empty(self) -> bool:
        """Nothing changes: an install needs no pause."""
        return self.base is not None and not self.changes

    @property
    def changed_bytes(self) -> int:
        """Bytes that an install writes."""
        if self.base is None:
            return sum(tensor.nbytes for tensor in self.tensors.values())
        return sum(change.data.nbytes for change in self.changes)

    def iter_full_tensors(self, held: HeldContent | None = None) -> Iterator[tuple[str, TensorBytes]]:
        """Yield every tensor that an install must write, whole, for engines that cannot write ranges.

        Args:
            held: the content that `changes` refer to; must not have been promoted yet.
        """
        if self.base is None:
            yield from self.tensors.items()
            return
        if held is None or held.held.identity != self.base:
            raise ValueError(f"the changes refer to {self.base}, which is not given")
        for change in self.changes:
            old = held.tensors[change.name]
            buffer = bytearray(old.data)
            change.write_into(buffer)
            yield change.name, TensorBytes(old.dtype, old.shape, memoryview(buffer), old.file)


def stage(
    target: str,
    reader: SnapshotReader,
    fetcher: Fetcher,
    *,
    held: HeldContent | None = None,
    hints: Hints | None = None,
    hints_for: HintsFor | None = None,
    on_progress: OnProgress = ignore_progress,
    scratch: Path | None = None,
    workers: int | None = None,
) -> StagedSnapshot:
    """Bring a snapshot to the host, verified, while the old one serves.

    Args:
        target: the wanted identity.
        fetcher: the node's cache, or memory.
        held: the host copy of what is served; deltas are applied to it where the chain meets it.
        hints: what the request says about the target.
        hints_for: what earlier requests said about other identities (from a ledger), for chains of foreign deltas.
        on_progress: gets stages `downloading`, `verifying` and `staged`.
        scratch: directory for changes too large for memory.
        workers: threads of the decoder; None means one per core, at most 8.

    Raises:
        SnapshotError: `parent_mismatch`, the codes of the chain, of the fetch and of the checks (hot_load.md 6.3).
    """
    find = _make_find(reader, target, hints, hints_for)
    chain, infos = _resolve(target, find, held)
    files = _list_chain_files(chain, infos, find)
    fetcher.expect(files)
    try:
        return _build(target, chain, infos, files, fetcher, held, on_progress, scratch, workers)
    except SnapshotError as error:
        if error.code not in _REFETCHED:
            raise
        for identity in chain.identities:
            for file in infos[identity].weight_files:
                fetcher.drop(file)
    return _build(target, chain, infos, files, fetcher, held, on_progress, scratch, workers)


def rebuild(
    identity: str,
    reader: SnapshotReader,
    *,
    fetcher: Fetcher | None = None,
    on_progress: OnProgress = ignore_progress,
) -> StagedSnapshot:
    """Build the full content of a snapshot from its anchor and deltas, every tensor checked.

    Args:
        fetcher: default memory; nothing is written to a disk.

    Raises: SnapshotError, as `stage` does.
    """
    return stage(identity, reader, fetcher or MemoryFetcher(reader.bucket, retry=reader.retry), on_progress=on_progress)


def advance(
    identity: str, reader: SnapshotReader, fetcher: Fetcher, *, built: Built | None, on_progress: OnProgress
) -> Built:
    """Bring content of our own from one snapshot to another: the way to check many snapshots of one chain.

    Args:
        built: what an earlier call returned; its content is written to and must not be used afterwards. Where the chain
            does not meet it, the content is built from the anchor.

    Raises: SnapshotError, as `stage` does; `built` then still holds its snapshot.
    """
    infos: dict[str, SnapshotInfo] = {}

    def find(name: str) -> Link | None:
        info = reader.describe(name) if name == identity else reader.find(name)
        if info is None:
            return None
        infos[name] = info
        return info.link

    chain = resolve_chain(identity, find, held=built.held if built is not None else None)
    steps = [infos[name] for name in chain.identities]
    shards = _fetch(identity, steps, fetcher, on_progress)
    if chain.base is None:
        content, deltas = open_anchor(steps[0], shards[steps[0].identity], workers=None), steps[1:]
    else:
        assert built is not None
        content, deltas = built.content, steps
    for info in deltas:
        apply_delta(info, shards[info.identity], content, writes=True, scratch=None, workers=None)
        if built is not None and content is built.content:
            built.held = Held(info.identity, info.digest)
    return Built(Held(identity, infos[identity].digest), content)


def _make_find(
    reader: SnapshotReader, target: str, hints: Hints | None, hints_for: HintsFor | None
) -> Callable[[str], SnapshotInfo | None]:
    def find(identity: str) -> SnapshotInfo | None:
        if identity == target:
            return reader.describe(identity, hints)
        return reader.find(identity, hints_for(identity) if hints_for is not None else None)

    return find


def _resolve(
    target: str, find: Callable[[str], SnapshotInfo | None], held: HeldContent | None
) -> tuple[Chain, dict[str, SnapshotInfo]]:
    infos: dict[str, SnapshotInfo] = {}

    def find_link(identity: str) -> Link | None:
        info = find(identity)
        if info is None:
            return None
        infos[identity] = info
        return info.link

    try:
        chain = resolve_chain(target, find_link, held=held.held if held is not None else None)
    except SnapshotError as error:
        info = infos.get(target)
        if held is None or info is None or error.code not in ("parent_unknown", "chain_broken"):
            raise
        if error.code == "chain_broken" and info.parent != held.held.identity:
            # A link further back is missing; what is held has nothing to do with it.
            raise
        raise _parent_mismatch(info, held.held, error) from error
    return chain, infos


def _list_chain_files(
    chain: Chain, infos: Mapping[str, SnapshotInfo], find: Callable[[str], SnapshotInfo | None]
) -> tuple[RemoteFile, ...]:
    """List the files of the held content's own chain, from which it would have to be rebuilt, and then of the steps.

    Returns: oldest snapshot first, so that of two files of one name the later one counts.
    """
    earlier: list[SnapshotInfo] = []
    name = chain.base
    while name is not None and len(earlier) <= MAX_CHAIN_LENGTH:
        info = infos.get(name)
        if info is None:
            try:
                info = find(name)
            except SnapshotError as error:
                # The load does not need this link, which may be pruned or damaged. A fault of the store must show.
                if error.code.startswith("storage_"):
                    raise
        if info is None:
            break
        earlier.append(info)
        name = info.parent
    ordered = [*reversed(earlier), *(infos[identity] for identity in chain.identities)]
    return tuple(file for info in ordered for file in info.files.values())


def _parent_mismatch(info: SnapshotInfo, held: Held, cause: SnapshotError) -> SnapshotError:
    """Say that a delta is not of the held content, and why its chain cannot be resolved instead."""
    if info.parent == held.identity:
        why = f"is a delta of {info.parent}, but the {held.identity} held here has other content"
    else:
        why = f"is a delta of {info.parent}, but {held.identity} is held here"
    return SnapshotError(
        "parent_mismatch",
        f"{why}; its chain cannot be resolved from the bucket: {cause.why}",
        where=f"snapshot {info.identity}",
        do='Publish an anchor with "hotloop publish full".',
        details={**cause.details, "identity": info.identity, "parent": info.parent, "held": held.identity},
        exit_code=2,
    )


def _build(
    target: str,
    chain: Chain,
    infos: Mapping[str, SnapshotInfo],
    files: tuple[RemoteFile, ...],
    fetcher: Fetcher,
    held: HeldContent | None,
    on_progress: OnProgress,
    scratch: Path | None,
    workers: int | None,
) -> StagedSnapshot:
    steps = [infos[identity] for identity in chain.identities]
    shards = _fetch(target, steps, fetcher, on_progress)
    verifying = Meter(on_progress, "verifying", identity=target)
    verifying.start(total=sum(file.size for info in steps for file in info.weight_files))
    if chain.base is None:
        content = open_anchor(steps[0], shards[steps[0].identity], workers=workers)
        deltas = steps[1:]
        verifying.add(sum(file.size for file in steps[0].weight_files))
    else:
        assert held is not None
        content = Content(dict(held.tensors), dict(held.adler32))
        deltas = steps
    # One delta on held content needs no scratch copy of any tensor: its changes are the result.
    keeps_changes = chain.base is not None
    needs_content = not keeps_changes or len(deltas) > 1
    gathered: list[list[TensorChange]] = []
    for info in deltas:
        changes = apply_delta(
            info, shards[info.identity], content, writes=needs_content, scratch=scratch, workers=workers
        )
        if keeps_changes:
            gathered.append(changes)
        verifying.add(sum(file.size for file in info.weight_files))
    verifying.finish()
    last = infos[target]
    staged = StagedSnapshot(
        identity=target,
        policy_version=last.policy_version,
        digest=last.digest,
        manifest=last.manifest,
        chain=tuple(chain.identities),
        base=chain.base,
        changes=tuple(collect_changes(gathered, content)) if keeps_changes else (),
        tensors={} if keeps_changes else dict(content.tensors),
        files=files,
        config=_read_config(steps, fetcher),
        info=last,
    )
    Meter(on_progress, "staged", identity=target).finish()
    return staged


def _fetch(
    target: str, steps: list[SnapshotInfo], fetcher: Fetcher, on_progress: OnProgress
) -> dict[str, dict[str, Shard]]:
    """Fetch the weight files of every step, several at once, and open them."""
    files = [file for info in steps for file in info.weight_files]
    meter = Meter(on_progress, "downloading", identity=target)
    meter.start(total=sum(file.size for file in files))

    def fetch(file: RemoteFile) -> Shard:
        return open_fetched_shard(file, fetcher.fetch(file, on_bytes=meter.add))

    with ThreadPoolExecutor(_FETCH_WORKERS, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(fetch, file) for file in files]
        try:
            opened = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    meter.finish()
    shards: dict[str, dict[str, Shard]] = {info.identity: {} for info in steps}
    for file, shard in zip(files, opened, strict=True):
        shards[file.identity][file.name] = shard
    return shards


def _read_config(steps: list[SnapshotInfo], fetcher: Fetcher) -> bytes:
    for info in reversed(steps):
        for file in info.files.values():
            if file.role == "config":
                return bytes(fetcher.fetch(file))
    return b""
