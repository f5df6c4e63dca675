"""One publish call: shards first, then index, config and the rest, and the manifest last.

    for each shard, several at once:   hash or encode -> upload
                                                                \
                                  index, config, the rest -------+-> snapshot.json (create only)

Promises: the manifest is written when everything that it names is durable, and never over another one. Encoding one
shard overlaps the upload of the one before.

Does not do: choosing anchor, delta or parent (publisher.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import hotloop
from hotloop.errors import SnapshotError
from hotloop.snapshots.anchor import describe_tensors, make_index, make_shard_payload
from hotloop.snapshots.bucket import AlreadyThere
from hotloop.snapshots.chain import DEFAULT_FULL_EVERY
from hotloop.snapshots.checkpoint import DEFAULT_MAX_SHARD_BYTES, Checkpoint
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, DeltaFormats, TensorBytes
from hotloop.snapshots.delta import DeltaBuilder
from hotloop.snapshots.layout import CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, file_role, snapshot_key
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
from hotloop.snapshots.parent import Parent
from hotloop.snapshots.progress import Meter, OnProgress, ignore_progress
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.retry import call_with_retries
from hotloop.snapshots.upload import Payload, put_once

DEFAULT_WORKERS = 8
DEFAULT_LEVEL = 3
OnStep = Callable[[str], None]
"""Called with the name of each step that has just ended: `shard:NAME`, `file:NAME`, `before_manifest`, `manifest`."""


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """How snapshots are published."""

    workers: int = DEFAULT_WORKERS
    """Shards hashed, encoded and uploaded at once."""
    full_every: int = DEFAULT_FULL_EVERY
    """An anchor is published as the Nth snapshot since the last one."""
    formats: DeltaFormats = ARC_V2_FORMATS
    level: int = DEFAULT_LEVEL
    """zstd level of deltas."""
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    """For checkpoints in memory."""
    keeps_parent: bool = True
    """Keep a copy of the published tensors in memory, so that the next delta needs no download."""
    on_progress: OnProgress = ignore_progress
    on_step: OnStep = lambda step: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


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


class PublishJob:
    """One publish call: one snapshot, from its tensors to its manifest."""

    def __init__(
        self,
        settings: PublishSettings,
        reader: SnapshotReader,
        checkpoint: Checkpoint,
        identity: str,
        policy_version: int,
        *,
        is_dry_run: bool,
        honours_create_only: bool,
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            honours_create_only: what the probe found; without it the manifest is read back after it was put.
        """
        self.settings = settings
        self.reader = reader
        self.bucket = reader.bucket
        self.retry = reader.retry
        self.checkpoint = checkpoint
        self.identity = identity
        self.policy_version = policy_version
        self.is_dry_run = is_dry_run
        self.honours_create_only = honours_create_only
        self.began = time.monotonic()
        self.meter = Meter(settings.on_progress, "publishing", identity=identity)
        self.files: dict[str, FileEntry] = {}
        self.manifest: Manifest | None = None
        """The manifest that is in the bucket; None before it is, and after a dry run."""
        self.tensors: Mapping[str, TensorBytes] = checkpoint.tensors
        """What was published, under the file names of its anchor."""

    def put(self, name: str, payload: Payload, step: str) -> None:
        """Upload one file and note it for the manifest."""
        if not self.is_dry_run:
            key = snapshot_key(self.identity, name)
            put_once(self.bucket, key, payload, retry=self.retry, on_bytes=lambda nbytes: None)
        self.files[name] = FileEntry(payload.size, payload.sha256, file_role(name))
        self.settings.on_step(f"{step}:{name}")

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
        return self.finish(manifest, changed_bytes=checkpoint.nbytes)

    def publish_delta(self, parent: Parent, *, skip_empty: bool) -> Published:
        settings = self.settings
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
                formats=settings.formats,
                level=settings.level,
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
            settings.formats.compression_format, settings.formats.checksum_format, settings.formats.delta_encoding
        )
        manifest = self.make_manifest(
            "delta", parent.link.identity, parent.anchor, parent.chain_length + 1, formats, built.tensors
        )
        self.tensors = builder.new
        return self.finish(manifest, changed_bytes=built.changed_bytes)

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
        with ThreadPoolExecutor(self.settings.workers, thread_name_prefix="publish") as pool:
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
            created_at=self.settings.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            formats=formats,
            files=dict(self.files),
            tensors=dict(sorted(tensors.items())),
            config_sha256=config.sha256 if config else "",
            producer={"name": "hotloop", "version": hotloop.__version__},
        )
        # Parsing our own text proves that a reader takes it, and computes the digest as a reader does.
        return parse_manifest(render_manifest(manifest), identity=self.identity)

    def finish(self, manifest: Manifest, *, changed_bytes: int) -> Published:
        """Write the manifest, the one object that makes the snapshot exist."""
        self.settings.on_step("before_manifest")
        was_there = False
        if not self.is_dry_run:
            manifest, was_there = self.put_manifest(manifest)
            self.settings.on_step("manifest")
            self.manifest = manifest
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

    def look_for_manifest(self) -> Manifest | None:
        self.reader.forget(self.identity)
        return self.reader.find_manifest(self.identity)

    def put_manifest(self, manifest: Manifest) -> tuple[Manifest, bool]:
        """Put it with create-only; where the store ignores that, after a look that it is absent."""
        key = snapshot_key(self.identity, MANIFEST_NAME)
        data = render_manifest(manifest)
        existing = self.look_for_manifest()
        if existing is None:
            try:
                call_with_retries(self.retry, lambda: self.bucket.put(key, data, create_only=True))
                existing = None if self.honours_create_only else self.look_for_manifest()
            except AlreadyThere:
                existing = self.look_for_manifest()
            if existing is None or existing.digest == manifest.digest:
                # Equal digests also mean our own request whose answer was lost.
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
