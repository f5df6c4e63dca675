"""The HTTP/1.1 reader of our servers, with bounds for clients that send slowly or without end.

    bytes --> head (request line and headers): at most MAX_HEAD_BYTES, within `receive_timeout_s`
          --> body: the application's business (json_body.py), until it has answered;
              what still comes after the answer is thrown away, for `receive_timeout_s`

Owns: those three bounds, which uvicorn leaves to a proxy in front, and telling an application that its client is gone:
a call, where ASGI has each request keep a task that reads on.
Promises: a connection that sends no whole head in time is closed, and costs no more memory than the bound.
Does not do: parsing, keep-alive, flow control (uvicorn).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hotloop.service.joined_head import JoinedHead

MAX_HEAD_BYTES = 64 * 1024
CONNECTION = "hotloop.connection"
"""Under this name a request's `state` holds its `BoundedHttp`."""


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    receive_timeout_s = 30.0
    _head_bytes = 0
    _is_in_head = True
    _is_lost = False
    _timer: asyncio.TimerHandle | None = None
    _when_lost: Callable[[], object] | None = None

    def watch(self, then: Callable[[], object]) -> None:
        """Have `then` called once the client is gone: at once if it is. One watch at a time: the running request's."""
        self.flow.resume_reading()  # an end is only seen while reading
        self._when_lost = then
        if self._is_lost:
            then()

    def unwatch(self, then: Callable[[], object]) -> None:
        """End a watch; does nothing when the next request's has replaced it."""
        if self._when_lost is then:
            self._when_lost = None

    def join_head(self) -> None:
        """Send the head that comes next together with the first piece of its body."""
        self._writing.hold_next()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        self._writing = JoinedHead(transport)
        super().connection_made(self._writing)
        self._start_timer(self._end_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_timer()
        super().connection_lost(exc)
        if self._when_lost is not None:
            self._when_lost()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "Request Header Fields Too Large", "headers_too_large", "the headers are above 64 KiB")
        elif self._timer is None:  # the rest of a head; most come whole and need no timer
            self._start_timer(self._end_slow_head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._stop_timer()
        self.scope["state"][CONNECTION] = self

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        has_unread_body = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if has_unread_body and not self.transport.is_closing():
            self._start_timer(self.transport.close)

    def _start_timer(self, then: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.receive_timeout_s, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow_head(self) -> None:
        self._refuse(408, "Request Timeout", "request_timeout", "the headers did not arrive in time")

    def _refuse(self, status: int, phrase: str, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        error = {"type": "invalid_request_error", "code": code, "message": f"{message} [{code}].", "param": None}
        body = orjson.dumps({"error": {**error, "identity": None, "details": {}, "retryable": False}})
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def bounded_http(receive_timeout_s: float) -> type[HttpToolsProtocol]:
    """Make the protocol class for one server."""
    return type("BoundedHttp", (BoundedHttp,), {"receive_timeout_s": receive_timeout_s})
