"""Bytes of unknown number: in memory while few, in an unnamed scratch file when many.

Owns: the bound on what one tensor in flight may hold in memory, whatever its size.

Promises: `view` returns everything that was appended, in order, as one buffer. The scratch file has no name after its
creation, so a killed process leaves nothing behind; it goes when the last view goes.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import IO

from hotloop.snapshots.disk import report_full_disk

MEMORY_LIMIT_BYTES = 16 << 20


class Spool:
    """An append-only run of bytes."""

    def __init__(self, scratch: Path | None = None, *, limit: int = MEMORY_LIMIT_BYTES) -> None:
        """Start empty.

        Args:
            scratch: directory for the scratch file; None means the system's.
            limit: bytes kept in memory before the file is used.
        """
        self._file: IO[bytes] | None = None
        self._scratch = scratch
        self._limit = limit
        self._parts: list[bytes | memoryview] = []
        self.nbytes = 0

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes. The caller must not change the buffer afterwards.

        Raises:
            SnapshotError: `no_space` when the scratch file cannot grow.
        """
        if not len(data):
            return
        self._parts.append(data)
        self.nbytes += data.nbytes if isinstance(data, memoryview) else len(data)
        if self.nbytes > self._limit:
            self._spill()

    def _spill(self) -> None:
        with report_full_disk(self._scratch or tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._scratch, buffering=0)  # noqa: SIM115 (outlives this call)
            for part in self._parts:
                _write_all(self._file, part)
        self._parts.clear()

    def view(self) -> memoryview:
        """Return all bytes as one read-only buffer. Nothing can be appended afterwards."""
        if self._file is None:
            joined = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = [joined]
            return memoryview(joined).cast("B").toreadonly()
        if self._parts:
            self._spill()
        mapped = mmap.mmap(self._file.fileno(), self.nbytes, access=mmap.ACCESS_READ)
        self._file.close()
        return memoryview(mapped)

    def __del__(self) -> None:
        # A spool is dropped unfinished when its tensor turns out broken.
        if self._file is not None:
            self._file.close()


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]
