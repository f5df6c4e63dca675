"""A request to end a run early, and waiting that such a request cuts short.

Owns: `StopSignal` and `Stopped`. Promises: `guard` returns the result, or cancels the work and raises `Stopped`; work
that is done at the same moment counts as done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """A stop was asked for while the run waited."""


class StopSignal:
    """Asked for once, from the event loop's thread; never taken back."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def request(self) -> None:
        self._event.set()

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work, or cancel it as soon as a stop is asked for.

        Raises:
            Stopped: the work was cancelled.
        """
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
