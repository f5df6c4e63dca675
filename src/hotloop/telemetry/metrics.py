"""The metrics of a run: one flat record per round, names of docs/reference/metrics.md.

Owns: which names are times or rates (they differ between two equal runs), and reading a run's records back.

Promises: `without_times` of two runs with the same seed on the same machine are equal, number for number.
Does not do: computing metrics (loop/, trainers/), writing lines (jsonl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.telemetry.jsonl import read_lines

TIME_PREFIX = "perf/"
"""Every time and every rate, and nothing else, has a name that starts with this."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file in round order."""
    return list(read_lines(path))


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what may differ between two runs of the same experiment and seed."""
    return {name: value for name, value in record.items() if not name.startswith(TIME_PREFIX)}
