"""The gate of one replica: who may enter now, who waits for a swap, who is told to come back.

Owns: the rules of a swap as seen by requests (`decide`, pure), and the gate that counts requests in flight.

    ASYNC swap: requests stay in flight and are paused; newcomers wait until the swap is over; requests with an exact
    pin are drained first, and newcomers with one are told `too_early`.
    SYNC swap: requests in flight finish on the old weights; every newcomer is told `too_early`.

Promises: a request that is told `too_early` has generated nothing; a request that enters runs under the version that
its pin was checked against, or its spans say otherwise.
Does not do: the swap itself (reconciler.py), version pins' rules (routing.check_pin).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from hotloop.errors import ServiceError
from hotloop.service.routing import Pin

Transition = Literal["ASYNC", "SYNC"]


class Phase(Enum):
    """What the gate is doing."""

    OPEN = "open"
    DRAINING = "draining"
    """Requests that must not see a swap are finishing."""
    SWAPPING = "swapping"
    CLOSED = "closed"
    """The replica serves nothing: not loaded yet, or its weights cannot be trusted."""


class Entry(Enum):
    """The answer to one request."""

    ENTER = "enter"
    WAIT = "wait"
    TOO_EARLY = "too_early"
    NOT_SERVING = "not_serving"


def decide(phase: Phase, transition: Transition, pin: Pin) -> Entry:
    """Say what a newcomer does."""
    if phase is Phase.OPEN:
        return Entry.ENTER
    if phase is Phase.CLOSED:
        return Entry.NOT_SERVING
    if transition == "SYNC":
        return Entry.TOO_EARLY
    if phase is Phase.DRAINING:
        return Entry.TOO_EARLY if pin.is_exact else Entry.ENTER
    return Entry.WAIT


def must_drain(transition: Transition, pin: Pin) -> bool:
    """Say whether a request in flight must finish before the weights change."""
    return transition == "SYNC" or pin.is_exact


def too_early(why: str) -> ServiceError:
    """Tell a client to come back; nothing was generated."""
    return ServiceError(
        "too_early",
        why,
        do="Retry in 1 s with the same affinity key; nothing was generated.",
        details={"retry_after_s": 1},
        retryable=True,
    )


@dataclass(slots=True)
class _Flight:
    pin: Pin


class Gate:
    """Counts requests of one replica and holds them back around a swap. Used from one event loop."""

    def __init__(self) -> None:
        self._phase = Phase.CLOSED
        self._transition: Transition = "ASYNC"
        self._flights: dict[str, _Flight] = {}
        self._changed = asyncio.Condition()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    async def enter(self, request_id: str, pin: Pin, wait_limit_s: float | None) -> None:
        """Enter, waiting for a swap to end if the transition lets requests wait.

        Args:
            wait_limit_s: None waits as long as the swap takes.

        Raises:
            ServiceError: `too_early`, or `no_replicas` when this replica serves nothing.
        """
        deadline = None if wait_limit_s is None else asyncio.get_running_loop().time() + wait_limit_s
        async with self._changed:
            while True:
                entry = decide(self._phase, self._transition, pin)
                if entry is Entry.ENTER:
                    self._flights[request_id] = _Flight(pin)
                    return
                if entry is Entry.NOT_SERVING:
                    raise ServiceError(
                        "no_replicas", "this replica serves no snapshot yet", do="Retry in 1 s.", retryable=True
                    )
                if entry is Entry.TOO_EARLY:
                    raise too_early("new weights are being installed")
                remaining = None if deadline is None else deadline - asyncio.get_running_loop().time()
                if remaining is not None and remaining <= 0:
                    raise too_early(f"the swap did not end within {wait_limit_s:g} s")
                try:
                    await asyncio.wait_for(self._changed.wait(), remaining)
                except TimeoutError:
                    continue

    async def leave(self, request_id: str) -> None:
        """Note the end of a request, however it ended."""
        async with self._changed:
            self._flights.pop(request_id, None)
            self._changed.notify_all()

    async def drain(self, transition: Transition, limit_s: float) -> list[str]:
        """Hold newcomers back and wait for the requests that must finish first.

        Returns: ids of requests that did not finish within the limit; the caller aborts them.
        """
        async with self._changed:
            self._transition = transition
            self._phase = Phase.DRAINING
            deadline = asyncio.get_running_loop().time() + limit_s
            while waiting := self._must_finish():
                remaining = deadline - asyncio.get_running_loop().time()
                if remaining <= 0:
                    return waiting
                try:
                    await asyncio.wait_for(self._changed.wait(), remaining)
                except TimeoutError:
                    continue
            return []

    def _must_finish(self) -> list[str]:
        return [name for name, flight in self._flights.items() if must_drain(self._transition, flight.pin)]

    async def wait_until_gone(self, request_ids: list[str]) -> None:
        """Wait until requests that were aborted have left."""
        async with self._changed:
            await self._changed.wait_for(lambda: not any(name in self._flights for name in request_ids))

    async def set_phase(self, phase: Phase) -> None:
        """Open, close, or mark the swap itself."""
        async with self._changed:
            self._phase = phase
            self._changed.notify_all()
