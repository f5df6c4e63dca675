"""How the lab reads a request's body and writes an answer or an error.

Promises: a body is at most MAX_BODY_BYTES of JSON; a HotloopError becomes `{"error": {"code", "message", ...}}` with
status 400, or 424 when something has to be installed first; work that blocks runs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from hotloop.errors import EXIT_ENVIRONMENT, HotloopError, InputError

MAX_BODY_BYTES = 2 << 20


async def answer_now(work: Callable[[], Any]) -> Response:
    async def run() -> Any:
        return await asyncio.to_thread(work)

    return await answer_later(run)


async def answer_later(work: Callable[[], Awaitable[Any]]) -> Response:
    try:
        value = await work()
    except HotloopError as error:
        return answer_error(error)
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-store"})


def answer_error(error: HotloopError, status: int | None = None) -> Response:
    problems = getattr(error, "problems", ())
    message = " ".join(str(problem) for problem in problems) if len(problems) > 1 else str(error)
    body = {"error": {"code": error.code, "message": message, "do": "", "details": error.details}}
    chosen = status or (424 if error.exit_code == EXIT_ENVIRONMENT else 400)
    return Response(orjson.dumps(body, default=str), status_code=chosen, media_type="application/json")


async def read_body(request: Request) -> Mapping[str, Any]:
    """Read a JSON object of bounded size.

    Raises: InputError `body_too_large`, `body_not_json`.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise InputError("body_too_large", f"the request is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    try:
        body = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise InputError("body_not_json", f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InputError("body_not_json", "the request is no JSON object")
    return body


def read_whole(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else default
