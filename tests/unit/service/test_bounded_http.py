"""The HTTP protocol on a real server: how a request learns that its client is gone, and what goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import uvicorn

from hotloop.service.bounded_http import CONNECTION, BoundedHttp, bounded_http
from hotloop.service.event_loop import run
from hotloop.service.joined_head import JoinedHead

App = Callable[[Any, Any, Any], Awaitable[None]]
Loop = Literal["asyncio", "uvloop"]
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


@asynccontextmanager
async def serving(app: App, receive_timeout_s: float = 30.0) -> AsyncIterator[int]:
    config = uvicorn.Config(app, log_level="warning", lifespan="off", http=bounded_http(receive_timeout_s), port=0)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def answer(send: Any, body: bytes = b"ok") -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@LOOPS
@pytest.mark.parametrize("body", [b"{}", b"x" * 300_000], ids=["small", "above the server's buffer"])
def test_a_watch_is_told_when_the_client_goes_away(loop: Loop, body: bytes) -> None:
    async def scenario() -> None:
        gone, began = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                pass
            connection: BoundedHttp = scope["state"][CONNECTION]
            connection.watch(gone.set)
            began.set()
            await gone.wait()

        async with serving(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await began.wait()
            assert not gone.is_set()
            writer.close()
            await asyncio.wait_for(gone.wait(), 30)

    run(scenario(), loop)


@LOOPS
def test_a_watch_that_comes_too_late_is_told_at_once_and_an_ended_one_never(loop: Loop) -> None:
    async def scenario() -> None:
        first_gone, told, over = asyncio.Event(), [], asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            connection: BoundedHttp = scope["state"][CONNECTION]
            ended = lambda: told.append("ended")  # noqa: E731  # compared by identity
            connection.watch(ended)
            connection.unwatch(ended)
            connection.watch(first_gone.set)
            await first_gone.wait()
            connection.watch(lambda: told.append("late"))
            over.set()

        async with serving(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await asyncio.sleep(0)
            writer.close()
            await asyncio.wait_for(over.wait(), 30)
        assert told == ["late"]

    run(scenario(), loop)


@LOOPS
def test_a_request_that_ends_late_does_not_end_the_watch_of_the_next(loop: Loop) -> None:
    async def scenario() -> None:
        gone, second_began = asyncio.Event(), asyncio.Event()
        number = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal number
            number += 1
            await receive()
            connection: BoundedHttp = scope["state"][CONNECTION]
            if number == 1:

                def nothing() -> None:
                    raise AssertionError("the first request is over")

                connection.watch(nothing)
                await answer(send)
                await second_began.wait()
                connection.unwatch(nothing)
                return
            connection.watch(gone.set)
            second_began.set()
            await gone.wait()

        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await reader.readuntil(b"ok")
            writer.write(REQUEST)
            await second_began.wait()
            await asyncio.sleep(0)
            writer.close()
            await asyncio.wait_for(gone.wait(), 30)

    run(scenario(), loop)


class Recorder(asyncio.Transport):
    """A transport that keeps what is written, one entry a write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.writes.append(b"closed")


def test_a_head_goes_out_with_the_first_piece_of_its_body_and_never_stays() -> None:
    transport = Recorder()
    joined = JoinedHead(transport)
    joined.write(b"a")
    joined.hold_next()
    joined.write(b"head ")
    assert transport.writes == [b"a"]
    joined.write(b"body")
    joined.write(b"more")
    joined.hold_next()
    joined.write(b"head alone")
    joined.close()
    assert transport.writes == [b"a", b"head body", b"more", b"head alone", b"closed"]


@LOOPS
def test_a_head_that_comes_in_parts_is_waited_for_no_longer_than_the_limit(loop: Loop) -> None:
    async def scenario() -> bytes:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await answer(send)

        async with serving(app, receive_timeout_s=0.2) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST + REQUEST[:20])  # a whole one, and the beginning of the next
            data = await reader.read()
            writer.close()
            return data

    data = run(scenario(), loop)
    assert data.count(b"HTTP/1.1 200") == 1 and data.count(b"HTTP/1.1 408") == 1
    assert b"request_timeout" in data
