"""A connection's writing side that sends an answer's head together with the first piece of its body.

    head --> held --+
    first piece ----+--> one write: one system call, one packet, one wake-up of the reader

Owns: that one held write. Promises: nothing is held longer than until the next write or the end of the connection; the
order of bytes stays.
Does not do: joining pieces: each is passed on as it comes.
"""

from __future__ import annotations

import asyncio
from typing import Any


class JoinedHead(asyncio.Transport):
    """Stands for a connection's transport towards a server that writes head and body by themselves."""

    __slots__ = ("_held", "_holds_next", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self._holds_next = False

    def hold_next(self) -> None:
        """Keep the next write until the one after it."""
        self._holds_next = True

    def flush(self) -> None:
        """Send what is held."""
        self._holds_next = False
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def write(self, data: Any) -> None:
        if self._holds_next:
            self._holds_next = False
            self._held += data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
