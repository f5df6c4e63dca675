"""What a bucket holds: one snapshot described, all of them listed, `STARTUP_SNAPSHOT` read.

Owns: `SnapshotInfo`, the one description of a snapshot whether it has a manifest or is a foreign directory.

Promises: a returned description is of a complete snapshot; an incomplete one is None or `snapshot_incomplete`, never
half described. Only immediate children of an identity's directory are looked at.

Does not do: fetching weights (cache.py), rules between snapshots (chain.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import Bucket, ObjectInfo
from hotloop.snapshots.chain import Link
from hotloop.snapshots.codecs.base import DeltaFormats, parse_formats
from hotloop.snapshots.foreign import Hints, describe_foreign
from hotloop.snapshots.index import MAX_INDEX_BYTES, Index, parse_index
from hotloop.snapshots.layout import (
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_STARTUP_BYTES,
    STARTUP_NAME,
    check_identity,
    file_role,
    is_file_name,
    is_identity,
    parse_startup,
    snapshot_key,
)
from hotloop.snapshots.manifest import MAX_MANIFEST_BYTES, Kind, Manifest, parse_manifest
from hotloop.snapshots.retry import RetryPolicy, call_with_retries

_REMEMBERED_MANIFESTS = 32
"""A manifest of a large mixture of experts has tens of thousands of tensors, and a bucket hundreds of snapshots."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a snapshot in the bucket."""

    identity: str
    name: str
    size: int
    sha256: str | None
    """From the manifest; None in a foreign directory."""
    etag: str
    """From the store; empty where a manifest gives the SHA-256."""
    role: str

    @property
    def key(self) -> str:
        """Key relative to the bucket's prefix."""
        return snapshot_key(self.identity, self.name)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One complete snapshot."""

    identity: str
    kind: Kind
    parent: str | None
    policy_version: int | None
    formats: DeltaFormats | None
    """None for an anchor."""
    digest: str
    """Manifest digest, or the content digest of a foreign directory."""
    files: Mapping[str, RemoteFile]
    manifest: Manifest | None
    weight_map: Mapping[str, str] | None = None
    """Tensor -> file as the index of a foreign directory says; None with a manifest and for a one-file anchor."""

    @property
    def link(self) -> Link:
        """What the chain needs."""
        return Link(self.identity, self.kind, self.parent, self.policy_version, self.digest)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files.values())

    @property
    def weight_files(self) -> list[RemoteFile]:
        """Its safetensors files, by name."""
        return [file for _, file in sorted(self.files.items()) if file.role == "weights"]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A directory that is no usable snapshot, and why."""

    identity: str
    error: SnapshotError


class SnapshotReader:
    """Describes the snapshots of one bucket; manifests are immutable and so are remembered."""

    def __init__(self, bucket: Bucket, *, retry: RetryPolicy | None = None) -> None:
        """Read from a bucket, with retries of passing faults."""
        self.bucket = bucket
        self.retry = retry or RetryPolicy()
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._lock = threading.Lock()

    def describe(self, identity: str, hints: Hints | None = None) -> SnapshotInfo:
        """Describe a complete snapshot.

        Args:
            hints: what a request says; checked against the manifest, needed for some foreign directories.

        Raises:
            SnapshotError: `invalid_identity` before any storage call; `snapshot_incomplete`, `missing_object`,
                `manifest_invalid`, `invalid_index`, `metadata_conflict`, `unsupported_*`, `missing_*`, `storage_*`.
        """
        check_identity(identity)
        hints = hints or Hints()
        manifest = self.find_manifest(identity)
        if manifest is not None:
            info = _from_manifest(manifest)
            check_hints(info, hints)
            return info
        return self._describe_foreign(identity, hints)

    def find(self, identity: str, hints: Hints | None = None) -> SnapshotInfo | None:
        """Describe a snapshot, or return None when it is not there or not complete."""
        try:
            return self.describe(identity, hints)
        except SnapshotError as error:
            if error.code in ("snapshot_incomplete", "missing_object"):
                return None
            raise

    def find_manifest(self, identity: str) -> Manifest | None:
        """Read the manifest of an identity, or None when there is none."""
        with self._lock:
            known = self._manifests.get(identity)
            if known is not None:
                self._manifests.move_to_end(identity)
                return known
        key = snapshot_key(identity, MANIFEST_NAME)
        try:
            # One byte above the limit, so that the parser refuses it with the limit's own code.
            data = call_with_retries(self.retry, lambda: self.bucket.get(key, max_bytes=MAX_MANIFEST_BYTES + 1))
        except SnapshotError as error:
            if error.code == "missing_object":
                return None
            raise
        manifest = parse_manifest(data, identity=identity)
        with self._lock:
            self._manifests[identity] = manifest
            while len(self._manifests) > _REMEMBERED_MANIFESTS:
                self._manifests.popitem(last=False)
        return manifest

    def forget(self, identity: str) -> None:
        """Drop what is remembered of an identity, so that the next look reads the bucket."""
        with self._lock:
            self._manifests.pop(identity, None)

    def list_identities(self) -> list[str]:
        """List the directories whose names are identities, sorted."""
        names = call_with_retries(self.retry, self.bucket.list_directories)
        return [name for name in names if is_identity(name)]

    def list_snapshots(self) -> list[SnapshotInfo | Incomplete]:
        """Describe every directory, complete or not; storage faults raise."""
        found: list[SnapshotInfo | Incomplete] = []
        for identity in self.list_identities():
            try:
                found.append(self.describe(identity))
            except SnapshotError as error:
                if error.code.startswith("storage_"):
                    raise
                found.append(Incomplete(identity, error))
        return found

    def read_startup(self) -> str:
        """Read the identity that new replicas load.

        Raises: SnapshotError `startup_missing` when the object is missing, empty or is not one identity.
        """
        try:
            data = call_with_retries(self.retry, lambda: self.bucket.get(STARTUP_NAME, max_bytes=MAX_STARTUP_BYTES))
        except SnapshotError as error:
            if error.code not in ("missing_object", "object_corrupt"):
                raise
            raise SnapshotError(
                "startup_missing",
                "does not exist" if error.code == "missing_object" else "is too long to be one identity",
                where=f"{self.bucket.url}/{STARTUP_NAME}",
                do='Write it with "hotloop publish startup --identity IDENTITY".',
                retryable=True,
            ) from None
        return parse_startup(data)

    def _describe_foreign(self, identity: str, hints: Hints) -> SnapshotInfo:
        listed = call_with_retries(self.retry, lambda: self.bucket.list_objects(identity))
        objects: dict[str, ObjectInfo] = {}
        for info in listed:
            name = info.key.rsplit("/", 1)[-1]
            if is_file_name(name):
                objects[name] = info
        index = self._read_index(identity) if INDEX_NAME in objects else None
        found = describe_foreign(identity, objects, index, hints, exists=lambda name: self._exists(name))
        files = {
            name: RemoteFile(identity, name, objects[name].size, None, objects[name].etag, file_role(name))
            for name in found.files
        }
        return SnapshotInfo(
            identity,
            found.kind,
            found.parent,
            found.policy_version,
            found.formats,
            found.digest,
            files,
            manifest=None,
            weight_map=index.weight_map if index is not None else None,
        )

    def _read_index(self, identity: str) -> Index:
        key = snapshot_key(identity, INDEX_NAME)
        data = call_with_retries(self.retry, lambda: self.bucket.get(key, max_bytes=MAX_INDEX_BYTES))
        return parse_index(data, where=identity)

    def _exists(self, identity: str) -> bool:
        return bool(call_with_retries(self.retry, lambda: self.bucket.list_objects(identity)))


def _from_manifest(manifest: Manifest) -> SnapshotInfo:
    formats = None
    if manifest.kind == "delta":
        given = manifest.formats
        formats = parse_formats(
            given.compression_format,
            given.checksum_format,
            given.delta_encoding,
            where=f"{manifest.identity}/{MANIFEST_NAME}",
        )
    files = {
        name: RemoteFile(manifest.identity, name, entry.size, entry.sha256, "", entry.role)
        for name, entry in manifest.files.items()
    }
    return SnapshotInfo(
        manifest.identity,
        manifest.kind,
        manifest.parent,
        manifest.policy_version,
        formats,
        manifest.digest,
        files,
        manifest,
    )


def check_hints(info: SnapshotInfo, hints: Hints) -> None:
    """Refuse a request that contradicts the manifest; what it leaves out contradicts nothing.

    Raises: SnapshotError `metadata_conflict`, naming both values; `unsupported_*` for unknown formats.
    """

    def refuse(name: str, asked: object, found: object) -> SnapshotError:
        return SnapshotError(
            "metadata_conflict",
            f"the request says {name} {asked!r}, its manifest says {found!r}",
            where=f"snapshot {info.identity}",
            do="Leave it out of the request; the manifest is enough.",
            details={"identity": info.identity, "field": name, "asked": asked, "found": found},
        )

    if hints.is_incremental:
        if info.kind != "delta":
            raise refuse("kind", "delta", info.kind)
        if hints.previous_identity is not None and hints.previous_identity != info.parent:
            raise refuse("previous_snapshot_identity", hints.previous_identity, info.parent)
        if hints.compression_format is not None and info.formats is not None:
            encoding = info.formats.delta_encoding
            asked = parse_formats(hints.compression_format, hints.checksum_format, encoding, where="the request")
            if asked.compression_format != info.formats.compression_format:
                raise refuse("compression_format", hints.compression_format, info.formats.compression_format)
            if hints.checksum_format is not None and asked.checksum_format != info.formats.checksum_format:
                raise refuse("checksum_format", hints.checksum_format, info.formats.checksum_format)
    if hints.policy_version is not None and hints.policy_version != info.policy_version:
        raise refuse("policy_version", hints.policy_version, info.policy_version)
