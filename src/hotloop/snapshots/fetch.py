"""The Fetcher port: a snapshot's file as verified, unchanging bytes. And the fetcher that keeps them in memory.

Promises: what is returned has the file's size and SHA-256, and does not change while anybody holds it.

Does not do: keeping files for others (cache.py is the fetcher that does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.reader import RemoteFile
from hotloop.snapshots.retry import RetryPolicy
from hotloop.snapshots.shard import LENGTH_BYTES, Shard, parse_header, parse_header_length
from hotloop.snapshots.transfer import download


class Fetcher(Protocol):
    """Brings files of snapshots to this machine."""

    def fetch(self, file: RemoteFile, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> memoryview:
        """Return the file's bytes, read-only. Raises: SnapshotError, as `download` does."""

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Note the files of a loading chain before they are fetched, so that none of them is evicted meanwhile."""

    def drop(self, file: RemoteFile) -> None:
        """Forget the copy of a file, so that the next fetch reads the bucket."""


class MemoryFetcher:
    """Reads a file from the bucket at each fetch; the bytes live as long as their last user."""

    def __init__(self, bucket: Bucket, *, retry: RetryPolicy | None = None) -> None:
        """Read from a bucket."""
        self._bucket = bucket
        self._retry = retry or RetryPolicy()

    def fetch(self, file: RemoteFile, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> memoryview:
        """Download a file into memory."""
        # Allocated once at its final size: growing a buffer would copy large shards again and again.
        buffer = bytearray(file.size)
        position = 0

        def write(piece: bytes) -> None:
            nonlocal position
            buffer[position : position + len(piece)] = piece
            position += len(piece)

        download(self._bucket, file, write, retry=self._retry, on_bytes=on_bytes)
        return memoryview(buffer).toreadonly()

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Do nothing: nothing is evicted."""

    def drop(self, file: RemoteFile) -> None:
        """Do nothing: no copy is kept."""


def open_fetched_shard(file: RemoteFile, view: memoryview) -> Shard:
    """Check the header of a fetched weight file.

    Raises: SnapshotError `malformed_shard`.
    """
    where = f"{file.identity}/{file.name}"
    length = parse_header_length(view, view.nbytes, where=where)
    header = parse_header(view[LENGTH_BYTES : LENGTH_BYTES + length], view.nbytes, where=where)
    return Shard(Path(file.name), header, view)
