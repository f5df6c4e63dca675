"""From a parsed request to an answer: the engine's chunks of all prompts, whole or as server-sent events.

    request -> gate -> pin -> one engine request a prompt --chunks--> queue --> answer | events
                                                                        ^
                       client gone, time up, swap drained: abort -------+

Owns: one rollout request's life inside a replica.
Promises: whatever ends it, the engine's requests are aborted and the gate is left; a failure before the first event is
an error like that of an unstreamed request, a later one is told inside the stream.
Does not do: HTTP (replica.py), shapes (responses.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from hotloop.engines.base import Chunk, GenerateRequest
from hotloop.errors import HotloopError, ServiceError
from hotloop.service.admission import Gate
from hotloop.service.engine_data import Serving
from hotloop.service.hot_load_api import parse_drain_timeout
from hotloop.service.responses import Answer
from hotloop.service.rollout_request import (
    Kind,
    RolloutRequest,
    has_vendor_header,
    parse_rollout_request,
    read_model,
    split_model_name,
)
from hotloop.service.routing import check_pin, parse_pin
from hotloop.service.serving import Served
from hotloop.service.token_ids_only import TokenIdsOnly
from hotloop.service.wire_errors import error_body

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What every request of a replica shares."""

    replica_id: str
    served_name: str


@dataclass(slots=True)
class Rollout:
    """One request that has entered the gate."""

    request_id: str
    request: RolloutRequest
    served: Served
    answer: Answer
    serving: Serving
    began: float


class Rollouts:
    """Runs rollout requests on what the replica serves."""

    def __init__(self, settings: RolloutSettings, gate: Gate) -> None:
        self._settings = settings
        self._gate = gate
        self._running: dict[str, list[str]] = {}

    def engine_ids(self, request_id: str) -> list[str]:
        """Ids of the engine requests of a rollout request; empty when it is over."""
        return list(self._running.get(request_id, ()))

    @contextlib.asynccontextmanager
    async def enter(
        self, kind: Kind, body: Mapping[str, Any], headers: Mapping[str, str], served_now: Any, target: Any
    ) -> AsyncIterator[Rollout]:
        """Parse, pass the gate and check the pin; leave the gate at the end.

        Args:
            served_now: gives what is served at the moment of entry.
            target: gives (policy version or None, identity) that the replica is moving to.

        Raises:
            HotloopError: the codes of a rollout request.
        """
        identity = split_model_name(read_model(body), self._settings.served_name)
        pin = parse_pin(body, identity)
        wait_limit_s = parse_drain_timeout(headers)
        request_id = uuid.uuid4().hex
        await self._gate.enter(request_id, pin, wait_limit_s)
        try:
            served: Served = served_now()
            target_version, target_identity = target()
            check_pin(pin, served.policy_version, served.identity, target_version, target_identity)
            tokenizer = served.tokenizer or TokenIdsOnly()
            request = parse_rollout_request(kind, body, headers, tokenizer)
            request = _fit_to_context(request, served)
            options = replace(
                served.block_options,
                encoding=request.encoding,
                routed_experts_layers=request.routed_experts_layers,
            )
            answer = Answer(
                request,
                tokenizer,
                options,
                answer_id=("chatcmpl-" if kind == "chat" else "cmpl-") + request_id,
                created=int(time.time()),
                replica_id=self._settings.replica_id,
                served_name=self._settings.served_name,
                names_identity=bool(identity) or has_vendor_header(headers),
            )
            serving = Serving(self._settings.replica_id, served.policy_version, served.identity)
            yield Rollout(request_id, request, served, answer, serving, time.perf_counter())
        finally:
            await self._gate.leave(request_id)

    async def whole(self, rollout: Rollout) -> dict[str, Any]:
        """Generate everything and build the unstreamed answer."""
        chunks: dict[int, Chunk] = {}
        prompt_logprobs: dict[int, Sequence[float | None]] = {}
        async for index, chunk in self._chunks(rollout, stream=False):
            chunks[index] = chunk
            if chunk.prompt_logprobs is not None:
                prompt_logprobs[index // rollout.request.n] = chunk.prompt_logprobs
        answer = rollout.answer.whole(chunks, rollout.serving, prompt_logprobs)
        if "timing" in rollout.request.extra_fields:
            answer.setdefault("nvext", {})["timing"] = {"total_s": time.perf_counter() - rollout.began}
        return answer

    async def events(self, rollout: Rollout) -> AsyncGenerator[bytes]:
        """Yield the answer as server-sent events.

        Raises:
            HotloopError: before the first event only.
        """
        request = rollout.request
        completion_tokens = cached = 0
        has_begun = False
        try:
            async for index, chunk in self._chunks(rollout, stream=True):
                completion_tokens += len(chunk.completion.token_ids)
                cached += chunk.completion.cached_tokens
                piece = rollout.answer.piece(index, chunk, rollout.serving)
                has_begun = True
                yield b"data: " + orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"
            if request.include_usage:
                prompt_tokens = sum(len(prompt) for prompt in request.prompts)
                usage = rollout.answer.usage_piece(prompt_tokens, completion_tokens, cached, rollout.serving)
                yield b"data: " + orjson.dumps(usage) + b"\n\n"
        except HotloopError as error:
            if not has_begun:
                raise
            yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        yield DONE_EVENT

    async def _chunks(self, rollout: Rollout, *, stream: bool) -> AsyncIterator[tuple[int, Chunk]]:
        """Run one engine request per prompt and yield their chunks with the choice's index."""
        engine = rollout.served.engine
        assert engine is not None
        request = rollout.request
        queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue()
        generate = [self._engine_request(rollout, position) for position in range(len(request.prompts))]
        self._running[rollout.request_id] = [each.request_id for each in generate]

        generating = len(generate)

        async def pump(position: int, each: GenerateRequest) -> None:
            nonlocal generating
            try:
                async for chunk in engine.generate(each, stream=stream):
                    queue.put_nowait((position * request.n + chunk.index, chunk))
                queue.put_nowait(None)
            except Exception as error:  # handed to the reader, which raises it in the request's own task
                queue.put_nowait(error)
            finally:
                generating -= 1
                if generating == 0:  # a client that reads slowly must not hold a swap up
                    await self._gate.leave(rollout.request_id)

        tasks = [asyncio.create_task(pump(position, each)) for position, each in enumerate(generate)]
        try:
            open_streams = len(tasks)
            while open_streams:
                item = await queue.get()
                if item is None:
                    open_streams -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self._running.pop(rollout.request_id, None)
            if any(not task.done() for task in tasks):
                for each in generate:
                    await engine.abort(each.request_id)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _engine_request(self, rollout: Rollout, position: int) -> GenerateRequest:
        request, served = rollout.request, rollout.served
        wants_record = "engine_data" in request.extra_fields
        assert served.engine is not None
        return GenerateRequest(
            request_id=f"{rollout.request_id}-{position:06d}",
            prompt_ids=request.prompts[position],
            params=replace(request.params, seed=(request.params.seed or 0) + position),
            n=request.n,
            cache_namespace=served.namespaces.namespace_of(request.session_id, request.cache_salt),
            top_logprobs=request.top_logprobs,
            top_logprobs_kind=request.top_logprobs_kind,
            return_support=wants_record,
            return_routed_experts=request.wants_routes and served.engine.info.num_experts > 0,
            return_prompt_logprobs=request.wants_prompt_logprobs,
        )


def _fit_to_context(request: RolloutRequest, served: Served) -> RolloutRequest:
    """Cut the answer's limit to what the context leaves.

    Raises:
        ServiceError: `prompt_too_long`.
    """
    assert served.engine is not None
    context = served.engine.info.max_context
    longest = max(len(prompt) for prompt in request.prompts)
    if longest >= context:
        raise ServiceError(
            "prompt_too_long",
            f"the prompt has {longest} tokens and the context {context}, so no token can be generated",
            do="Send a shorter prompt.",
            details={"param": "messages" if request.kind == "chat" else "prompt"},
        )
    limit = min(request.params.max_new_tokens, context - longest)
    return replace(request, params=replace(request.params, max_new_tokens=limit))
