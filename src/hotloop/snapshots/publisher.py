"""Publishing the snapshots of a training run: anchor or delta, from which parent, and every refusal.

    trainer --state dictionary or directory--> Publisher.publish --> PublishJob --> bucket
                                                   |      ^
                                        catalogue of the bucket, copy of the parent

Owns: the decision between anchor and delta, the refusals of section 5 of the hot-load contract that need a look at the
bucket, and the copy of the parent that makes the next delta cheap.

Promises: a snapshot is visible when its manifest is. A crash leaves an invisible snapshot; the same call again
completes it with identical bytes. No second full copy of the weights is made on a disk.

Does not do: the file formats (codecs/), the uploads (publish_job.py), deciding who loads it, deleting (retention.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hotloop.errors import EXIT_BAD_INPUT, SnapshotError
from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.bucket_access import probe_access
from hotloop.snapshots.chain import Link, choose_kind
from hotloop.snapshots.checkpoint import Checkpoint, make_checkpoint, open_checkpoint
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.layout import MAX_POLICY_VERSION, STARTUP_NAME, check_identity
from hotloop.snapshots.manifest import Manifest
from hotloop.snapshots.parent import Parent, copy_tensors
from hotloop.snapshots.publish_job import Published, PublishJob, PublishSettings
from hotloop.snapshots.published import Catalogue, Known
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.retry import RetryPolicy, call_with_retries

Source = Mapping[str, Any] | Path | str | Checkpoint


_REFUSALS = frozenset({"tensor_set_mismatch", "layout_changed", "malformed_shard", "invalid_index"})
"""Codes that are a fault of the input here, and one of the bucket when a replica meets them."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Let a refusal of what was given exit as bad input, wherever it was noticed."""
    try:
        yield
    except SnapshotError as error:
        if error.code in _REFUSALS:
            error.exit_code = EXIT_BAD_INPUT
        raise


class Publisher:
    """Publishes the snapshots of one training run into one bucket. One call at a time."""

    def __init__(
        self, bucket: Bucket, settings: PublishSettings | None = None, *, retry: RetryPolicy | None = None
    ) -> None:
        """Prepare; the bucket is not touched before the first publish."""
        self.bucket = bucket
        self.settings = settings or PublishSettings()
        self.reader = SnapshotReader(bucket, retry=retry)
        self._catalogue = Catalogue(self.reader, workers=self.settings.workers)
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
        with self._busy, _refusing():
            checkpoint = self._open(source, extras)
            known = self._catalogue.refresh()
            self._catalogue.check_version_free(identity, policy_version)
            chosen = self._choose_parent(known, identity, kind, parent)
            if not is_dry_run and self._honours_create_only is None:
                access = probe_access(self.bucket, wants_write=True, retry=self.reader.retry)
                self._honours_create_only = access.honours_create_only
            job = PublishJob(
                self.settings,
                self.reader,
                checkpoint,
                identity,
                policy_version,
                is_dry_run=is_dry_run,
                honours_create_only=bool(self._honours_create_only),
            )
            if chosen is None:
                published = job.publish_anchor()
            else:
                published = job.publish_delta(self._load_parent(chosen, base_dir), skip_empty=skip_empty)
            if job.manifest is not None:
                self._remember(job.manifest, job.tensors)
            return published

    def set_startup(self, identity: str) -> None:
        """Let new replicas load this identity.

        Raises: SnapshotError `snapshot_incomplete` when it is not complete; `storage_*`.
        """
        self.reader.describe(identity)
        call_with_retries(self.reader.retry, lambda: self.bucket.put(STARTUP_NAME, identity.encode()))

    def _open(self, source: Source, extras: Mapping[str, bytes] | None) -> Checkpoint:
        if isinstance(source, Checkpoint):
            return source
        if isinstance(source, Path | str):
            return open_checkpoint(source)
        return make_checkpoint(source, extras=extras, max_shard_bytes=self.settings.max_shard_bytes)

    def _choose_parent(self, known: Mapping[str, Known], identity: str, kind: str, parent: str | None) -> Known | None:
        """Return the snapshot to take the difference from, or None for an anchor."""
        already = known.get(identity)
        if kind == "anchor":
            return None
        if already is not None and parent is None:
            # A retry makes the choice again that the first call made, although its own result is now the newest.
            if already.link.parent is None:
                return None
            parent = already.link.parent
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
        if choose_kind(chosen.chain_length, full_every=0 if is_retry else self.settings.full_every) == "anchor":
            return None
        return chosen

    def _load_parent(self, chosen: Known, base_dir: Path | str | None) -> Parent:
        held = self._parent
        if base_dir is None and held is not None and held.link == chosen.link:
            return held
        if base_dir is not None:
            return Parent.from_directory(chosen, base_dir, self.reader)
        return Parent.from_bucket(chosen, self.reader)

    def _remember(self, manifest: Manifest, tensors: Mapping[str, TensorBytes]) -> None:
        """Keep the published tensors, under the file names of their anchor, as the parent of the next delta."""
        link = Link(manifest.identity, manifest.kind, manifest.parent, manifest.policy_version, manifest.digest)
        self._catalogue.add(Known(link, manifest.anchor, manifest.chain_length, manifest.stored_bytes, True))
        if not self.settings.keeps_parent:
            return
        old, self._parent = self._parent, None
        copied = copy_tensors(tensors, into=old.tensors if old is not None else {})
        self._parent = Parent(link, manifest.anchor, manifest.chain_length, copied)
