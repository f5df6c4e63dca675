"""Run one function over many items on threads, in order, with few results waiting.

Owns: how far work may run ahead of its consumer, and what happens to it when the consumer stops.

Promises: results come in the order of the items. At most `2 * workers` are in the making or waiting, or more while the
oldest is so large that other threads would have nothing to do: as many as weigh together what the oldest weighs, per
thread. The first error is raised at its item's place and everything not yet begun is dropped. Threads suffice because
zstd, numpy, the C kernel and the checksums release the interpreter lock.

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
_MOST_PENDING = 32
"""Per thread: even results of tiny items take memory."""


def choose_workers(workers: int | None) -> int:
    """Return how many threads to use: what was asked for, else one per usable core, at most 8."""
    if workers is not None:
        return max(1, workers)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_DEFAULT_WORKERS, usable)


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int | None = None,
    weigh: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    Args:
        weigh: how much work an item is, in any unit.
    """
    threads = choose_workers(workers)
    if threads == 1:
        yield from map(function, items)
        return
    pending: deque[tuple[int, Future[Result]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="hotloop-codec") as pool:
        try:
            for item in items:
                pending.append((weigh(item), pool.submit(function, item)))
                while pending and not _may_run_ahead([weight for weight, _ in pending], threads):
                    yield pending.popleft()[1].result()
            while pending:
                yield pending.popleft()[1].result()
        finally:
            for _, future in pending:
                future.cancel()


def _may_run_ahead(weights: list[int], threads: int) -> bool:
    """Whether one more item may be begun before the oldest of those pending is taken."""
    if len(weights) < 2 * threads:
        return True
    return len(weights) < _MOST_PENDING * threads and sum(weights[1:]) < (threads - 1) * weights[0]
