"""JSON in and out of the service: reads a body within a size limit, writes with orjson.

Owns: the body limit and the plain words for a body that is not JSON.
Promises: a body above the limit is refused while it arrives, never collected first.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from hotloop.errors import ServiceError


class JsonResponse(Response):
    """A JSON answer written by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


async def read_body(request: Request, max_bytes: int, timeout_s: float | None = None) -> bytes:
    """Read a request body of at most `max_bytes`, all of it within `timeout_s`.

    Raises:
        ServiceError: `request_too_large`, `request_timeout`.
        ClientDisconnect: the client went away before its end.
    """
    return await receive_body(request.receive, request.headers.get("content-length", ""), max_bytes, timeout_s)


async def receive_body(receive: Receive, declared: str, max_bytes: int, timeout_s: float | None) -> bytes:
    """Read a body from ASGI's own messages; as `read_body`.

    Args:
        declared: the content-length header, or nothing.
    """
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _join(receive, max_bytes)
    except TimeoutError:
        raise ServiceError(
            "request_timeout", f"the body did not arrive within {timeout_s:g} s", do="Send the body without pauses."
        ) from None


async def _join(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return part if not parts else b"".join((*parts, part))
        parts.append(part)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ServiceError: `invalid_json`, also for JSON that is not an object.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ServiceError("invalid_json", f"the body is not JSON: {error}", do="Send a JSON object.") from None
    if not isinstance(parsed, dict):
        raise ServiceError(
            "invalid_json", f"the body is a JSON {type(parsed).__name__}, not an object", do="Send a JSON object."
        )
    return parsed


def _too_large(max_bytes: int) -> ServiceError:
    return ServiceError(
        "request_too_large",
        f"the body is above the limit of {max_bytes} bytes",
        do="Send a smaller request, or raise limits.max_body_bytes.",
    )
