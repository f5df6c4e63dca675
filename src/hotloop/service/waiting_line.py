"""Requests that wait at the gateway for a replica with room: first come, first woken, no more than so many.

Owns: the line. Promises: a wake-up that reaches a request which is just leaving goes to the next one; waiting costs one
future and one timer, no task. Used from one event loop.
Does not do: choosing (routing.py), counting what runs (membership.py).
"""

from __future__ import annotations

import asyncio


class WaitingLine:
    """A line for one's turn to look again."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def wait(self, limit_s: float) -> None:
        """Return when it is one's turn, or after `limit_s`."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(limit_s, _wake, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter not in self._waiters and not waiter.cancelled():
                self.wake_one()  # it was this one's turn
            raise
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)

    def wake_one(self) -> None:
        """Give the first one its turn."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
                return


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
