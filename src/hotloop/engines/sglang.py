"""The Engine port over a running SGLang server (0.5.x), through its native `/generate`.

Owns: the routes and fields of SGLang and their translation. Weights reach it as a local checkpoint that is patched in
place and reloaded with `/update_weights_from_disk`.

Promises: pausing is `in_place`, so that requests keep their KV; the prefix cache is salted with the policy version; an
answer 200 with `success: false` is an error and changes no version.
Does not do: starting the server; what one logprob a token cannot describe (remote.check_offered).
Source: SGLang 0.5.23, its published wheel; docs/concepts/engine_adapters.md.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from hotloop.engines.base import Chunk, GenerateRequest
from hotloop.engines.remote import RemoteEngine, sort_top
from hotloop.engines.version_labels import Started, clip_spans
from hotloop.errors import ServiceError
from hotloop.types import Completion, TopLogprobs

SEED_BITS = 31


class SglangEngine(RemoteEngine):
    """One SGLang server."""

    name = "SGLang"

    async def _complete(self, request: GenerateRequest, index: int, call_id: str, stream: bool) -> AsyncIterator[Chunk]:
        started = self._labels.start()
        body = self._body(request, index, call_id) | {"stream": stream}
        if not stream:
            answer = await self._server.call("POST", "/generate", body)
            completion = self._parse(answer, request, started, 0)
            yield Chunk(request.request_id, index, completion, True, completion.finish_reason)
            return
        sent = 0
        async for event in self._server.events("/generate", body):  # each event holds everything so far
            is_last = event["meta_info"].get("finish_reason") is not None
            if not (is_last or event["meta_info"].get("weight_versions") or self._labels.is_certain(started)):
                continue  # an older server across a write: only the end can tell, or fail
            piece = self._parse(event, request, started, sent)
            sent += len(piece.token_ids)
            if piece.token_ids or is_last:
                yield Chunk(request.request_id, index, piece, is_last, piece.finish_reason if is_last else None)
            if is_last:
                return
        raise self._server.failure("/generate", f"ended its stream after {sent} tokens without a finish reason")

    def _body(self, request: GenerateRequest, index: int, call_id: str) -> dict[str, Any]:
        params = request.params
        sampling: dict[str, Any] = {
            "max_new_tokens": self._limit_of(request),
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "skip_special_tokens": False,
        }
        seed = request.seeds[index] if request.seeds else None if params.seed is None else params.seed + index
        if seed is not None:
            sampling["sampling_seed"] = seed % 2**SEED_BITS
        body: dict[str, Any] = {
            "rid": call_id,
            "input_ids": list(request.prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
            # Prefixes must not be reused across policies; the version is part of the salt for that reason.
            "cache_salt": f"{self._labels.version}/{request.cache_namespace}",
        }
        if request.return_routed_experts:
            body["return_routed_experts"] = True
        return body

    def _parse(self, answer: Any, request: GenerateRequest, started: Started, start: int) -> Completion:
        """Read the tokens of an answer from `start` on."""
        meta = answer["meta_info"]
        total = len(answer["output_ids"])
        ids = [int(token) for token in answer["output_ids"][start:]]
        rows = meta.get("output_token_logprobs") or []
        if len(rows) != total:
            raise ServiceError("engine_error", f"SGLang gave {len(rows)} logprobs for {total} tokens", retryable=True)
        raw = [float(row[0]) for row in rows[start:]]
        reason = meta.get("finish_reason") or {}
        kind = reason.get("type", "length")
        spans = self._labels.spans(meta.get("weight_versions"), meta.get("weight_version"), total, started)
        is_greedy = request.params.temperature == 0
        top = None
        if request.top_logprobs and is_greedy and request.top_logprobs_kind == "sampling":
            top = greedy_top(request.top_logprobs, ids)
        elif request.top_logprobs:
            best = [
                sort_top([(int(row[1]), float(row[0])) for row in at]) for at in meta["output_top_logprobs"][start:]
            ]
            top = TopLogprobs(
                request.top_logprobs,
                request.top_logprobs_kind,
                [[token for token, _ in row] for row in best],
                [[logprob for _, logprob in row] for row in best],
            )
        return Completion(
            token_ids=ids,
            sampling_logprobs=[0.0] * len(ids) if is_greedy else raw,
            logprobs=raw,
            version_spans=clip_spans(spans, start, total),
            finish_reason=kind if kind in ("stop", "length") else "abort",
            stop_reason=reason.get("matched"),
            top_logprobs=top,
            routed_experts=self._routes(meta.get("routed_experts"), len(request.prompt_ids) + total - 1),
            cached_tokens=int(meta.get("cached_tokens") or 0) if start == 0 else 0,
        )

    def _routes(self, data: str | None, rows: int) -> Any:
        """Read raw int32 without a header; the shape is the model's."""
        if data is None:
            return None
        values = np.frombuffer(base64.b64decode(data), dtype="<i4")
        shape = (rows, self._info.num_layers, self._info.experts_per_token)
        if values.size != rows * shape[1] * shape[2]:
            raise ServiceError(
                "engine_error", f"SGLang gave {values.size} expert ids for the shape {shape}", retryable=True
            )
        return values.reshape(shape).astype(np.uint8 if self._info.num_experts <= 256 else np.uint16)

    async def _abort_call(self, call_id: str) -> None:
        await self._server.call("POST", "/abort_request", {"rid": call_id})

    async def _set_paused(self, paused: bool) -> None:
        if paused:
            await self._server.call("POST", "/pause_generation", {"mode": "in_place"})
        else:
            await self._server.call("POST", "/continue_generation", {})

    async def _reload(self, label: str) -> None:
        body = {
            "model_path": str(self._checkpoint.directory),
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": False,  # refused while requests run; the salt keeps policies apart
            "keep_pause": self._is_paused,
        }
        await self._server.call("POST", "/update_weights_from_disk", body)

    async def _relabel(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}  # the server's own default aborts everything
        await self._server.call("POST", "/update_weight_version", body)


def greedy_top(k: int, ids: list[int]) -> TopLogprobs:
    """The sampler's own best tokens at temperature 0: the drawn one, with certainty."""
    return TopLogprobs(k, "sampling", [[token] for token in ids], [[0.0] for _ in ids])
