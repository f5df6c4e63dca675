"""Downloading one object: resumed by range after a break, verified before anybody sees it.

Promises: the returned bytes have the size and, where the manifest gives it, the SHA-256 of the snapshot's file. Bytes
that arrived before a break are kept and hashed once. Progress resets the wait between attempts, never the budget.

Does not do: who may download and where it is kept (cache.py).
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.reader import RemoteFile
from hotloop.snapshots.retry import RetryPolicy
from hotloop.snapshots.storage_errors import make_no_space

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


def download(
    bucket: Bucket,
    file: RemoteFile,
    write: Callable[[bytes], object],
    *,
    retry: RetryPolicy,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Hand an object's bytes on, in order, and verify them.

    Args:
        write: called with each piece; an OSError for a full disk becomes `no_space`.
        on_bytes: called with the number of new bytes.

    Returns: the SHA-256 of what was written, in hex.

    Raises:
        SnapshotError: `missing_object`; `object_corrupt` when size or SHA-256 differ; `no_space`; `storage_*` after
            the budget of `retry`.
    """
    attempts = retry.start()
    digest = hashlib.sha256()
    position = 0
    while True:
        before = position
        try:
            for piece in bucket.read(file.key, start=position):
                _write(write, piece, file)
                digest.update(piece)
                position += len(piece)
                on_bytes(len(piece))
                if position > file.size:
                    raise _corrupt(bucket, file, f"is longer than the {file.size} bytes it should have")
            if position < file.size and bucket.head(file.key).size != file.size:
                break
        except SnapshotError as error:
            if position > before:
                attempts.made_progress()
            attempts.wait_or_raise(error)
            continue
        if position >= file.size:
            break
        # A body that ended early without a fault, although the object is whole: the connection was cut cleanly.
        attempts.wait_or_raise(_short(bucket, file, position))
    if position != file.size:
        raise _corrupt(bucket, file, f"has {position} bytes, {file.size} were expected")
    if file.sha256 is None and file.etag and bucket.head(file.key).etag != file.etag:
        raise _corrupt(bucket, file, "was replaced while it was read")
    found = digest.hexdigest()
    if file.sha256 is not None and found != file.sha256:
        raise _corrupt(bucket, file, "has another SHA-256 than its manifest says")
    return found


def _write(write: Callable[[bytes], object], piece: bytes, file: RemoteFile) -> None:
    try:
        write(piece)
    except OSError as error:
        if error.errno in _OUT_OF_SPACE:
            raise make_no_space(f"while fetching {file.key}") from error
        raise


def _short(bucket: Bucket, file: RemoteFile, position: int) -> SnapshotError:
    return SnapshotError(
        "storage_unavailable",
        f"get ended after {position} of {file.size} bytes",
        where=f"{bucket.url}/{file.key}",
        do="Check that the store can be reached; the call is tried again until its time budget is spent.",
        details={"key": file.key},
        retryable=True,
        exit_code=3,
    )


def _corrupt(bucket: Bucket, file: RemoteFile, why: str) -> SnapshotError:
    return SnapshotError(
        "object_corrupt",
        why,
        where=f"{bucket.url}/{file.key}",
        do="It is fetched again once; if that fails too, publish the snapshot again under a new identity.",
        details={"key": file.key, "identity": file.identity},
        retryable=True,
    )
