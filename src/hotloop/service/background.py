"""The thread of a replica for work that may take its time: staging, and keeping the host copy.

    event loop --run(work)--> one thread, low priority --> result
                                 and every thread that the work starts

Owns: how much of the machine a load may take from the tokens that are being drawn meanwhile.
Promises: one piece of work at a time, in order; `choose_workers` leaves the engine its cores.
Does not do: cancelling work that has begun.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

MAX_WORKERS = 8
NICENESS = 10
P = ParamSpec("P")
T = TypeVar("T")


def choose_workers(num_cores: int, engine_threads: int) -> int:
    """Return how many threads a load may decode with while an engine of so many threads draws tokens."""
    return max(1, min(MAX_WORKERS, num_cores - engine_threads))


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Background:
    """One thread that yields to the others. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "hotloop-staging", initializer=_yield_to_others)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something there and return what it returns or raise what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))


def _yield_to_others() -> None:
    """Lower the priority of the calling thread, where the system knows priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
