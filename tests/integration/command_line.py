"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    code: int
    out: str
    err: str


RunCommand = Callable[..., Outcome]
