"""The gateway's lean HTTP client, against a server that says exactly what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from hotloop.service.event_loop import run
from hotloop.service.upstream import HIGH_WATER_BYTES, Upstream, UpstreamError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on both event loops that a gateway may have."""
    monkeypatch.setattr(asyncio, "run", partial(run, kind=request.param))


class Server:
    """Counts connections and keeps what came."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.num_connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done
        finally:
            writer.close()


@asynccontextmanager
async def running(handler: Handler) -> AsyncIterator[tuple[Server, Upstream, str]]:
    server = Server(handler)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    upstream = Upstream(5.0)
    try:
        yield server, upstream, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        upstream.close()
        listener.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def test_a_request_is_written_whole_and_its_connection_used_again() -> None:
    async def scenario() -> None:
        seen: list[bytes] = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                seen.append(await read_request(reader))
                writer.write(OK)

        async with running(handler) as (server, upstream, url):
            for _ in range(3):
                async with await upstream.post(url, "/v1/completions", [(b"x-a", b"b")], b"body") as answer:
                    assert answer.status == 200 and await answer.read() == b"{}"
                    assert (b"content-type", b"application/json") in answer.headers
            assert server.num_connections == 1
        host = url.removeprefix("http://").encode()
        assert seen[0] == (
            b"POST /v1/completions HTTP/1.1\r\nhost: " + host + b"\r\nx-a: b\r\ncontent-length: 4\r\n\r\nbody"
        )

    asyncio.run(scenario())


def test_a_body_is_given_as_it_comes() -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            await go_on.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
            await writer.drain()
            await reader.read()

        async with running(handler) as (_, upstream, url):
            pieces = []
            async with await upstream.post(url, "/", [], b"") as answer:
                async for piece in answer.pieces():
                    pieces.append(piece)
                    go_on.set()
            assert pieces == [b"one", b"two"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
    ],
)
def test_a_server_that_breaks_off_is_an_error_and_never_a_whole_answer(said: bytes) -> None:
    async def scenario() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(said)
            await writer.drain()

        async with running(handler) as (_, upstream, url):
            with pytest.raises(UpstreamError):
                async with await upstream.post(url, "/", [], b"") as answer:
                    await answer.read()

    asyncio.run(scenario())


def test_a_server_that_wants_to_close_is_not_asked_again_on_that_connection() -> None:
    async def scenario() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            await writer.drain()
            await reader.read()

        async with running(handler) as (server, upstream, url):
            for _ in range(2):
                async with await upstream.post(url, "/", [], b"") as answer:
                    await answer.read()
            assert server.num_connections == 2

    asyncio.run(scenario())


def test_leaving_an_answer_early_hangs_up() -> None:
    async def scenario() -> None:
        hung_up = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            try:
                await reader.read()
            finally:
                hung_up.set()

        async with running(handler) as (_, upstream, url):
            async with await upstream.post(url, "/", [], b"") as answer:
                assert answer.status == 200
            await asyncio.wait_for(hung_up.wait(), 30)

    asyncio.run(scenario())


def test_giving_up_while_waiting_for_an_answer_hangs_up() -> None:
    async def scenario() -> None:
        asked, hung_up = asyncio.Event(), asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            asked.set()
            try:
                await reader.read()
            finally:
                hung_up.set()

        async with running(handler) as (_, upstream, url):
            task = asyncio.ensure_future(upstream.post(url, "/", [], b""))
            await asked.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.wait_for(hung_up.wait(), 30)

    asyncio.run(scenario())


def test_a_reader_that_does_not_read_stops_the_sender() -> None:
    async def scenario() -> None:
        sent = [0]
        total = 64 * 1024 * 1024

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
            while sent[0] < total:
                writer.write(bytes(65536))
                await writer.drain()
                sent[0] += 65536

        async with running(handler) as (_, upstream, url), await upstream.post(url, "/", [], b"") as answer:
            before: Any = None
            while before != sent[0]:  # until the sender stands still
                before = sent[0]
                await asyncio.sleep(0.05)
            assert HIGH_WATER_BYTES < sent[0] < total // 2
            assert len(await answer.read()) == total

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
def test_an_address_where_nobody_listens_is_an_error(url: str) -> None:
    async def scenario() -> None:
        with pytest.raises(UpstreamError):
            await Upstream(5.0).post(url, "/", [], b"")

    asyncio.run(scenario())
