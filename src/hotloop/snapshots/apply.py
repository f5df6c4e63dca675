"""Applying one step of a chain to content, with every check of sets, layouts and checksums.

Owns: `Content` (tensors with an overlay of scratch copies), opening an anchor, applying a delta, and joining the
changes of several deltas into one.

Promises: held tensors are never written to; a tensor that a delta changes is copied once into scratch. A delta is
checked as a whole (names, files, headers, checksum texts) before its first tensor is decoded.

Does not do: fetching (materialize.py), the formats (codecs/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotloop.errors import SnapshotError
from hotloop.snapshots.anchor import compute_adler32
from hotloop.snapshots.codecs import arc_v2, xor_zstd
from hotloop.snapshots.codecs.base import TensorBytes, TensorChange, check_same_names, list_tensors
from hotloop.snapshots.codecs.parallel import map_in_order
from hotloop.snapshots.manifest import Manifest
from hotloop.snapshots.reader import SnapshotInfo
from hotloop.snapshots.shard import Shard


@dataclass(slots=True)
class Content:
    """The tensors of one version, some of them scratch copies that may be written to."""

    tensors: dict[str, TensorBytes]
    adler32: dict[str, int] = field(default_factory=dict)
    """Known checksums of the current content."""
    _scratch: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def write(self, change: TensorChange) -> None:
        """Write a verified change, into a scratch copy."""
        if not change.is_changed:
            return
        buffer = self._scratch.get(change.name)
        old = self.tensors[change.name]
        if buffer is None:
            buffer = np.array(np.frombuffer(old.data, dtype=np.uint8))
            self._scratch[change.name] = buffer
            self.tensors[change.name] = TensorBytes(old.dtype, old.shape, buffer.data, old.file)
        change.write_into(buffer)


def open_anchor(info: SnapshotInfo, shards: Mapping[str, Shard], *, workers: int | None) -> Content:
    """Check an anchor's tensors and return views of its files.

    Raises: SnapshotError `tensor_set_mismatch`, `layout_changed`, `checksum_mismatch`, `missing_parent`.
    """
    content = Content(list_tensors(shards.values()))
    _check_index(info, shards)
    if info.manifest is None:
        _refuse_disguised_delta(info, shards)
        return content
    _check_layout(info.manifest, content.tensors)
    _check_files(info.manifest, content.tensors)
    names = sorted(content.tensors)
    for name, adler32 in zip(
        names, map_in_order(lambda name: compute_adler32(content.tensors[name]), names, workers=workers), strict=True
    ):
        expected = info.manifest.tensors[name].adler32
        if adler32 != expected:
            raise _checksum_mismatch(info.identity, name, expected, adler32)
        content.adler32[name] = adler32
    return content


def apply_delta(
    info: SnapshotInfo,
    shards: Mapping[str, Shard],
    content: Content,
    *,
    writes: bool,
    scratch: Path | None,
    workers: int | None,
) -> list[TensorChange]:
    """Decode a delta against content, verify it, and write it to the content's scratch where wanted.

    When it raises, the content is as it was.

    Returns: the changes of tensors that differ.

    Raises: SnapshotError; see `arc_v2.decode_shard`; also `layout_changed` and `tensor_set_mismatch`.
    """
    formats = info.formats
    assert formats is not None, "a delta has formats"
    _check_index(info, shards)
    expected: dict[str, int] | None = None
    if info.manifest is not None:
        _check_layout(info.manifest, content.tensors)
        expected = {name: entry.adler32 for name, entry in info.manifest.tensors.items()}
    decoders: list[Iterator[TensorChange]] = []
    if formats.is_arc_v2:
        groups: dict[str, dict[str, TensorBytes]] = {}
        for name, tensor in content.tensors.items():
            groups.setdefault(tensor.file, {})[name] = tensor
        if groups.keys() != shards.keys():
            raise _wrong_files(info.identity, sorted(groups), sorted(shards))
        for file, shard in shards.items():
            decoders.append(
                arc_v2.decode_shard(
                    shard, groups[file], formats=formats, expected_adler32=expected, scratch=scratch, workers=workers
                )
            )
    else:
        list_names_once(info.identity, shards)
        for shard in shards.values():
            decoders.append(
                xor_zstd.decode_shard(
                    shard,
                    content.tensors,
                    formats=formats,
                    expected_adler32=expected,
                    scratch=scratch,
                    workers=workers,
                )
            )
    changes: list[TensorChange] = []
    adler32: dict[str, int | None] = {}
    for decoder in decoders:
        for change in decoder:
            adler32[change.name] = change.adler32
            if change.is_changed:
                changes.append(change)
    if info.manifest is not None:
        _check_left_out(info.manifest, content, adler32.keys())
        if formats.is_arc_v2:
            _check_files(info.manifest, content.tensors)
    # Only now, when nothing can be refused any more: a later shard may still be, and needs the parent's bytes.
    if writes:
        for change in changes:
            content.write(change)
    for name, value in adler32.items():
        if value is not None:
            content.adler32[name] = value
        else:
            content.adler32.pop(name, None)
    return changes


def list_names_once(identity: str, shards: Mapping[str, Shard]) -> None:
    """Refuse a delta that holds a tensor in two files.

    Raises: SnapshotError `tensor_set_mismatch`.
    """
    seen: dict[str, str] = {}
    for file, shard in shards.items():
        for name in shard.tensors:
            if name in seen:
                raise SnapshotError(
                    "tensor_set_mismatch",
                    f"tensor {name!r} lies in {seen[name]} and in {file}",
                    where=f"snapshot {identity}",
                    do="Publish an anchor.",
                    details={"tensor": name},
                )
            seen[name] = file


def _check_index(info: SnapshotInfo, shards: Mapping[str, Shard]) -> None:
    """Check that the files of a foreign directory hold what its index says, no more and no less.

    Raises: SnapshotError `tensor_set_mismatch`.
    """
    if info.weight_map is None:
        return
    found = {name: file for file, shard in shards.items() for name in shard.tensors}
    check_same_names(info.weight_map, found, where=f"snapshot {info.identity}")
    for name, file in info.weight_map.items():
        if found[name] != file:
            raise SnapshotError(
                "tensor_set_mismatch",
                f"its index places tensor {name!r} in {file}, but it lies in {found[name]}",
                where=f"snapshot {info.identity}",
                do="Write an index that fits the files.",
                details={"identity": info.identity, "tensor": name},
            )


def _check_left_out(manifest: Manifest, content: Content, seen: Set[str]) -> None:
    """Check tensors that a delta leaves out: the manifest must say that they kept their parent's bytes."""
    for name, entry in manifest.tensors.items():
        if name in seen:
            continue
        known = content.adler32.get(name)
        if known is None:
            known = compute_adler32(content.tensors[name])
            content.adler32[name] = known
        if known != entry.adler32:
            raise _checksum_mismatch(manifest.identity, name, entry.adler32, known)


def _check_layout(manifest: Manifest, tensors: Mapping[str, TensorBytes]) -> None:
    check_same_names(manifest.tensors, tensors, where=f"snapshot {manifest.identity}")
    for name, entry in manifest.tensors.items():
        tensor = tensors[name]
        if (entry.dtype, entry.shape, entry.nbytes) != (tensor.dtype, tensor.shape, tensor.nbytes):
            raise SnapshotError(
                "layout_changed",
                f"its manifest says that tensor {name!r} is {entry.dtype} {list(entry.shape)}, but it is {tensor.dtype}"
                f" {list(tensor.shape)}",
                where=f"snapshot {manifest.identity}",
                do="Publish an anchor of the new model.",
                details={"identity": manifest.identity, "tensor": name},
            )


def _check_files(manifest: Manifest, tensors: Mapping[str, TensorBytes]) -> None:
    for name, entry in manifest.tensors.items():
        if tensors[name].file != entry.file:
            raise SnapshotError(
                "tensor_set_mismatch",
                f"its manifest places tensor {name!r} in {entry.file}, but it lies in {tensors[name].file}",
                where=f"snapshot {manifest.identity}",
                do="Publish an anchor.",
                details={"identity": manifest.identity, "tensor": name},
            )


def _refuse_disguised_delta(info: SnapshotInfo, shards: Mapping[str, Shard]) -> None:
    """Refuse a foreign arc_v2 delta that lies beside a config.json and so looks like an anchor.

    Its tensors are one-dimensional U8 and each has a decimal checksum in the metadata; no checkpoint looks like that.
    """
    entries = [(shard, name, entry) for shard in shards.values() for name, entry in shard.tensors.items()]
    if entries and all(
        entry.dtype == "U8" and len(entry.shape) == 1 and shard.metadata.get(name, "").isdigit()
        for shard, name, entry in entries
    ):
        raise SnapshotError(
            "missing_parent",
            "is an arc_v2 delta without a manifest, and nothing names its parent",
            where=f"snapshot {info.identity}",
            do="Give incremental_snapshot_metadata in the request, or publish an anchor.",
            details={"identity": info.identity},
        )


def _wrong_files(identity: str, expected: Sequence[str], found: Sequence[str]) -> SnapshotError:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    return SnapshotError(
        "tensor_set_mismatch",
        f"its files are not those of its base: {len(missing)} missing, {len(extra)} extra"
        f" ({(missing or extra)[0]} first)",
        where=f"snapshot {identity}",
        do="An arc_v2 delta has one file for each file of its anchor, of the same name.",
        details={"identity": identity, "missing": missing[:20], "extra": extra[:20]},
    )


def _checksum_mismatch(identity: str, tensor: str, expected: int, actual: int) -> SnapshotError:
    return SnapshotError(
        "checksum_mismatch",
        f"tensor {tensor!r} has Adler-32 {actual}; its manifest says {expected}",
        where=f"snapshot {identity}",
        do="It is fetched again once; if that fails too, publish an anchor.",
        details={"identity": identity, "tensor": tensor, "expected": expected, "actual": actual},
    )


def collect_changes(gathered: Sequence[Sequence[TensorChange]], content: Content) -> Iterator[TensorChange]:
    """Join the changes of successive deltas into one change per tensor.

    Args:
        gathered: per delta, oldest first.
        content: after the last delta; only read where more than one delta changed a tensor.
    """
    if len(gathered) == 1:
        yield from gathered[0]
        return
    by_name: dict[str, list[TensorChange]] = {}
    for changes in gathered:
        for change in changes:
            by_name.setdefault(change.name, []).append(change)
    for name, changes in sorted(by_name.items()):
        if len(changes) == 1:
            yield changes[0]
            continue
        ranges = merge_ranges([change.ranges for change in changes])
        whole = np.frombuffer(content.tensors[name].data, dtype=np.uint8)
        data = np.concatenate([whole[begin:end] for begin, end in ranges.tolist()])
        last = changes[-1]
        yield TensorChange(name, last.file, last.nbytes, ranges, data.data, last.checksum, last.adler32)


def merge_ranges(lists: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Join sorted half-open ranges into their union: rising, not touching.

    Args:
        lists: arrays [R, 2] of begin and end.
    """
    every = np.concatenate(lists)
    every = every[np.argsort(every[:, 0], kind="stable")]
    ends = np.maximum.accumulate(every[:, 1])
    is_first = np.ones(len(every), dtype=bool)
    is_first[1:] = every[1:, 0] > ends[:-1]
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(every)) - 1
    return np.stack([every[first, 0], ends[last]], axis=1)
