"""A client whose connections break: what it asks again, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hotloop.errors import ServiceError
from hotloop.service.client import Client

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'


class Server:
    """Answers so many requests of each connection and then hangs up on the next, without a word."""

    def __init__(self, answers: int = 1_000_000, *, cut_body: bool = False) -> None:
        self.answers, self.cut_body = answers, cut_body
        self.requests: list[int] = []
        """For each request, the number of its connection."""
        self.port = 0
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._connections = self._connections, self._connections + 1
        try:
            for turn in range(self.answers + 1):
                await reader.readuntil(b"\r\n\r\n")
                self.requests.append(number)
                if turn == self.answers:
                    if self.cut_body:
                        writer.write(ANSWER[:-4])
                    break
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        writer.close()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


@pytest.mark.parametrize("cut_body", [False, True])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_kept_connection_that_the_server_has_closed_is_replaced(method: str, cut_body: bool) -> None:
    async def scenario() -> None:
        server = Server(answers=1, cut_body=cut_body)
        await server.start()
        async with Client(f"http://127.0.0.1:{server.port}") as client:
            for _ in range(3):
                assert await client.request(method, "/x") == {"ok": True}
        assert server.requests == [0, 0, 1, 1, 2], "each new connection answers once, then fails, and is asked again"
        await server.stop()

    run(scenario)


def test_a_deployment_that_is_restarted_is_waited_for() -> None:
    async def scenario() -> None:
        server = Server(answers=1)
        await server.start()
        async with Client(f"http://127.0.0.1:{server.port}") as client:
            await client.request("GET", "/x")
            await server.stop()
            asked = asyncio.create_task(client.request("POST", "/x"))
            await asyncio.sleep(0.3)
            assert not asked.done()
            await server.start()
            assert await asked == {"ok": True}
        await server.stop()

    run(scenario)


def test_one_that_stays_away_is_unreachable_after_the_budget() -> None:
    async def scenario() -> None:
        server = Server(answers=1)
        await server.start()
        async with Client(f"http://127.0.0.1:{server.port}", reconnect_budget_s=0.3) as client:
            await client.request("GET", "/x")
            await server.stop()
            with pytest.raises(ServiceError) as caught:
                await client.request("GET", "/x")
            assert caught.value.code == "unreachable" and str(server.port) in str(caught.value)

    run(scenario)


def test_one_that_never_answered_is_unreachable_at_once() -> None:
    async def scenario() -> None:
        server = Server(answers=0)
        await server.start()
        async with Client(f"http://127.0.0.1:{server.port}") as client:
            with pytest.raises(ServiceError, match="unreachable"):
                await client.request("POST", "/x")
        assert server.requests == [0]
        await server.stop()

    run(scenario)
