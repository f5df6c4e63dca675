"""One replica: the application behind the gateway that answers rollouts and keeps its engine current.

    gateway --(token)--> /v1/...                  -> Rollouts -> engine
                         /internal/target ...     -> Reconciler (its own task)
                         /internal/events         <- every change of status, and one line a second

Owns: the HTTP surface of a replica.
Promises: it answers only to its gateway's token; a client that goes away aborts its requests in the engine.
Does not do: keys, pins' routing, queues (gateway); the process (replica_process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotloop.errors import HotloopError
from hotloop.service.admission import Gate
from hotloop.service.auth import check_replica_token
from hotloop.service.hot_load_api import LoadRequest
from hotloop.service.json_body import JsonResponse, parse_object, read_body
from hotloop.service.reconciler import Reconciler, Target, Wiring
from hotloop.service.rollout_request import Kind, render_ignored
from hotloop.service.rollouts import Rollouts, RolloutSettings
from hotloop.service.wire_errors import HANDLERS, error_response

HEARTBEAT_S = 1.0


class Replica:
    """Reconciler, gate and rollouts of one process."""

    def __init__(self, wiring: Wiring, settings: RolloutSettings, token: str, max_body_bytes: int) -> None:
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._changed = asyncio.Event()
        self.gate = Gate()
        self.rollouts = Rollouts(settings, self.gate)
        self.reconciler = Reconciler(wiring, self.gate, self._on_status, self.rollouts.engine_ids)
        self._task: asyncio.Task[None] | None = None

    def app(self) -> ASGIApp:
        """Build the application."""
        routes = [
            Route("/v1/chat/completions", self._rollout_endpoint("chat"), methods=["POST"]),
            Route("/v1/completions", self._rollout_endpoint("text"), methods=["POST"]),
            Route("/internal/target", self._target, methods=["POST"]),
            Route("/internal/activate", self._activate, methods=["POST"]),
            Route("/internal/cancel", self._cancel, methods=["POST"]),
            Route("/internal/events", self._events, methods=["GET"]),
        ]
        application = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=HANDLERS)
        application.router.redirect_slashes = False
        return _TokenGuard(application, self._token)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._task = asyncio.create_task(self.reconciler.run())
        try:
            yield
        finally:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            engine = self.reconciler.served.engine
            if engine is not None:
                await engine.close()

    def _on_status(self) -> None:
        self._changed.set()

    # ---- rollouts -----------------------------------------------------------------------------------------------

    def _rollout_endpoint(self, kind: Kind) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = parse_object(await read_body(request, self._max_body_bytes))
            stack = contextlib.AsyncExitStack()
            rollout = await stack.enter_async_context(
                self.rollouts.enter(kind, body, request.headers, lambda: self.reconciler.served, self._moving_to)
            )
            try:
                headers = {}
                if rollout.request.ignored:
                    headers["x-hotloop-ignored"] = render_ignored(rollout.request.ignored)
                if rollout.request.stream:
                    events = self.rollouts.events(rollout)
                    stack.push_async_callback(events.aclose)
                    first = await self._until_gone(request, anext(events))  # a refusal still gets its own status
                    return _Stream(first or b"", events, stack.pop_all(), headers)
                return JsonResponse(await self._until_gone(request, self.rollouts.whole(rollout)), headers=headers)
            finally:
                await stack.aclose()

        return endpoint

    def _moving_to(self) -> tuple[int | None, str]:
        return self.reconciler.target_version, self.reconciler.status.loading.target or ""

    async def _until_gone(self, request: Request, answer: Awaitable[Any]) -> Any:
        """Wait for an answer or its first event; give it up and return None when the client goes away."""
        work = asyncio.ensure_future(answer)
        gone = asyncio.create_task(_wait_for_disconnect(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                return None  # nobody reads it
            return work.result()
        finally:
            gone.cancel()
            work.cancel()

    # ---- what the gateway says ----------------------------------------------------------------------------------

    async def _target(self, request: Request) -> Response:
        body = parse_object(await read_body(request, self._max_body_bytes))
        load_request = LoadRequest.from_json(body["request"])
        target = Target(body["load_id"], load_request, body["hints"], policy_version=body["policy_version"])
        if body["may_activate"]:
            target.may_activate.set()
        self.reconciler.set_target(target)
        return JsonResponse({})

    async def _activate(self, request: Request) -> Response:
        body = parse_object(await read_body(request, self._max_body_bytes))
        self.reconciler.activate(body["load_id"])
        return JsonResponse({})

    async def _cancel(self, request: Request) -> Response:
        body = parse_object(await read_body(request, self._max_body_bytes))
        self.reconciler.cancel(body["load_id"])
        return JsonResponse({})

    async def _events(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            while True:
                self._changed.clear()
                self.reconciler.status.in_flight = self.gate.in_flight
                yield orjson.dumps(self.reconciler.status.to_wire()) + b"\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)

        return StreamingResponse(lines(), media_type="application/x-ndjson")


class _Stream(StreamingResponse):
    """Server-sent events that leave the gate when they end, however they end."""

    def __init__(
        self, first: bytes, rest: AsyncIterator[bytes], stack: contextlib.AsyncExitStack, headers: dict[str, str]
    ) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield first
            async for event in rest:
                yield event

        super().__init__(events(), media_type="text/event-stream", headers={"cache-control": "no-store", **headers})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stack.aclose()


class _TokenGuard:
    """Answers nobody but the gateway."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_replica_token(Request(scope).headers, self._token)
            except HotloopError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _wait_for_disconnect(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
