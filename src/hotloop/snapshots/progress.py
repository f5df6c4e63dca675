"""How far a publish or a load has come, as a value that a bar, a status page or a log can show.

Promises: the bytes done never go down within one stage and are reported from one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One report."""

    stage: str
    """`publishing`, or a stage of a load: `downloading`, `verifying`, `staged`."""
    bytes_done: int
    bytes_total: int
    """0 while it is not known."""
    identity: str = ""
    """The snapshot that is worked on."""
    step: int = 0
    """Position in the chain, from 1; 0 outside a chain."""


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Drop a report."""


class Meter:
    """Counts the bytes of one stage from several threads."""

    def __init__(
        self, on_progress: OnProgress, stage: str, *, total: int = 0, identity: str = "", step: int = 0
    ) -> None:
        """Start at zero; nothing is reported yet."""
        self._on_progress = on_progress
        self._stage = stage
        self._total = total
        self._identity = identity
        self._step = step
        self._done = 0
        self._lock = threading.Lock()

    def start(self, *, total: int) -> None:
        """Set the total and report the beginning."""
        with self._lock:
            self._total = total
            self._report()

    def add(self, nbytes: int) -> None:
        """Count bytes and report."""
        with self._lock:
            self._done += nbytes
            self._report()

    def finish(self) -> None:
        """Report the end."""
        with self._lock:
            self._done = max(self._done, self._total)
            self._report()

    def _report(self) -> None:
        self._on_progress(Progress(self._stage, self._done, self._total, self._identity, self._step))
