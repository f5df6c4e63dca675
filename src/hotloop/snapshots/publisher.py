"""Publishing snapshots: anchors and deltas, durable first, manifest last.

    checkpoint -> for each shard, several at once:   hash or encode -> upload
                                                                           \
                                             index, config, the rest -------+-> snapshot.json (create only)

Owns: the decision between anchor and delta, every refusal of section 5 of the hot-load contract, and the copy of the
parent that makes the next delta cheap.

Promises: a snapshot is visible when its manifest is, and the manifest is written when everything else is durable. A
crash leaves an invisible snapshot; the same call again completes it with identical bytes. No second full copy of the
weights is made on a disk; at most `workers` encoded delta shards lie in a temporary directory at a time.

Does not do: the file formats (codecs/), deciding who loads it (service/), deleting (retention.py).
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import hotloop
from hotloop.errors import SnapshotError
from hotloop.snapshots.anchor import describe_tensors, make_index, make_shard_payload
from hotloop.snapshots.bucket import AlreadyThere, Bucket
from hotloop.snapshots.bucket_access import probe_access
from hotloop.snapshots.chain import DEFAULT_FULL_EVERY, Link, choose_kind
from hotloop.snapshots.checkpoint import DEFAULT_MAX_SHARD_BYTES, Checkpoint, make_checkpoint, open_checkpoint
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, DeltaFormats, TensorBytes
from hotloop.snapshots.delta import DeltaBuilder
from hotloop.snapshots.layout import (
    CONFIG_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_POLICY_VERSION,
    STARTUP_NAME,
    check_identity,
    file_role,
    snapshot_key,
)
from hotloop.snapshots.manifest import (
    FileEntry,
    Formats,
    Kind,
    Manifest,
    TensorEntry,
    is_same_content,
    parse_manifest,
    render_manifest,
)
from hotloop.snapshots.parent import Parent, copy_tensors
from hotloop.snapshots.progress import Meter, OnProgress, ignore_progress
from hotloop.snapshots.published import Catalogue, Known
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.retry import RetryPolicy, call_with_retries
from hotloop.snapshots.upload import Payload, put_once

DEFAULT_WORKERS = 8
DEFAULT_LEVEL = 3
Source = Mapping[str, Any] | Path | str | Checkpoint
OnStep = Callable[[str], None]
"""Called with the name of each step that has just ended: `shard:NAME`, `file:NAME`, `before_manifest`, `manifest`."""


@dataclass(frozen=True, slots=True)
class Published:
    """What `publish` did."""

    identity: str
    kind: Kind
    parent: str | None
    policy_version: int
    manifest_digest: str
    full_bytes: int
    """Bytes of all tensors."""
    stored_bytes: int
    """Bytes in the bucket."""
    changed_bytes: int
    """Bytes that differ from the parent; all of them for an anchor."""
    num_changed: int
    num_tensors: int
    seconds: float
    was_there: bool
    """The identity was already complete with the same content."""
    is_skipped: bool = False
    """Nothing had changed and `skip_empty` was set, so nothing was published."""

    @property
    def changed_frac(self) -> float:
        """Share of bytes that differ from the parent."""
        return self.changed_bytes / self.full_bytes if self.full_bytes else 0.0


class Publisher:
    """Publishes the snapshots of one training run into one bucket. One call at a time."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        workers: int = DEFAULT_WORKERS,
        full_every: int = DEFAULT_FULL_EVERY,
        formats: DeltaFormats = ARC_V2_FORMATS,
        level: int = DEFAULT_LEVEL,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        keeps_parent: bool = True,
        retry: RetryPolicy | None = None,
        on_progress: OnProgress = ignore_progress,
        on_step: OnStep = lambda step: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Prepare; the bucket is not touched before the first publish.

        Args:
            workers: shards hashed, encoded and uploaded at once.
            full_every: publish an anchor as the Nth snapshot since the last one.
            formats: of deltas.
            level: zstd level of deltas.
            max_shard_bytes: for checkpoints in memory.
            keeps_parent: keep a copy of the last published tensors in memory, so that the next delta needs no download.
        """
        self.bucket = bucket
        self.reader = SnapshotReader(bucket, retry=retry)
        self._workers = max(1, workers)
        self._full_every = full_every
        self._formats = formats
        self._level = level
        self._max_shard_bytes = max_shard_bytes
        self._keeps_parent = keeps_parent
        self._retry = self.reader.retry
        self._on_progress = on_progress
        self._on_step = on_step
        self._now = now
        self._catalogue = Catalogue(self.reader, workers=self._workers)
        self._parent: Parent | None = None
        self._honours_create_only: bool | None = None
        self._busy = threading.Lock()

    def publish(
        self,
        source: Source,
        identity: str,
        policy_version: int,
        *,
        kind: Literal["auto", "anchor", "delta"] = "auto",
        parent: str | None = None,
        base_dir: Path | str | None = None,
        extras: Mapping[str, bytes] | None = None,
        skip_empty: bool = False,
        is_dry_run: bool = False,
    ) -> Published:
        """Publish one version of the policy and return when it is durable and visible.

        Args:
            source: a state dictionary (see `make_checkpoint`), a checkpoint directory, or a Checkpoint. Its bytes must
                not change until this returns.
            policy_version: above the parent's; used once in a bucket.
            kind: `auto` publishes an anchor into an empty bucket and as every `full_every`th snapshot, else a delta.
            parent: identity to take the difference from; default the newest complete one.
            base_dir: directory with the parent's content; without it the parent is in memory or rebuilt from bucket.
            extras: side files for a state dictionary, such as `config.json`.
            skip_empty: publish nothing when no byte changed.
            is_dry_run: do everything but write.

        Raises:
            SnapshotError: `identity_conflict`, `policy_version_taken`, `metadata_conflict`, `parent_unknown`,
                `parent_mismatch`, `tensor_set_mismatch`, `layout_changed`, `checkpoint_unreadable` (exit 2);
                `storage_access`, `storage_unavailable`, `no_space` (exit 3).
        """
        check_identity(identity)
        if not isinstance(policy_version, int) or not 0 <= policy_version <= MAX_POLICY_VERSION:
            raise SnapshotError(
                "policy_version_taken",
                f"policy version {policy_version} is not an integer from 0 to {MAX_POLICY_VERSION}",
                where=f"snapshot {identity}",
                do="Count versions up from 0.",
                exit_code=2,
            )
        with self._busy:
            began = time.monotonic()
            checkpoint = self._open(source, extras)
            known = self._catalogue.refresh()
            self._catalogue.check_version_free(identity, policy_version)
            chosen = self._choose_parent(known, identity, kind, parent)
            if not is_dry_run and self._honours_create_only is None:
                self._honours_create_only = probe_access(self.bucket, wants_write=True).honours_create_only
            job = _Job(self, checkpoint, identity, policy_version, began, is_dry_run)
            if chosen is None:
                published = job.publish_anchor()
            else:
                published = job.publish_delta(self._load_parent(chosen, base_dir), skip_empty=skip_empty)
            return published

    def set_startup(self, identity: str) -> None:
        """Let new replicas load this identity.

        Raises: SnapshotError `snapshot_incomplete` when it is not complete; `storage_*`.
        """
        self.reader.describe(identity)
        call_with_retries(self._retry, lambda: self.bucket.put(STARTUP_NAME, identity.encode()))

    def _open(self, source: Source, extras: Mapping[str, bytes] | None) -> Checkpoint:
        if isinstance(source, Checkpoint):
            return source
        if isinstance(source, Path | str):
            return open_checkpoint(source)
        return make_checkpoint(source, extras=extras, max_shard_bytes=self._max_shard_bytes)

    def _choose_parent(self, known: Mapping[str, Known], identity: str, kind: str, parent: str | None) -> Known | None:
        """Return the snapshot to take the difference from, or None for an anchor."""
        already = known.get(identity)
        if already is not None and kind == "auto" and parent is None:
            # A retry makes the choice again that the first call made, although its own result is now the newest.
            if already.link.parent is None:
                return None
            parent, kind = already.link.parent, "delta"
        if kind == "anchor":
            return None
        chosen = known.get(parent) if parent is not None else self._catalogue.find_newest(but=identity)
        if chosen is None:
            if kind == "auto" and parent is None:
                return None
            raise SnapshotError(
                "parent_unknown",
                f"the parent {parent} is missing or incomplete" if parent else "the bucket holds no parent",
                where=f"snapshot {identity}",
                do='Publish an anchor with "hotloop publish full".',
                details={"identity": identity, "parent": parent},
                exit_code=2,
            )
        is_retry = already is not None and already.link.kind == "delta"
        if choose_kind(chosen.chain_length, full_every=0 if is_retry else self._full_every) == "anchor":
            return None
        return chosen

    def _load_parent(self, chosen: Known, base_dir: Path | str | None) -> Parent:
        held = self._parent
        if base_dir is None and held is not None and held.link == chosen.link:
            return held
        if base_dir is not None:
            return Parent.from_directory(chosen, base_dir, self.reader)
        return Parent.from_bucket(chosen, self.reader)


class _Job:
    """One publish call."""

    def __init__(
        self,
        publisher: Publisher,
        checkpoint: Checkpoint,
        identity: str,
        policy_version: int,
        began: float,
        is_dry_run: bool,
    ) -> None:
        self.publisher = publisher
        self.bucket = publisher.bucket
        self.checkpoint = checkpoint
        self.identity = identity
        self.policy_version = policy_version
        self.began = began
        self.is_dry_run = is_dry_run
        self.meter = Meter(publisher._on_progress, "publishing", total=0)
        self.files: dict[str, FileEntry] = {}

    def put(self, name: str, payload: Payload, step: str) -> None:
        """Upload one file and note it for the manifest."""
        if not self.is_dry_run:
            key = snapshot_key(self.identity, name)
            put_once(self.bucket, key, payload, retry=self.publisher._retry, on_bytes=lambda nbytes: None)
        self.files[name] = FileEntry(payload.size, payload.sha256, file_role(name))
        self.publisher._on_step(f"{step}:{name}")

    def publish_anchor(self) -> Published:
        checkpoint = self.checkpoint
        tensors: dict[str, TensorEntry] = {}
        self.meter.start(total=checkpoint.nbytes)

        def publish_shard(shard: str) -> None:
            entries = describe_tensors(checkpoint.shards[shard])
            self.put(shard, make_shard_payload(checkpoint, shard), "shard")
            tensors.update(entries)
            self.meter.add(sum(entry.nbytes for entry in entries.values()))

        self.run_in_parallel(publish_shard, list(checkpoint.shards))
        self.put(INDEX_NAME, Payload.of(make_index(checkpoint)), "file")
        self.put_extras(checkpoint.extras)
        manifest = self.make_manifest("anchor", None, self.identity, 0, Formats(), tensors)
        return self.finish(manifest, checkpoint.tensors, changed_bytes=checkpoint.nbytes)

    def publish_delta(self, parent: Parent, *, skip_empty: bool) -> Published:
        publisher = self.publisher
        parent_version = parent.link.policy_version
        if parent_version is not None and self.policy_version <= parent_version:
            raise SnapshotError(
                "metadata_conflict",
                f"policy version {self.policy_version} is not above the {parent_version} of its parent"
                f" {parent.link.identity}",
                where=f"snapshot {self.identity}",
                do="Give a higher one.",
                details={"identity": self.identity, "parent": parent.link.identity},
                exit_code=2,
            )
        self.meter.start(total=self.checkpoint.nbytes)
        with tempfile.TemporaryDirectory(prefix="hotloop-publish-") as folder:
            builder = DeltaBuilder(
                parent.tensors,
                self.checkpoint.tensors,
                Path(folder),
                formats=publisher._formats,
                level=publisher._level,
                parent_identity=parent.link.identity,
                policy_version=self.policy_version,
            )

            def publish_shard(shard: str) -> None:
                with builder.encode(shard) as payload:
                    if payload is not None:
                        self.put(shard, payload, "shard")
                self.meter.add(builder.shard_nbytes(shard))

            if skip_empty and builder.is_empty():
                return self.skip(parent)
            self.run_in_parallel(publish_shard, builder.shards)
            built = builder.finish()
        self.put(INDEX_NAME, Payload.of(built.index), "file")
        self.put_extras(self.checkpoint.extras)
        formats = Formats(
            publisher._formats.compression_format, publisher._formats.checksum_format, publisher._formats.delta_encoding
        )
        manifest = self.make_manifest(
            "delta", parent.link.identity, parent.anchor, parent.chain_length + 1, formats, built.tensors
        )
        return self.finish(manifest, builder.new, changed_bytes=built.changed_bytes)

    def skip(self, parent: Parent) -> Published:
        return Published(
            self.identity,
            "delta",
            parent.link.identity,
            self.policy_version,
            "",
            self.checkpoint.nbytes,
            0,
            0,
            0,
            len(self.checkpoint.tensors),
            time.monotonic() - self.began,
            was_there=False,
            is_skipped=True,
        )

    def run_in_parallel(self, work: Callable[[str], None], shards: list[str]) -> None:
        """Work on several shards at once; the first failure stops the ones not begun and is raised."""
        with ThreadPoolExecutor(self.publisher._workers, thread_name_prefix="publish") as pool:
            futures: list[Future[None]] = [pool.submit(work, shard) for shard in shards]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def put_extras(self, extras: Mapping[str, bytes]) -> None:
        for name, data in sorted(extras.items()):
            self.put(name, Payload.of(data), "file")

    def make_manifest(
        self,
        kind: Kind,
        parent: str | None,
        anchor: str,
        chain_length: int,
        formats: Formats,
        tensors: Mapping[str, TensorEntry],
    ) -> Manifest:
        config = self.files.get(CONFIG_NAME)
        manifest = Manifest(
            identity=self.identity,
            kind=kind,
            parent=parent,
            anchor=anchor,
            chain_length=chain_length,
            policy_version=self.policy_version,
            created_at=self.publisher._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            formats=formats,
            files=dict(self.files),
            tensors=dict(sorted(tensors.items())),
            config_sha256=config.sha256 if config else "",
            producer={"name": "hotloop", "version": hotloop.__version__},
        )
        # Parsing our own text proves that a reader takes it, and computes the digest as a reader does.
        return parse_manifest(render_manifest(manifest), identity=self.identity)

    def finish(self, manifest: Manifest, tensors: Mapping[str, TensorBytes], *, changed_bytes: int) -> Published:
        """Write the manifest, the one object that makes the snapshot exist."""
        self.publisher._on_step("before_manifest")
        was_there = False
        if not self.is_dry_run:
            manifest, was_there = self.put_manifest(manifest)
            self.publisher._on_step("manifest")
            self.remember(manifest, tensors)
        self.meter.finish()
        return Published(
            self.identity,
            manifest.kind,
            manifest.parent,
            manifest.policy_version,
            manifest.digest,
            manifest.full_bytes,
            manifest.stored_bytes,
            changed_bytes,
            manifest.num_changed,
            len(manifest.tensors),
            time.monotonic() - self.began,
            was_there=was_there,
        )

    def put_manifest(self, manifest: Manifest) -> tuple[Manifest, bool]:
        """Put it with create-only; where the store ignores that, after a look that it is absent."""
        publisher = self.publisher
        key = snapshot_key(self.identity, MANIFEST_NAME)
        data = render_manifest(manifest)
        publisher.reader.forget(self.identity)
        existing = publisher.reader.find_manifest(self.identity)
        if existing is None:
            try:
                call_with_retries(publisher._retry, lambda: self.bucket.put(key, data, create_only=True))
                return manifest, False
            except AlreadyThere:
                publisher.reader.forget(self.identity)
                existing = publisher.reader.find_manifest(self.identity)
                assert existing is not None, "the store said that it exists"
                if existing.digest == manifest.digest:
                    # Our own request, whose answer was lost.
                    return manifest, False
        if not is_same_content(existing, manifest):
            raise SnapshotError(
                "identity_conflict",
                "is complete with other content, and an identity never changes",
                where=f"snapshot {self.identity}",
                do="Publish under a new identity.",
                details={"identity": self.identity},
                exit_code=2,
            )
        return existing, True

    def remember(self, manifest: Manifest, tensors: Mapping[str, TensorBytes]) -> None:
        """Keep the published tensors, under the file names of their anchor, as the parent of the next delta."""
        publisher = self.publisher
        link = Link(manifest.identity, manifest.kind, manifest.parent, manifest.policy_version, manifest.digest)
        known = Known(link, manifest.anchor, manifest.chain_length, manifest.stored_bytes, True)
        publisher._catalogue.add(known)
        if not publisher._keeps_parent:
            return
        old = publisher._parent
        publisher._parent = None
        publisher._parent = Parent(
            link, manifest.anchor, manifest.chain_length, copy_tensors(tensors, into=old.tensors if old else {})
        )
