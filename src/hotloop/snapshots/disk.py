"""A full disk, said in the words of the snapshot contract.

Owns: turning the operating system's "no space left" into `no_space` with the place that is full.
Promises: every other OSError passes unchanged.
Does not do: free anything; whoever writes removes its own half-made file.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotloop.errors import EXIT_ENVIRONMENT, SnapshotError

_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


@contextmanager
def report_full_disk(where: Path | str) -> Iterator[None]:
    """Run a block that writes below `where`.

    Raises:
        SnapshotError: `no_space` when the disk or a quota is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise SnapshotError(
            "no_space",
            f"the disk is full: {error.strerror}",
            where=str(where),
            do="Free disk space, or name a directory on another disk.",
            details={"cause": str(error)},
            exit_code=EXIT_ENVIRONMENT,
        ) from error
