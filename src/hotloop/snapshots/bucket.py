"""The Bucket port, and its implementation on obstore for `file://`, `s3://`, `gs://` and `memory://`.

Owns: the few storage calls that snapshots need. Keys are relative to the bucket's prefix.

Promises: every fault is a `SnapshotError` in our words; a put is whole or absent; a create-only put never replaces an
object; `file://` neither follows a link out of its directory nor returns before the bytes are on the disk.

Faults are raised `from None`, because the library's own text may repeat an access key or a signed address.

Does not do: credentials (bucket_access.py), retries (retry.py), resuming (transfer.py). The scripted fake of the port
is memory_bucket.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import obstore
from obstore.store import LocalStore

from hotloop.errors import SnapshotError
from hotloop.snapshots.storage_errors import AlreadyThere, translate

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SHA256_KEY = "hotloop-sha256"
"""User metadata that a retry compares instead of reading the object back."""
MULTIPART_ABOVE_BYTES = 64 * 1024**2
_PART_BYTES = 16 * 1024**2
_MAX_PARTS = 9000
"""S3 takes 10,000 parts; the rest is margin for a size that was estimated."""
_READ_CHUNK_BYTES = 4 * 1024**2

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a store describes it."""

    key: str
    size: int
    etag: str = ""
    sha256: str | None = None
    """From user metadata; None when the store has none, and in listings."""


class Bucket(Protocol):
    """Where snapshots live. Every method may be called from several threads at once."""

    @property
    def url(self) -> str:
        """The address as shown and as used in cache keys; holds no credentials."""

    @property
    def has_user_metadata(self) -> bool:
        """Whether `head` can return the SHA-256 given at `put`."""

    def list_directories(self) -> list[str]:
        """List the names of the immediate child directories, sorted."""

    def list_objects(self, directory: str) -> list[ObjectInfo]:
        """List the objects that are immediate children of a directory, sorted by key."""

    def head(self, key: str) -> ObjectInfo:
        """Describe an object. Raises: SnapshotError `missing_object`."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read a small object whole. Raises: `missing_object`; `object_corrupt` above max_bytes."""

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """Read an object in pieces from a byte position on. Raises at any piece; `missing_object` at the first."""

    def put(self, key: str, data: Chunk, *, sha256: str = "", create_only: bool = False) -> None:
        """Write a small object in one request.

        Raises: AlreadyThere when `create_only` and the store honours it and the key exists.
        """

    def put_stream(self, key: str, pieces: Iterable[Chunk], *, size: int, sha256: str = "") -> None:
        """Write a large object in parts; nothing is visible and the upload is aborted when a piece raises."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; keys that are already gone are no error."""


class ObstoreBucket:
    """The port on any store that obstore speaks to."""

    def __init__(
        self, store: ObjectStore | None, url: str, *, local_root: str = "", has_user_metadata: bool = True
    ) -> None:
        """Wrap a store whose prefix is the bucket's.

        Args:
            local_root: absolute directory of a `file://` bucket; empty for others.
        """
        self._opened: Any = store
        self._url = url
        self._local_root = os.path.realpath(local_root) if local_root else ""
        self._has_user_metadata = has_user_metadata

    @property
    def _store(self) -> Any:
        """The store; DirectoryToRead opens it when it is first needed."""
        return self._opened

    @property
    def url(self) -> str:
        """The address, without credentials."""
        return self._url

    @property
    def has_user_metadata(self) -> bool:
        """False for `file://`, whose store refuses user metadata."""
        return self._has_user_metadata

    def list_directories(self) -> list[str]:
        """List the names of the immediate child directories, sorted."""
        try:
            found = obstore.list_with_delimiter(self._store, "")
        except Exception as error:
            translated = self._translate(error, "list", "")
            if translated.code == "missing_object":
                return []
            raise translated from None
        return sorted(prefix.rstrip("/") for prefix in found["common_prefixes"])

    def list_objects(self, directory: str) -> list[ObjectInfo]:
        """List the objects that are immediate children of a directory, sorted by key."""
        self._refuse_links(directory)
        try:
            found = obstore.list_with_delimiter(self._store, f"{directory}/")
        except Exception as error:
            translated = self._translate(error, "list", directory)
            if translated.code == "missing_object":
                return []
            raise translated from None
        # Some stores list the directory itself, as an empty object left over from its making.
        start = f"{directory}/"
        return sorted(
            (
                ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "")
                for meta in found["objects"]
                if meta["path"].startswith(start)
            ),
            key=lambda info: info.key,
        )

    def head(self, key: str) -> ObjectInfo:
        """Describe an object. Raises: SnapshotError `missing_object`."""
        self._refuse_links(key)
        try:
            result = obstore.get(self._store, key, options={"head": True})
            meta, attributes = result.meta, result.attributes
        except Exception as error:
            raise self._translate(error, "head", key) from None
        sha256 = attributes.get(SHA256_KEY)
        return ObjectInfo(key, meta["size"], meta["e_tag"] or "", str(sha256) if sha256 else None)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read a small object whole. Raises: `missing_object`; `object_corrupt` above max_bytes."""
        self._refuse_links(key)
        try:
            result = obstore.get(self._store, key)
            size = result.meta["size"]
            if size <= max_bytes:
                return bytes(result.bytes())
        except Exception as error:
            raise self._translate(error, "get", key) from None
        raise SnapshotError(
            "object_corrupt",
            f"is {size} bytes long, above the limit of {max_bytes}",
            where=f"{self._url}/{key}",
            details={"key": key},
        )

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """Read an object in pieces from a byte position on."""
        self._refuse_links(key)
        try:
            options: Any = {"range": {"offset": start}} if start else {}
            result = obstore.get(self._store, key, options=options)
            yield from result.stream(min_chunk_size=_READ_CHUNK_BYTES)
        except GeneratorExit:
            raise
        except Exception as error:
            raise self._translate(error, "get", key) from None

    def put(self, key: str, data: Chunk, *, sha256: str = "", create_only: bool = False) -> None:
        """Write a small object in one request. Raises: AlreadyThere, SnapshotError."""
        self._refuse_links(key)
        try:
            obstore.put(
                self._store,
                key,
                bytes(data),
                attributes=self._attributes(sha256),
                mode="create" if create_only else "overwrite",
                use_multipart=False,
            )
        except Exception as error:
            raise self._translate_any(error, "put", key) from None
        self._make_durable(key)

    def put_stream(self, key: str, pieces: Iterable[Chunk], *, size: int, sha256: str = "") -> None:
        """Write a large object in parts. Raises: SnapshotError, or what the pieces raise."""
        self._refuse_links(key)
        source = _Pieces(pieces)
        try:
            obstore.put(
                self._store,
                key,
                source,
                attributes=self._attributes(sha256),
                use_multipart=True,
                chunk_size=max(_PART_BYTES, size // _MAX_PARTS + 1),
                max_concurrency=4,
            )
        except Exception as error:
            if source.failure is not None:
                raise source.failure from None
            raise self._translate_any(error, "multipart", key) from None
        self._make_durable(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; keys that are already gone are no error."""
        for key in keys:
            self._refuse_links(key)
            try:
                obstore.delete(self._store, key)
            except Exception as error:
                translated = self._translate(error, "delete", key)
                if translated.code != "missing_object":
                    raise translated from None

    def _attributes(self, sha256: str) -> Any:
        return {SHA256_KEY: sha256} if sha256 and self._has_user_metadata else None

    def _translate_any(self, error: Exception, action: str, key: str) -> Exception:
        if isinstance(error, SnapshotError):
            return error
        return translate(error, action=action, url=self._url, key=key)

    def _translate(self, error: Exception, action: str, key: str) -> SnapshotError:
        translated = self._translate_any(error, action, key)
        assert isinstance(translated, SnapshotError), f"{action} cannot collide"
        return translated

    def _refuse_links(self, key: str) -> None:
        """Refuse a key of a `file://` bucket that a symbolic link leads out of the bucket's directory."""
        if not self._local_root:
            return
        real = os.path.realpath(os.path.join(self._local_root, key))
        if real != self._local_root and not real.startswith(self._local_root + os.sep):
            raise SnapshotError(
                "storage_access",
                "is a link out of the bucket's directory, which is never followed",
                where=f"{self._url}/{key}",
                do="Copy the files into the bucket instead of linking them.",
                details={"cause": "denied", "key": key},
                exit_code=3,
            )

    def _make_durable(self, key: str) -> None:
        """Flush a written file and its directory entry, so that the manifest is never on the disk before its shards."""
        if not self._local_root:
            return
        path = os.path.join(self._local_root, key)
        try:
            for target in (path, os.path.dirname(path)):
                descriptor = os.open(target, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise self._translate_any(error, "put", key) from None


class DirectoryToRead(ObstoreBucket):
    """A `file://` bucket that is never made here: until its writer has made it, every call says that it is missing."""

    def __init__(self, url: str, root: str) -> None:
        """Prepare; the directory is looked for at each call until it is there."""
        super().__init__(None, url, local_root=root, has_user_metadata=False)
        self._root = root

    @property
    def _store(self) -> Any:
        """Open the directory. Raises: SnapshotError `storage_access` with `details.cause` `no_bucket`."""
        if self._opened is None:
            if not os.path.isdir(self._root):
                raise SnapshotError(
                    "storage_access",
                    "there is no such directory",
                    where=self._url,
                    do="Correct the address, or publish a first snapshot there, which makes it.",
                    details={"cause": "no_bucket", "right": "list", "store_code": ""},
                    retryable=True,
                    exit_code=3,
                )
            self._opened = open_local_store(self._root)
        return self._opened


def open_local_store(root: str) -> ObjectStore:
    """Open an existing directory as a store."""
    return LocalStore(root, automatic_cleanup=True)


class _Pieces:
    """An iterator that remembers what its source raised, because the store wraps it beyond recognition."""

    def __init__(self, pieces: Iterable[Chunk]) -> None:
        self._pieces = iter(pieces)
        self.failure: BaseException | None = None

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> bytes:
        try:
            return bytes(next(self._pieces))
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise


__all__ = ["MULTIPART_ABOVE_BYTES", "SHA256_KEY", "AlreadyThere", "Bucket", "Chunk", "ObjectInfo", "ObstoreBucket"]
