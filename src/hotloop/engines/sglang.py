"""The Engine port over a running SGLang server (0.5.x), through its native `/generate`.

Owns: the routes and fields of SGLang and their translation. Weights reach it as a local checkpoint that is patched in
place and reloaded with `/update_weights_from_disk`.

Promises: pausing is `in_place`, so that requests keep their KV; ids are of one fixed length, because the server
aborts by prefix; an answer 200 with `success: false` is an error and changes no version.
Does not do: starting the server; more sampling than temperature 0 or 1 without truncation (one logprob a token is
exact for both the sampler and the raw policy only there).
Source: SGLang 0.5.23, its published wheel; docs/concepts/engine_adapters.md.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engines.base import Chunk, EngineInfo, EngineSettings, GenerateRequest, WeightUpdate
from hotloop.engines.remote import LocalCheckpoint, RemoteServer, check_served_sampling, parse_spans, refuse_unoffered
from hotloop.engines.slices import slice_completion
from hotloop.errors import ServiceError
from hotloop.types import Completion, TopLogprobs

DEFAULT_CONTEXT = 4096


class SglangEngine:
    """One SGLang server."""

    def __init__(self, settings: EngineSettings) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InputError: no address, or no policy directory to reload from.
        """
        self._server = RemoteServer(settings.url, name="SGLang ")
        self._checkpoint = LocalCheckpoint(Path(settings.policy_dir))
        self._info = read_info("sglang", settings)
        self._version = 0
        self._identities: dict[int, str] = {}
        self._is_paused = False
        self._rids: dict[str, list[str]] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def policy_version(self) -> int:
        return self._version

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Send one request a completion; the server shares the prompt through its prefix cache."""
        params = request.params
        check_served_sampling(params.temperature, params.top_p, params.top_k, params.min_p, "SGLang")
        refused = refuse_unoffered("SGLang", prompt_logprobs=request.return_prompt_logprobs)
        if refused is not None:
            raise refused
        queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        # 32 hex digits each: no id is a prefix of another.
        rids = self._rids[request.request_id] = [secrets.token_hex(16) for _ in range(request.n)]

        async def pump(index: int) -> None:
            try:
                async for chunk in self._one(request, index, rids[index], stream):
                    queue.put_nowait(chunk)
                queue.put_nowait(None)
            except Exception as error:  # handed to the reader, which raises it in the caller's task
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(request.n)]
        try:
            open_streams = request.n
            while open_streams:
                item = await queue.get()
                if item is None:
                    open_streams -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self._rids.pop(request.request_id, None)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, request: GenerateRequest, index: int, rid: str, stream: bool) -> AsyncIterator[Chunk]:
        body = self._body(request, index, rid) | {"stream": stream}
        if not stream:
            answer = await self._server.call("POST", "/generate", body)
            completion = self._parse(answer, request)
            yield Chunk(request.request_id, index, completion, True, completion.finish_reason)
            return
        sent = 0
        async for event in self._server.events("/generate", body):  # each event holds everything so far
            whole = self._parse(event, request)
            is_last = event["meta_info"].get("finish_reason") is not None
            if len(whole.token_ids) > sent or is_last:
                piece = slice_completion(whole, sent, len(whole.token_ids))
                yield Chunk(request.request_id, index, piece, is_last, whole.finish_reason if is_last else None)
            sent = len(whole.token_ids)
            if is_last:
                return
        raise self._server.failure("/generate", f"ended its stream after {sent} tokens without a finish reason")

    def _body(self, request: GenerateRequest, index: int, rid: str) -> dict[str, Any]:
        params = request.params
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "skip_special_tokens": False,
        }
        seed = request.seeds[index] if request.seeds else None if params.seed is None else params.seed + index
        if seed is not None:
            sampling["sampling_seed"] = seed % 2**31
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(request.prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
            # Prefixes must not be reused across policies; the version is part of the salt for that reason.
            "cache_salt": f"{self._version}/{request.cache_namespace}",
        }
        if request.return_routed_experts:
            body["return_routed_experts"] = True
        return body

    def _parse(self, answer: Any, request: GenerateRequest) -> Completion:
        meta = answer["meta_info"]
        ids = [int(token) for token in answer["output_ids"]]
        raw = [float(row[0]) for row in meta.get("output_token_logprobs") or []]
        if len(raw) != len(ids):
            raise ServiceError("engine_error", f"SGLang gave {len(raw)} logprobs for {len(ids)} tokens")
        reason = meta.get("finish_reason") or {}
        kind = reason.get("type", "length")
        top = None
        if request.top_logprobs:
            rows = [sort_top([(int(row[1]), float(row[0])) for row in at]) for at in meta["output_top_logprobs"]]
            top = TopLogprobs(
                request.top_logprobs,
                request.top_logprobs_kind,
                [[token for token, _ in row] for row in rows],
                [[logprob for _, logprob in row] for row in rows],
            )
        return Completion(
            token_ids=ids,
            sampling_logprobs=[0.0] * len(ids) if request.params.temperature == 0 else raw,
            logprobs=raw,
            version_spans=parse_spans(
                meta.get("weight_versions"), meta.get("weight_version"), len(ids), self._identities, self._version
            ),
            finish_reason=kind if kind in ("stop", "length", "abort") else "abort",
            stop_reason=reason.get("matched"),
            top_logprobs=top,
            routed_experts=self._routes(meta.get("routed_experts"), len(request.prompt_ids) + len(ids) - 1),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )

    def _routes(self, data: str | None, rows: int) -> Any:
        if data is None:
            return None
        values = np.frombuffer(base64.b64decode(data), dtype="<i4")
        shape = (rows, self._info.num_layers, self._info.experts_per_token)
        if values.size != rows * shape[1] * shape[2]:
            raise ServiceError("engine_error", f"SGLang gave {values.size} expert ids for the shape {shape}")
        return values.reshape(shape).astype(np.uint8 if self._info.num_experts <= 256 else np.uint16)

    async def abort(self, request_id: str) -> None:
        for rid in self._rids.get(request_id, ()):
            await self._server.call("POST", "/abort_request", {"rid": rid})

    async def pause(self) -> None:
        await self._server.call("POST", "/pause_generation", {"mode": "in_place"})
        self._is_paused = True

    async def resume(self) -> None:
        await self._server.call("POST", "/continue_generation", {})
        self._is_paused = False

    async def write_weights(self, update: WeightUpdate) -> None:
        """Patch the local checkpoint and let the server reload it; an empty update changes the label only."""
        label = str(update.policy_version)
        if update.ranges or update.tensors:
            if not self._is_paused:
                raise ServiceError("engine_error", "weights are written only while generation is paused")
            await asyncio.to_thread(self._checkpoint.write, update.ranges, update.tensors)
            body = {
                "model_path": str(self._checkpoint.directory),
                "weight_version": label,
                "abort_all_requests": False,
                "flush_cache": False,
                "keep_pause": True,
            }
            await self._server.call("POST", "/update_weights_from_disk", body)
        else:
            body = {"new_version": label, "abort_all_requests": False}  # the server's own default aborts everything
            await self._server.call("POST", "/update_weight_version", body)
        self._version = update.policy_version
        self._identities[update.policy_version] = update.snapshot_identity

    async def close(self) -> None:
        await self._server.close()


def sort_top(row: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Order a row of (token, logprob) by logprob, ties by id."""
    return sorted(row, key=lambda each: (-each[1], each[0]))


def read_info(kind: str, settings: EngineSettings) -> EngineInfo:
    """Describe a remote engine from the config of the policy it serves."""
    config = json.loads((Path(settings.policy_dir) / "config.json").read_text())
    return EngineInfo(
        kind=kind,
        vocab_size=int(config["vocab_size"]),
        max_context=settings.max_context or int(config.get("max_position_embeddings") or DEFAULT_CONTEXT),
        num_layers=int(config["num_hidden_layers"]),
        num_experts=int(config.get("num_experts") or config.get("n_routed_experts") or 0),
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
    )
