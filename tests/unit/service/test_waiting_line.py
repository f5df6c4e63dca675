"""The line of requests that wait for room."""

from __future__ import annotations

import asyncio

from hotloop.service.waiting_line import WaitingLine


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_to_come_is_the_first_to_be_woken() -> None:
    async def scenario() -> list[int]:
        line, order = WaitingLine(), []

        async def one(number: int) -> None:
            await line.wait(3600)
            order.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        await settle()
        for _ in tasks:
            line.wake_one()
            await settle()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == [0, 1, 2]


def test_a_wake_up_that_reaches_one_who_leaves_goes_to_the_next() -> None:
    async def scenario() -> tuple[bool, bool]:
        line = WaitingLine()
        first, second = (asyncio.create_task(line.wait(3600)) for _ in range(2))
        await settle()
        line.wake_one()
        first.cancel()  # before it has run again
        await settle()
        return first.cancelled(), second.done()

    assert asyncio.run(scenario()) == (True, True)


def test_one_who_left_before_its_turn_takes_nobody_elses() -> None:
    async def scenario() -> tuple[bool, bool, bool]:
        line = WaitingLine()
        first, second, third = (asyncio.create_task(line.wait(3600)) for _ in range(3))
        await settle()
        first.cancel()
        await settle()
        line.wake_one()
        await settle()
        found = first.cancelled(), second.done(), third.done()
        third.cancel()
        return found

    assert asyncio.run(scenario()) == (True, True, False)


def test_waiting_ends_after_its_limit_without_a_wake_up_and_leaves_the_line() -> None:
    async def scenario() -> bool:
        line = WaitingLine()
        await line.wait(0.0)
        other = asyncio.create_task(line.wait(3600))
        await settle()
        line.wake_one()  # would be lost on the first, had it stayed
        await settle()
        return other.done()

    assert asyncio.run(scenario())
