"""Finished groups on their way to a batch: the RolloutQueue port and its in-memory form.

Owns: the port, `InMemoryQueue`. In a synchronous round the sampler puts every group of a submission and the controller
takes what it needs; the port is what a persistent queue implements.

Promises: groups leave in the order of their ids; a group leaves once; `drain` empties it and counts what it dropped.
Does not do: filtering (controller.py), durability.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

from hotloop.types import Group


class RolloutQueue(Protocol):
    """Holds scored groups until they are trained on."""

    def put(self, groups: Iterable[Group]) -> None: ...

    def take(self) -> Group | None:
        """Remove and return the ready group with the smallest id, None when there is none."""
        ...

    def drain(self) -> int:
        """Drop what is ready and return how many groups that were."""
        ...

    def __len__(self) -> int: ...


class InMemoryQueue:
    """A heap by group id; empty between two rounds of a synchronous run."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, Group]] = []

    def put(self, groups: Iterable[Group]) -> None:
        for group in groups:
            if any(group.group_id == other for other, _ in self._ready):
                raise ValueError(f"group {group.group_id} is in the queue already")
            heapq.heappush(self._ready, (group.group_id, group))

    def take(self) -> Group | None:
        return heapq.heappop(self._ready)[1] if self._ready else None

    def drain(self) -> int:
        dropped = len(self._ready)
        self._ready.clear()
        return dropped

    def __len__(self) -> int:
        return len(self._ready)
