"""A scripted fake of the Bucket port: objects in a dictionary, every call counted, faults on demand.

Promises: it passes the same contract suite as the real stores, so a test that uses it tests the caller.

Does not do: `memory://` addresses; those are obstore's memory store, through bucket.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import AlreadyThere, Chunk, ObjectInfo

Fault = Callable[[str, str], None]
"""Called with (action, key) before each call; raises to make the call fail."""


class FakeBucket:
    """Objects in memory, with counters and scripted faults."""

    def __init__(
        self,
        url: str = "memory://fake",
        *,
        has_user_metadata: bool = True,
        honours_create_only: bool = True,
        piece_bytes: int = 64 * 1024,
    ) -> None:
        """Start empty.

        Args:
            honours_create_only: False plays a store that ignores `If-None-Match`.
            piece_bytes: size of the pieces of `read`.
        """
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        """How often each (action, key) was called."""
        self.fault: Fault | None = None
        self.cut_after: dict[str, int] = {}
        """Key -> bytes after which the next `read` of it breaks off, once."""
        self._url = url
        self._has_user_metadata = has_user_metadata
        self._honours_create_only = honours_create_only
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address."""
        return self._url

    @property
    def has_user_metadata(self) -> bool:
        """As told at the start."""
        return self._has_user_metadata

    def _enter(self, action: str, key: str) -> None:
        with self._lock:
            self.calls[action, key] += 1
        if self.fault is not None:
            self.fault(action, key)

    def _find(self, key: str) -> tuple[bytes, str]:
        with self._lock:
            if key not in self.objects:
                raise SnapshotError(
                    "missing_object",
                    "is not in the bucket",
                    where=f"{self._url}/{key}",
                    do="Check the identity, or wait until its upload has ended.",
                    details={"key": key},
                    retryable=True,
                )
            return self.objects[key]

    def list_directories(self) -> list[str]:
        """List the names of the immediate child directories, sorted."""
        self._enter("list", "")
        with self._lock:
            return sorted({key.split("/", 1)[0] for key in self.objects if "/" in key})

    def list_objects(self, directory: str) -> list[ObjectInfo]:
        """List the objects that are immediate children of a directory, sorted by key."""
        self._enter("list", directory)
        start = f"{directory}/"
        with self._lock:
            return [
                _describe(key, data, None)
                for key, (data, _) in sorted(self.objects.items())
                if key.startswith(start) and "/" not in key[len(start) :]
            ]

    def head(self, key: str) -> ObjectInfo:
        """Describe an object. Raises: SnapshotError `missing_object`."""
        self._enter("head", key)
        data, sha256 = self._find(key)
        return _describe(key, data, (sha256 or None) if self._has_user_metadata else None)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read a small object whole. Raises: `missing_object`; `object_corrupt` above max_bytes."""
        self._enter("get", key)
        data, _ = self._find(key)
        if len(data) > max_bytes:
            raise SnapshotError(
                "object_corrupt",
                f"is {len(data)} bytes long, above the limit of {max_bytes}",
                where=f"{self._url}/{key}",
                details={"key": key},
            )
        return data

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """Read an object in pieces from a byte position on."""
        self._enter("read", key)
        data, _ = self._find(key)
        limit = self.cut_after.pop(key, None)
        for position in range(start, len(data), self._piece_bytes):
            if limit is not None and position - start >= limit:
                raise SnapshotError(
                    "storage_unavailable",
                    "get failed (cut in the middle)",
                    where=f"{self._url}/{key}",
                    details={"key": key},
                    retryable=True,
                    exit_code=3,
                )
            yield data[position : position + self._piece_bytes]

    def put(self, key: str, data: Chunk, *, sha256: str = "", create_only: bool = False) -> None:
        """Write a small object in one request. Raises: AlreadyThere."""
        self._enter("put", key)
        self._store(key, bytes(data), sha256, create_only and self._honours_create_only)

    def put_stream(self, key: str, pieces: Iterable[Chunk], *, size: int, sha256: str = "") -> None:
        """Write a large object in parts; nothing is visible when a piece raises."""
        self._enter("put_stream", key)
        self._store(key, b"".join(bytes(piece) for piece in pieces), sha256, False)

    def _store(self, key: str, data: bytes, sha256: str, create_only: bool) -> None:
        with self._lock:
            if create_only and key in self.objects:
                raise AlreadyThere(f"{self._url}/{key}")
            self.objects[key] = (data, sha256)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; keys that are already gone are no error."""
        for key in keys:
            self._enter("delete", key)
            with self._lock:
                self.objects.pop(key, None)


def _describe(key: str, data: bytes, sha256: str | None) -> ObjectInfo:
    return ObjectInfo(key, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest(), sha256)
