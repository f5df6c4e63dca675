"""What happened in a run and when: started, evaluated, saved, pushed weights, interrupted, finished.

Owns: `EventLog`. An event is one line `{"time": seconds since the epoch, "event": name, ...}` of events.jsonl.

Promises: names are the members of `EventName`. Events carry wall-clock times and are never part of what a resumed run
must repeat.
Does not do: numbers per round (metrics.py), traces of single rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hotloop.telemetry.jsonl import JsonLines

EventName = Literal[
    "started",
    "resumed",
    "evaluated",
    "saved",
    "weights_pushed",
    "published",
    "interrupted",
    "failed",
    "finished",
]


class EventLog:
    """Appends events to a file; the clock is passed in by tests."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path)
        self._clock = clock

    def record(self, event: EventName, **details: Any) -> None:
        """Write one event. Details must be plain JSON values."""
        self._lines.append({"time": round(self._clock(), 3), "event": event, **details})

    def close(self) -> None:
        self._lines.close()
