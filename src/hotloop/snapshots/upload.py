"""Putting one immutable object: skipped when it is there with the same bytes, refused when it is there with others.

Promises: an object under an identity is written once; a retry after a crash writes only what is missing; a different
object in the way is `identity_conflict`, never overwritten.

Does not do: the order of objects, or the manifest (publisher.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import MULTIPART_ABOVE_BYTES, AlreadyThere, Bucket, Chunk
from hotloop.snapshots.retry import RetryPolicy, call_with_retries

_HASH_CHUNK_BYTES = 8 * 1024**2


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes to upload, readable more than once."""

    size: int
    sha256: str
    open: Callable[[], Iterable[Chunk]]
    """Starts again from the first byte at each call."""

    @classmethod
    def of(cls, data: Chunk) -> Payload:
        """Make a payload of bytes in memory."""
        view = memoryview(data)
        return cls(view.nbytes, hashlib.sha256(view).hexdigest(), lambda: split(view))

    @classmethod
    def of_pieces(cls, pieces: Callable[[], Iterable[Chunk]]) -> Payload:
        """Hash what `pieces` yields, and keep it for the upload."""
        size, digest = 0, hashlib.sha256()
        for piece in pieces():
            digest.update(piece)
            size += memoryview(piece).nbytes
        return cls(size, digest.hexdigest(), pieces)


def split(view: memoryview, *, chunk_bytes: int = _HASH_CHUNK_BYTES) -> Iterable[memoryview]:
    """Cut a view into pieces of bounded size; an empty view gives none."""
    for start in range(0, view.nbytes, chunk_bytes):
        yield view[start : start + chunk_bytes]


def put_once(
    bucket: Bucket, key: str, payload: Payload, *, retry: RetryPolicy, on_bytes: Callable[[int], None]
) -> bool:
    """Make sure that an object with these bytes is in the bucket.

    Args:
        on_bytes: called with the number of bytes sent or found, as they go.

    Returns: True when it was written, False when it was already there.

    Raises: SnapshotError `identity_conflict` when other bytes are there; `storage_*`.
    """
    if call_with_retries(retry, lambda: _is_there(bucket, key, payload)):
        on_bytes(payload.size)
        return False
    if payload.size <= MULTIPART_ABOVE_BYTES:
        data = b"".join(bytes(piece) for piece in payload.open())
        try:
            call_with_retries(retry, lambda: bucket.put(key, data, sha256=payload.sha256, create_only=True))
        except AlreadyThere:
            # Another publisher, or our own request whose answer was lost.
            if not call_with_retries(retry, lambda: _is_there(bucket, key, payload)):
                raise _conflict(bucket, key) from None
        on_bytes(payload.size)
        return True
    call_with_retries(retry, lambda: bucket.put_stream(key, payload.open(), size=payload.size, sha256=payload.sha256))
    on_bytes(payload.size)
    return True


def _is_there(bucket: Bucket, key: str, payload: Payload) -> bool:
    try:
        info = bucket.head(key)
    except SnapshotError as error:
        if error.code == "missing_object":
            return False
        raise
    if info.size != payload.size:
        raise _conflict(bucket, key)
    sha256 = info.sha256
    if sha256 is None:
        digest = hashlib.sha256()
        for piece in bucket.read(key):
            digest.update(piece)
        sha256 = digest.hexdigest()
    if sha256 != payload.sha256:
        raise _conflict(bucket, key)
    return True


def _conflict(bucket: Bucket, key: str) -> SnapshotError:
    return SnapshotError(
        "identity_conflict",
        "is in the bucket with other bytes, and an identity never changes",
        where=f"{bucket.url}/{key}",
        do="Publish under a new identity.",
        details={"key": key, "identity": key.split("/", 1)[0]},
        exit_code=2,
    )
