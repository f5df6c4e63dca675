"""The gate around a swap: who enters, who waits, who is told to come back."""

from __future__ import annotations

import asyncio

import pytest

from hotloop.errors import ServiceError
from hotloop.service.admission import Entry, Gate, Phase, Transition, decide
from hotloop.service.routing import Pin

EXACT, FREE = Pin(exact_version=1), Pin(min_version=1)


@pytest.mark.parametrize(
    ("phase", "transition", "pin", "entry"),
    [
        (Phase.OPEN, "ASYNC", EXACT, Entry.ENTER),
        (Phase.OPEN, "SYNC", FREE, Entry.ENTER),
        (Phase.CLOSED, "ASYNC", FREE, Entry.NOT_SERVING),
        (Phase.DRAINING, "ASYNC", FREE, Entry.ENTER),
        (Phase.DRAINING, "ASYNC", EXACT, Entry.TOO_EARLY),
        (Phase.DRAINING, "SYNC", FREE, Entry.TOO_EARLY),
        (Phase.SWAPPING, "ASYNC", FREE, Entry.WAIT),
        (Phase.SWAPPING, "ASYNC", EXACT, Entry.WAIT),
        (Phase.SWAPPING, "SYNC", FREE, Entry.TOO_EARLY),
    ],
)
def test_who_enters(phase: Phase, transition: Transition, pin: Pin, entry: Entry) -> None:
    assert decide(phase, transition, pin) is entry


def test_an_async_swap_waits_only_for_exact_pins() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.set_phase(Phase.OPEN)
        await gate.enter("free", FREE, None)
        await gate.enter("exact", EXACT, None)
        drain = asyncio.create_task(gate.drain("ASYNC", 60.0))
        await asyncio.sleep(0)
        assert not drain.done()
        await gate.leave("exact")
        assert await drain == []
        assert gate.in_flight == 1

    asyncio.run(run())


def test_a_sync_drain_names_those_that_are_late() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.set_phase(Phase.OPEN)
        await gate.enter("slow", FREE, None)
        assert await gate.drain("SYNC", 0.0) == ["slow"]
        with pytest.raises(ServiceError, match="too_early"):
            await gate.enter("new", FREE, None)
        await gate.leave("slow")
        await gate.wait_until_gone(["slow"])

    asyncio.run(run())


def test_a_newcomer_waits_for_the_swap_and_enters_after_it() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.set_phase(Phase.OPEN)
        await gate.drain("ASYNC", 0.0)
        await gate.set_phase(Phase.SWAPPING)
        newcomer = asyncio.create_task(gate.enter("new", FREE, None))
        await asyncio.sleep(0)
        assert not newcomer.done()
        await gate.set_phase(Phase.OPEN)
        await newcomer
        assert gate.in_flight == 1

    asyncio.run(run())


def test_a_newcomer_with_a_waiting_limit_is_told_to_come_back() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.set_phase(Phase.OPEN)
        await gate.drain("ASYNC", 0.0)
        await gate.set_phase(Phase.SWAPPING)
        with pytest.raises(ServiceError) as error:
            await gate.enter("new", FREE, 0.0)
        assert (error.value.code, error.value.details["retry_after_s"]) == ("too_early", 1)

    asyncio.run(run())


def test_a_closed_gate_serves_nobody() -> None:
    with pytest.raises(ServiceError, match="no_replicas"):
        asyncio.run(Gate().enter("any", FREE, None))
