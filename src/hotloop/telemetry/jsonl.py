"""One JSON object per line, appended by one process and read by any number while it grows.

Owns: `JsonLines` (append, cut, flush to disk) and `read_lines`.

Promises: a line is written by one system call, so a killed process leaves whole lines only; a disk that is full leaves
the file as it was before the line; a reader ignores an unfinished last line.
Does not do: what the lines mean (metrics.py, events.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from hotloop.errors import RunError

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


class JsonLines:
    """An append-only file of JSON objects. Use as a context manager, or call `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one object as one line.

        Raises:
            RunError: code `disk_full` or `write_failed`; the file is then as it was.
        """
        line = orjson.dumps(record, option=_OPTIONS)
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            if size:
                os.ftruncate(self._file, size)
            raise storage_error(error, self.path) from error

    def sync(self) -> None:
        """Return once everything appended is on the disk."""
        os.fsync(self._file)

    def cut(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        """Remove the first line whose record is not kept, and all after it.

        Returns: bytes removed; an unfinished last line counts.
        """
        return cut_lines(self.path, keep)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; nothing if it does not exist, and not the unfinished last line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Cut a file before its first record that `keep` refuses; return the number of bytes removed."""
    if not path.exists():
        return 0
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not keep(orjson.loads(line)):
                break
            end += len(line)
    removed = path.stat().st_size - end
    if removed:
        os.truncate(path, end)
    return removed


def storage_error(error: OSError, path: Path) -> RunError:
    """Say what a failed write means to a person."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(
            "disk_full",
            "the disk or the quota is full",
            where=str(path),
            do="Free some space, then continue from the last checkpoint with hotloop run --resume.",
        )
    return RunError("write_failed", f"cannot be written ({error.strerror})", where=str(path))
