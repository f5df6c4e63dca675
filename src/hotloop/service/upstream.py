"""The gateway's connections to replicas on the hot path: HTTP/1.1 requests out, answers in piece by piece.

    post --bytes--> connection (idle one, else new) --head--> Answer --pieces--> data plane
                        ^                                        |
                        +---- back to the idle ones when read ---+     left unread: closed, which aborts the rollout

Owns: the idle connections by address, and reading one answer at a time from each.
Promises: an answer is given as it arrives; a reader that does not read stops the sender (about `HIGH_WATER_BYTES` wait
here); a connection is used again only after a whole answer, and not when the replica may be about to close it.
Why not the general client: it spends more CPU on a request than everything else that the gateway does.
Does not do: redirects, cookies, TLS, retries; header values must hold no line ends (they come from a parsed request).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

import httptools

IDLE_S = 2.0
"""uvicorn closes a connection after 5 idle seconds; one that is used just then would lose a request."""
MAX_IDLE = 256
HIGH_WATER_BYTES = 256 * 1024


class UpstreamError(Exception):
    """The connection could not be made or broke; the message says how."""


class _Connection(asyncio.Protocol):
    """One connection; reads one answer at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_head = False
        self._is_whole = False
        self._error = ""
        self._is_held = False
        self._keeps_alive = False

    # ---- from the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a TCP connection's
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"its answer is not HTTP ({error})")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("it hung up" if exc is None else type(exc).__name__)

    def _fail(self, why: str) -> None:
        if not self._is_whole and not self._error:
            self._error = why
        self._wake()

    # ---- from the parser ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_bytes += len(body)
        if self._num_bytes > HIGH_WATER_BYTES and not self._is_held and self._transport is not None:
            self._is_held = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._is_whole = True
        self._keeps_alive = bool(self._parser.should_keep_alive())  # the parser knows it only here
        self._wake()

    # ---- for the reader -----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def send(self, request: bytes) -> None:
        """Write a request and wait for the head of its answer.

        Raises:
            UpstreamError: the connection broke before.
        """
        if self._transport is None:
            raise UpstreamError("it hung up")
        self._begin()
        self._transport.write(request)
        while not self._has_head:
            if self._error:
                raise UpstreamError(self._error)
            await self._wait()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            UpstreamError: the connection broke before the end.
        """
        while True:
            if self._pieces:
                data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                self._num_bytes = 0
                if self._is_held and self._transport is not None:
                    self._is_held = False
                    self._transport.resume_reading()
                yield data
            elif self._is_whole:
                return
            elif self._error:
                raise UpstreamError(self._error)
            else:
                await self._wait()

    @property
    def has_piece(self) -> bool:
        return bool(self._pieces)

    def take_small(self) -> bytes | None:
        """Give the body if it came whole with the head and in one piece."""
        if not self._is_whole or self._is_held or len(self._pieces) != 1:
            return None
        return self._pieces.popleft()

    @property
    def can_be_used_again(self) -> bool:
        return (
            self._is_whole
            and not self._pieces
            and self._transport is not None
            and not self._transport.is_closing()
            and self._keeps_alive
        )

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True)
class Answer:
    """An answer whose head has come. Use it as an async context manager; leaving early closes the connection."""

    _upstream: Upstream
    _address: tuple[str, int]
    _connection: _Connection

    @property
    def status(self) -> int:
        return self._connection.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names in lower case."""
        return self._connection.headers

    @property
    def has_piece(self) -> bool:
        """Say whether some of the body is here already."""
        return self._connection.has_piece

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises: UpstreamError."""
        return self._connection.pieces()

    async def read(self) -> bytes:
        """Return the whole body. Raises: UpstreamError."""
        small = self._connection.take_small()
        return small if small is not None else b"".join([piece async for piece in self.pieces()])

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._upstream.give_back(self._address, self._connection)


@lru_cache(maxsize=1024)
def _address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if not parts.hostname or parts.port is None:
        raise UpstreamError("it has no address")
    return parts.hostname, parts.port


@dataclass(slots=True)
class Upstream:
    """Posts to replicas. Used from one event loop."""

    connect_timeout_s: float
    _idle: dict[tuple[str, int], deque[_Connection]] = field(default_factory=dict)

    async def post(self, url: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Send a request and return its answer as soon as the head is there.

        Args:
            url: address of a replica, `http://host:port`.

        Raises:
            UpstreamError: no connection, or it broke before the head.
        """
        address = _address_of(url)
        connection = self._take(address) or await self._connect(address)
        start = b"POST %b HTTP/1.1\r\nhost: %b:%d\r\n" % (path.encode("ascii"), address[0].encode("ascii"), address[1])
        lines = [b"%b: %b\r\n" % header for header in headers]
        try:
            await connection.send(b"".join((start, *lines, b"content-length: %d\r\n\r\n" % len(body), body)))
        except BaseException:  # also a client that goes away: closing tells the replica
            connection.close()
            raise
        return Answer(self, address, connection)

    def _take(self, address: tuple[str, int]) -> _Connection | None:
        idle = self._idle.get(address)
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, address: tuple[str, int]) -> _Connection:
        loop = asyncio.get_running_loop()
        for known, idle in list(self._idle.items()):  # addresses of replicas that are gone
            if not any(connection.is_open for connection in idle):
                del self._idle[known]
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(_Connection, *address)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"no connection ({type(error).__name__})") from None
        return connection

    def give_back(self, address: tuple[str, int], connection: _Connection) -> None:
        """Keep a connection for the next request, or close it."""
        idle = self._idle.setdefault(address, deque())
        if not connection.can_be_used_again or len(idle) >= MAX_IDLE:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        idle.append(connection)

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
