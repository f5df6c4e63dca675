"""Stand-ins of the HTTP routes of SGLang 0.5.23 and vLLM 0.32/0.33, on top of the fake engine.

    adapter --HTTP--> routes --> FakeEngine, stepped by a task of the stand-in, one token a step

Owns: what the adapters may rely on, as read in the published wheels: names, shapes, defaults and refusals of the
routes; streams that repeat everything so far (SGLang) or bring new tokens only (vLLM); versions as labels. The weights
come from the checkpoint directory that a request names, byte for byte.
Does not do: text, batching, the OpenAI routes. Expert routes are made up from the position (`route_of`).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from hotloop.engines.base import Chunk, EngineSettings, GenerateRequest, TensorRange, WeightUpdate
from hotloop.engines.fake import FakeEngine
from hotloop.errors import HotloopError
from hotloop.types import SamplingParams

STEP_S = 0.003


def route_of(row: int, layer: int, rank: int, num_experts: int) -> int:
    """The made-up expert of a position."""
    return (7 * row + 3 * layer + rank) % num_experts


def read_ranges(directory: Path) -> list[TensorRange]:
    """Every tensor of a checkpoint directory as one range."""
    data = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ranges = []
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            ranges.append(TensorRange(name, np.array([0]), np.array([end - begin]), data[begin:end]))
    return ranges


@dataclass
class Grown:
    """One completion as far as it has come."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0

    def add(self, chunk: Chunk) -> None:
        answer = chunk.completion
        self.ids += answer.token_ids
        self.logprobs += answer.logprobs
        if answer.top_logprobs is not None:
            rows = zip(answer.top_logprobs.token_ids, answer.top_logprobs.logprobs, strict=True)
            self.top += [list(zip(*row, strict=True)) for row in rows]
        for span in answer.version_spans:
            self.versions += [span.policy_version] * (span.end - span.start)
        self.cached += answer.cached_tokens


class StandIn:
    """What both servers share: an engine, its clock, its labels, its checkpoint."""

    def __init__(self, model_path: Path, *, sends_spans: bool = True) -> None:
        self.sends_spans = sends_spans
        """False plays a server from before `weight_versions`."""
        self.refuses_updates = ""
        """`200` answers updates with 200 and success false, `400` with 400."""
        self.calls: list[tuple[str, Any]] = []
        """Every control call, in order."""
        self.is_paused = False
        self._load_config(model_path)
        self._labels = ["default"]
        self._running: dict[str, str] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    def _load_config(self, model_path: Path) -> None:
        config = json.loads((model_path / "config.json").read_text())
        self.layers = int(config["num_hidden_layers"])
        self.ties_head = bool(config.get("tie_word_embeddings", True))
        self.experts = int(config.get("num_experts") or 0)
        self.top_k = int(config.get("num_experts_per_tok") or 0)
        settings = EngineSettings(
            kind="fake",
            policy_dir=str(model_path),
            max_context=int(config.get("max_position_embeddings") or 64),
            options={"manual": True},
        )
        self.engine = FakeEngine.open(settings)

    # ---- life ---------------------------------------------------------------------------------------------------

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def start(self) -> None:
        application = web.Application(client_max_size=2**26)
        application.add_routes(self.routes())
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._clock = asyncio.create_task(self._step())

    async def stop(self) -> None:
        self._clock.cancel()
        await self.engine.close()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self.is_paused and self.engine.num_active:
                await self.engine.advance()

    # ---- weights ------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self._labels[-1]

    async def install(self, directory: Path, label: str, *, stale: frozenset[str] = frozenset()) -> None:
        """Read a checkpoint, waiting for running requests as a server does that is not paused.

        Args:
            stale: tensors that the server goes on using as they were.
        """
        while not self.is_paused and self.engine.num_active:
            await asyncio.sleep(STEP_S)
        ranges = [each for each in read_ranges(directory) if each.name not in stale]
        self._labels.append(label)
        await self.engine.pause()
        await self.engine.write_weights(WeightUpdate(len(self._labels) - 1, ranges=ranges))
        await self.engine.resume()

    async def relabel(self, label: str) -> None:
        self._labels.append(label)
        await self.engine.pause()
        await self.engine.write_weights(WeightUpdate(len(self._labels) - 1))
        await self.engine.resume()

    def spans(self, grown: Grown) -> list[dict[str, Any]]:
        """Labels over output tokens."""
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(grown.versions):
            if spans and spans[-1]["version"] == self._labels[version]:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": self._labels[version], "start": at, "end": at + 1})
        return spans

    def routes_of(self, rows: int, dtype: str) -> Any:
        shape = (rows, self.layers, self.top_k)
        return np.fromfunction(lambda r, layer, k: (7 * r + 3 * layer + k) % self.experts, shape).astype(dtype)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def run(self, call_id: str, request: GenerateRequest) -> AsyncIterator[tuple[Grown, Chunk]]:
        """Run one completion and give what it has after each token."""
        self._running[call_id] = request.request_id
        grown = Grown()
        try:
            async for chunk in self.engine.generate(request, stream=True):
                grown.add(chunk)
                yield grown, chunk
        finally:
            self._running.pop(call_id, None)

    async def abort_matching(self, prefix: str) -> None:
        for call_id in [one for one in self._running if one.startswith(prefix)]:
            await self.engine.abort(self._running[call_id])


def _request(
    call_id: str, ids: list[int], limit: int, raw: dict[str, Any], seed: Any, **options: Any
) -> GenerateRequest:
    params = SamplingParams(
        limit,
        temperature=raw.get("temperature", 1.0),
        top_p=raw.get("top_p", 1.0),
        top_k=raw.get("top_k") or -1,
        min_p=raw.get("min_p", 0.0),
        stop_token_ids=tuple(raw.get("stop_token_ids") or ()),
        stop=tuple(raw.get("stop") or ()),
    )
    seeds = None if seed is None else [seed]
    return GenerateRequest(call_id, ids, params, seeds=seeds, top_logprobs_kind="raw", **options)


class SglangStandIn(StandIn):
    """SGLang's native routes."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/update_weights_from_disk", self._update),
            web.post("/update_weight_version", self._label),
            web.post("/flush_cache", self._flush),
            web.get("/model_info", self._info),
        ]

    async def _generate(self, call: web.Request) -> web.StreamResponse:
        body = await call.json()
        raw = body["sampling_params"]
        request = _request(
            body["rid"],
            body["input_ids"],
            raw.get("max_new_tokens", 128),
            raw,
            raw.get("sampling_seed"),
            top_logprobs=body.get("top_logprobs_num", 0),
            cache_namespace=body.get("cache_salt") or "",
        )
        run = self.run(body["rid"], request)
        try:
            if not body.get("stream"):
                async for grown, chunk in run:
                    if chunk.is_last:
                        return web.json_response(self._answer(body, grown, chunk))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            is_begun = False
            async for grown, chunk in run:
                if not is_begun:
                    is_begun = True
                    await response.prepare(call)
                await response.write(b"data: " + json.dumps(self._answer(body, grown, chunk)).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        except HotloopError as error:
            return web.json_response({"error": {"message": str(error), "type": "BadRequest"}}, status=400)
        finally:
            await run.aclose()  # type: ignore[attr-defined]  # an async generator

    def _answer(self, body: dict[str, Any], grown: Grown, chunk: Chunk) -> dict[str, Any]:
        reason = None
        if chunk.is_last:
            reason = {"type": chunk.finish_reason}
            if chunk.completion.stop_reason is not None:
                reason["matched"] = chunk.completion.stop_reason  # type: ignore[assignment]  # a text or a token id
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(grown.ids),
            "cached_tokens": grown.cached,
            "weight_version": self.label,
        }
        if self.sends_spans:
            meta["weight_versions"] = self.spans(grown)
        if body.get("return_logprob"):
            pairs = zip(grown.logprobs, grown.ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [[[logprob, token, None] for token, logprob in row] for row in grown.top]
        if body.get("return_routed_experts") and chunk.is_last:
            rows = len(body["input_ids"]) + len(grown.ids) - 1
            meta["routed_experts"] = base64.b64encode(self.routes_of(rows, "<i4").tobytes()).decode()
        return {"text": "", "output_ids": list(grown.ids), "meta_info": meta}

    async def _abort(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("abort", body))
        if body.get("abort_all") or body.get("rid"):
            await self.abort_matching("" if body.get("abort_all") else body["rid"])
        return web.Response()

    async def _pause(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("pause", body))
        if body.get("mode", "abort") == "abort":
            await self.abort_matching("")
        self.is_paused = True
        return web.json_response({"message": "paused", "status": "ok"})

    async def _continue(self, call: web.Request) -> web.Response:
        self.calls.append(("continue", await call.json()))
        self.is_paused = False
        return web.json_response({"message": "continued", "status": "ok"})

    async def _update(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("update", body))
        if self.refuses_updates:
            answer = {"success": False, "message": "out of memory", "num_paused_requests": 0}
            return web.json_response(answer, status=int(self.refuses_updates))
        path = Path(body["model_path"])
        if not (path / "model.safetensors").is_file():
            return web.json_response({"success": False, "message": "no such checkpoint"}, status=400)
        if body.get("abort_all_requests"):
            await self.abort_matching("")
        if body.get("flush_cache", True) and self.is_paused and self.engine.num_active:
            return web.json_response({"success": False, "message": "cannot flush while requests run"}, status=400)
        await self.install(path, body.get("weight_version") or self.label)
        self.is_paused = self.is_paused and bool(body.get("keep_pause"))
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": self.engine.num_active})

    async def _label(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("label", body))
        if body.get("abort_all_requests", True):
            await self.abort_matching("")
        await self.relabel(body["new_version"])
        return web.json_response({"success": True, "message": "ok", "new_version": body["new_version"]})

    async def _flush(self, call: web.Request) -> web.Response:
        return web.Response(status=400 if self.engine.num_active else 200, text="flush")

    async def _info(self, call: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "is_generation": True})


class VllmStandIn(StandIn):
    """vLLM's token route and, as with VLLM_SERVER_DEV_MODE=1, its RL routes.

    On a `device` "cpu" a tied head stays as it was when `reload_weights` reads a checkpoint, as in 0.32.
    """

    pause_mode = ""
    device = "cuda"
    id_prefix = "generate-tokens-"
    """What the token route puts before a request's id; aborts name the whole."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/inference/v1/generate", self._generate),
            web.post("/abort_requests", self._abort),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.get("/is_paused", self._is_paused),
            web.post("/collective_rpc", self._rpc),
            web.post("/update_weight_version", self._label),
            web.post("/reset_prefix_cache", self._reset),
            web.get("/weight_info", self._info),
            web.get("/server_info", self._server_info),
        ]

    async def _generate(self, call: web.Request) -> web.StreamResponse:
        body = await call.json()
        salt = body.get("cache_salt") or ""
        if len(salt) > 128 or set(salt) & set("@/\\\0"):  # as 0.32 refuses it
            message = (
                "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\', or NUL."
            )
            return web.json_response({"error": {"message": message, "type": "BadRequestError"}}, status=400)
        if self.is_paused and self.pause_mode in ("abort", "wait"):
            return web.json_response({"error": {"message": "paused", "type": "ServiceUnavailable"}}, status=503)
        raw = body["sampling_params"]
        request = _request(
            body["request_id"],
            body["token_ids"],
            raw.get("max_tokens", 16),
            raw,
            raw.get("seed"),
            top_logprobs=raw.get("logprobs") or 0,
            cache_namespace=salt,
        )
        run = self.run(body["request_id"], request)
        try:
            if not body.get("stream"):
                async for grown, chunk in run:
                    if chunk.is_last:
                        choice = self._choice(body, grown, 0, chunk)
                        return web.json_response(
                            {"request_id": self.id_prefix + body["request_id"], "choices": [choice]}
                        )
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            sent = 0
            async for grown, chunk in run:
                if not response.prepared:
                    await response.prepare(call)
                choice = self._choice(body, grown, sent, chunk)
                sent = len(grown.ids)
                event = {"request_id": self.id_prefix + body["request_id"], "choices": [choice]}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        except HotloopError as error:
            return web.json_response({"error": {"message": str(error), "type": "BadRequestError"}}, status=400)
        finally:
            await run.aclose()  # type: ignore[attr-defined]  # an async generator

    def _choice(self, body: dict[str, Any], grown: Grown, start: int, chunk: Chunk) -> dict[str, Any]:
        """One choice with the tokens from `start` on; spans and routes only at the end."""
        content = []
        for at in range(start, len(grown.ids)):
            token, logprob = grown.ids[at], grown.logprobs[at]
            best = grown.top[at] if grown.top else []
            listed = [(token, logprob), *(pair for pair in best if pair[0] != token)]
            # Cut to the number that was asked for, the sampled token included.
            listed = listed[: max(body["sampling_params"].get("logprobs") or 0, 1)]
            rows = [{"token_id": one, "logprob": value, "rank": 1} for one, value in listed]
            content.append({"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": rows})
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": chunk.finish_reason if chunk.is_last else None,
            "stop_reason": chunk.completion.stop_reason if chunk.is_last else None,
            "token_ids": grown.ids[start:],
            "logprobs": {"content": content},
        }
        if chunk.is_last:
            if self.sends_spans:
                choice["weight_versions"] = self.spans(grown)
            if self.experts and grown.ids:
                file = io.BytesIO()
                np.save(file, self.routes_of(len(body["token_ids"]) + len(grown.ids) - 1, "u1"))
                choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return choice

    async def _abort(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("abort", body))
        ids = body.get("request_ids") or [self.id_prefix + call_id for call_id in self._running]
        for call_id in [one for one in self._running if self.id_prefix + one in ids]:
            await self.engine.abort(self._running[call_id])
        return web.json_response({"status": "aborted", "aborted": len(ids)})

    async def _pause(self, call: web.Request) -> web.Response:
        self.pause_mode = call.query.get("mode", "abort")
        self.calls.append(("pause", dict(call.query)))
        if self.pause_mode == "abort":
            await self.abort_matching("")
        while self.pause_mode == "wait" and self.engine.num_active:
            await asyncio.sleep(STEP_S)
        self.is_paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, call: web.Request) -> web.Response:
        self.calls.append(("resume", {}))
        self.is_paused = False
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, call: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    async def _rpc(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("rpc", body))
        if self.refuses_updates or body["method"] not in ("reload_weights", "reload_with_head"):
            error = {"error": {"message": f"{body['method']} failed", "type": "InternalServerError"}}
            return web.json_response(error, status=int(self.refuses_updates or 500))
        is_stale = self.device == "cpu" and self.ties_head and body["method"] == "reload_weights"
        stale = frozenset({"model.embed_tokens.weight"} if is_stale else ())
        await self.install(Path(body["kwargs"]["weights_path"]), self.label, stale=stale)
        return web.json_response({"results": [None]})

    async def _label(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.calls.append(("label", body))
        self._labels[-1] = body["new_version"] if self._was_reloaded() else self._labels[-1]
        if self._labels[-1] != body["new_version"]:
            await self.relabel(body["new_version"])
        return web.json_response({"success": True, "new_version": body["new_version"]})

    def _was_reloaded(self) -> bool:
        """Whether the last control call before this label was a reload, whose tokens it names."""
        return len(self.calls) > 1 and self.calls[-2][0] == "rpc"

    async def _server_info(self, call: web.Request) -> web.Response:
        self.calls.append(("server_info", dict(call.query)))
        return web.json_response({"vllm_config": {"device_config": {"device": self.device}}, "system_env": {}})

    async def _reset(self, call: web.Request) -> web.Response:
        self.calls.append(("reset", dict(call.query)))
        return web.json_response({"success": self.engine.num_active == 0})

    async def _info(self, call: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})


class InThread:
    """A stand-in with an event loop of its own, for tests that start real processes."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in")

    def __enter__(self) -> StandIn:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.stand_in.start(), self._loop).result(30)
        return self.stand_in

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.stand_in.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
