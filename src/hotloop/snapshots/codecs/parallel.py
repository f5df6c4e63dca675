"""Run one function over many items on threads, in order, with few results waiting.

Owns: how far work may run ahead of its consumer, and what happens to it when the consumer stops.

Promises: results come in the order of the items; at most `2 * workers` are in the making or waiting; the first error
is raised at its item's place and everything not yet begun is dropped. Threads suffice because zstd, numpy and the
checksums release the interpreter lock.

    items -> [pool: workers threads] -> window of futures (ordered) -> consumer
             unblocked by: the consumer taking the oldest result
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_DEFAULT_WORKERS = 8


def choose_workers(workers: int | None) -> int:
    """Return how many threads to use: what was asked for, else one per usable core, at most 8."""
    if workers is not None:
        return max(1, workers)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_DEFAULT_WORKERS, usable)


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int | None = None
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order."""
    threads = choose_workers(workers)
    if threads == 1:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="hotloop-codec") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
