"""The gateway's hot path: one rollout request in, one replica's answer out, bytes untouched.

    client --> body within its limit --> pin, affinity --> room? --> replica --> answer piece by piece --> client
                                                             |
                                             bounded queue, 429 beyond it

Raw ASGI, because each layer costs a share of a CPU that a proxy cannot spare.
Promises: a stream is passed on unbuffered; a client that goes away closes the replica's connection, which aborts its
work; a request whose replica dies before a byte was answered is tried once on another; after that the client is told.
Does not do: the rules of choosing (routing.py), counting health (membership.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client import Counter
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hotloop.errors import HotloopError, ReplicaLost, ServiceError
from hotloop.service.bounded_http import CONNECTION, BoundedHttp
from hotloop.service.config import LimitsConfig
from hotloop.service.json_body import parse_object, receive_body
from hotloop.service.membership import Member, Membership
from hotloop.service.metrics import Metrics
from hotloop.service.rollout_request import read_model, split_model_name
from hotloop.service.routing import affinity_key_of, choose_replica, parse_pin
from hotloop.service.upstream import Upstream, UpstreamError
from hotloop.service.waiting_line import WaitingLine
from hotloop.service.wire_errors import error_body, error_response, internal_error

WAKE_EVERY_S = 1.0
"""A waiting request looks again so often: a replica may have become ready without another request's end."""
LAST_WORDS_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
logger = logging.getLogger(__name__)
_PASSED_ON = frozenset({b"content-type", b"x-hotloop-ignored", b"retry-after", b"cache-control"})
_BROKEN = frozenset({500, 502})
"""Answers that lie with the replica: enough of them in a row take it out for a while."""


@dataclass(slots=True)
class _Outcome:
    """What has been sent to the client so far."""

    started: bool = False
    is_stream: bool = False


class DataPlane:
    """Routes and proxies rollout requests."""

    def __init__(
        self,
        membership: Membership,
        limits: LimitsConfig,
        served_name: str,
        upstream: Upstream,
        token: str,
        metrics: Metrics,
    ) -> None:
        self._membership = membership
        self._limits = limits
        self._served_name = served_name
        self._upstream = upstream
        self._token_header = (b"x-hotloop-replica-token", token.encode())
        self._metrics = metrics
        self._waiting = 0
        self._line = WaitingLine()
        self._answered: dict[int, Counter] = {}
        """By status: looking a label up costs more than counting."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]) -> None:
        """Answer one request under `/v1/chat/completions` or `/v1/completions`.

        Args:
            headers: those of the scope as text, the first of each name.
        """
        outcome = _Outcome()
        limits = self._limits
        try:
            declared = headers.get("content-length", "")
            try:
                raw = await receive_body(receive, declared, limits.max_body_bytes, limits.receive_timeout_s)
            except ClientDisconnect:
                return
            body = parse_object(raw)
            try:
                async with asyncio.timeout(limits.request_timeout_s):
                    await self._until_gone(scope, self._route(scope, raw, body, headers, send, outcome))
            except TimeoutError:
                raise ServiceError(
                    "request_timeout",
                    f"the answer was not complete within {limits.request_timeout_s:g} s",
                    do="Ask for fewer tokens, or raise limits.request_timeout_s.",
                ) from None
        except HotloopError as error:
            await self._refuse(error, outcome, scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and this request took longer than its patience
            await self._refuse(_shutting_down(), outcome, scope, receive, send)
            raise
        except Exception as error:
            logger.exception("%s", scope["path"])
            await self._refuse(internal_error(error), outcome, scope, receive, send)

    async def _refuse(self, error: HotloopError, outcome: _Outcome, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or end what has begun with one."""
        self._metrics.errors.labels(error.code).inc()
        if not outcome.started:
            await error_response(error)(scope, receive, send)
            return
        with contextlib.suppress(TimeoutError):  # a reader that does not read is not told
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                await _end_broken_stream(send, error, outcome)

    async def _until_gone(self, scope: Scope, answering: Coroutine[Any, Any, None]) -> None:
        """Await an answer, and give up when the client goes away.

        The connection cancels the request's own task then: a second task that waits for it would cost more than the
        rest of this file.
        """
        connection: BoundedHttp = scope["state"][CONNECTION]
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        def leave() -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()

        connection.watch(leave)
        try:
            await answering
        except (asyncio.CancelledError, HotloopError):
            if not is_gone:
                raise
        finally:
            connection.unwatch(leave)
            if is_gone:
                task.uncancel()

    async def _route(
        self,
        scope: Scope,
        raw: bytes,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        send: Send,
        outcome: _Outcome,
    ) -> None:
        pin = parse_pin(body, split_model_name(read_model(body), self._served_name))
        key = affinity_key_of(headers, body)
        tried: set[str] = set()
        while True:
            member = await self._take(pin, key, tried)
            try:
                status = await self._proxy(member, scope, raw, send, outcome)
                if status in _BROKEN:
                    member.note_failure(asyncio.get_running_loop().time())
                else:
                    member.note_success()
                return
            except ReplicaLost:
                member.note_failure(asyncio.get_running_loop().time())
                if outcome.started or tried:
                    raise
                tried.add(member.replica_id)
            finally:
                member.in_flight -= 1
                self._line.wake_one()

    async def _take(self, pin: Any, key: str, tried: set[str]) -> Member:
        """Choose a replica with room, waiting in the bounded queue while there is none.

        Raises:
            ServiceError: `no_replicas`, `queue_full`.
        """
        members = self._membership.members
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.queue_timeout_s
        is_waiting = False
        try:
            while True:
                loads = self._membership.loads()
                untried = [load for load in loads if load.replica_id not in tried]
                choice = choose_replica(untried if any(load.ready for load in untried) else loads, pin, key)
                if choice.replica_id:
                    members[choice.replica_id].in_flight += 1
                    return members[choice.replica_id]
                if not is_waiting:
                    if self._waiting >= self._limits.max_queue:
                        raise _queue_full(f"all replicas are full and {self._waiting} requests wait already")
                    self._waiting += 1
                    is_waiting = True
                    self._metrics.waiting.set(self._waiting)
                remaining = deadline - loop.time()
                if remaining <= 0:
                    raise _queue_full(f"no replica had room within {self._limits.queue_timeout_s:g} s")
                await self._line.wait(min(remaining, WAKE_EVERY_S))
        finally:
            if is_waiting:
                self._waiting -= 1
                self._metrics.waiting.set(self._waiting)

    async def _proxy(self, member: Member, scope: Scope, raw: bytes, send: Send, outcome: _Outcome) -> int:
        """Pass one request to one replica and its answer back.

        Returns: the status of the answer.

        Raises:
            ReplicaLost: the replica died or hung up.
        """
        onward = [self._token_header, _JSON, *(header for header in scope["headers"] if header[0] in _REQUEST_HEADERS)]
        try:
            async with await self._upstream.post(member.url, scope["path"], onward, raw) as answer:
                passed = [header for header in answer.headers if header[0] in _PASSED_ON]
                passed.append((b"x-hotloop-replica", member.replica_id.encode()))
                outcome.is_stream = any(name == b"content-type" and _is_events(value) for name, value in passed)
                self._count(answer.status)
                connection: BoundedHttp = scope["state"][CONNECTION]
                if outcome.is_stream:
                    if answer.has_piece:
                        connection.join_head()
                    await send({"type": "http.response.start", "status": answer.status, "headers": passed})
                    outcome.started = True
                    async for piece in answer.pieces():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
                    return answer.status
                whole = await answer.read()
                passed.append((b"content-length", b"%d" % len(whole)))
                connection.join_head()
                await send({"type": "http.response.start", "status": answer.status, "headers": passed})
                outcome.started = True
                await send({"type": "http.response.body", "body": whole})
                return answer.status
        except UpstreamError as error:
            raise ReplicaLost(
                "replica_lost",
                f"replica {member.replica_id} broke off ({error})",
                do="Retry with the same affinity key.",
                details={"replica_id": member.replica_id},
                retryable=True,
            ) from None

    def _count(self, status: int) -> None:
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = self._metrics.requests.labels(str(status))
        counter.inc()


def _is_events(content_type: bytes) -> bool:
    return content_type.startswith(b"text/event-stream")


_JSON = (b"content-type", b"application/json")
_REQUEST_HEADERS = frozenset(
    {
        b"x-multi-turn-session-id",
        b"x-session-affinity",
        b"x-hot-load-drain-timeout",
        b"x-fireworks-hot-load-drain-timeout",
        b"fireworks-model",
        b"fireworks-deployment",
    }
)


def _queue_full(why: str) -> ServiceError:
    return ServiceError(
        "queue_full", why, do="Retry in 1 s, or add replicas.", details={"retry_after_s": 1}, retryable=True
    )


def _shutting_down() -> ServiceError:
    return ServiceError(
        "shutting_down",
        "the deployment ends",
        do="Retry when it is back.",
        details={"retry_after_s": 1},
        retryable=True,
    )


async def _end_broken_stream(send: Send, error: HotloopError, outcome: _Outcome) -> None:
    """Tell the reader of a stream why it ends; any other answer is cut, so that it cannot pass for whole."""
    if outcome.is_stream:
        event = b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        await send({"type": "http.response.body", "body": event})
