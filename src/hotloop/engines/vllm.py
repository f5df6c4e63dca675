"""The Engine port over a running vLLM server (0.33), through `/inference/v1/generate`.

Owns: the routes and fields of vLLM and their translation. The server must run with `VLLM_SERVER_DEV_MODE=1` (pause,
resume and weight routes) and `--logprobs-mode processed_logprobs`.

Promises: pausing is `keep`, so that requests keep their KV; the prefix cache is reset after every install and salted
with the version besides; an answer 200 with an error body is an error and changes no version. Stop strings are
matched here, because the token route does not see text.
Does not do: starting the server; its `sparse_nccl` backend, which needs the trainer in one NCCL group with the
server, so weights reach it as a local checkpoint that a worker method reloads.
Source: vLLM 0.33.0, its published wheel; docs/concepts/engine_adapters.md.
"""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engines.base import Chunk, EngineInfo, EngineSettings, GenerateRequest, WeightUpdate
from hotloop.engines.remote import LocalCheckpoint, RemoteServer, check_served_sampling, parse_spans, refuse_unoffered
from hotloop.engines.sglang import read_info, sort_top
from hotloop.engines.slices import slice_completion
from hotloop.errors import ServiceError
from hotloop.models.tokenizer import StopMatcher, Tokenizer, open_tokenizer
from hotloop.types import Completion, TopLogprobs

RELOAD_METHOD = "reload_weights"
"""Worker method that reads the checkpoint again; `options.reload_method` names another one."""


class VllmEngine:
    """One vLLM server."""

    def __init__(self, settings: EngineSettings) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InputError: no address, or no policy directory to reload from.
        """
        self._server = RemoteServer(settings.url, name="vLLM ")
        self._checkpoint = LocalCheckpoint(Path(settings.policy_dir))
        self._policy_dir = settings.policy_dir
        self._reload_method = str(settings.options.get("reload_method", RELOAD_METHOD))
        self._info = read_info("vllm", settings)
        self._tokenizer: Tokenizer | None = None
        self._version = 0
        self._identities: dict[int, str] = {}
        self._is_paused = False
        self._ids: dict[str, list[str]] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def policy_version(self) -> int:
        return self._version

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Send one request a completion; the server shares the prompt through its prefix cache."""
        params = request.params
        check_served_sampling(params.temperature, params.top_p, params.top_k, params.min_p, "vLLM")
        refused = refuse_unoffered("vLLM", prompt_logprobs=request.return_prompt_logprobs)
        if refused is not None:
            raise refused
        queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        ids = self._ids[request.request_id] = [secrets.token_hex(16) for _ in range(request.n)]

        async def pump(index: int) -> None:
            try:
                async for chunk in self._one(request, index, ids[index], stream):
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
            self._ids.pop(request.request_id, None)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, request: GenerateRequest, index: int, call_id: str, stream: bool) -> AsyncIterator[Chunk]:
        body = self._body(request, index, call_id)
        if not stream and not request.params.stop:
            answer = await self._server.call("POST", "/inference/v1/generate", body)
            choice = answer["choices"][0]
            completion = self._parse([choice], request, choice["finish_reason"])
            yield Chunk(request.request_id, index, completion, True, completion.finish_reason)
            return
        async for chunk in self._stream(request, index, call_id, body, stream):
            yield chunk

    async def _stream(
        self, request: GenerateRequest, index: int, call_id: str, body: dict[str, Any], wants_chunks: bool
    ) -> AsyncIterator[Chunk]:
        """Read the stream, whose events hold new tokens only; end it at a stop string."""
        matcher = StopMatcher(self._open_tokenizer(), request.params.stop) if request.params.stop else None
        pieces: list[Any] = []
        sent = 0
        async for event in self._server.events("/inference/v1/generate", {**body, "stream": True}):
            choice = event["choices"][0]
            pieces.append(choice)
            finish = choice.get("finish_reason")
            matched = None
            for token in choice["token_ids"] if matcher is not None else ():
                assert matcher is not None
                matched = matched or matcher.push(int(token))
            if matched is not None and finish is None:
                await self._abort_ids([call_id])
                finish = "stop"
            is_last = finish is not None
            whole = self._parse(pieces, request, finish or "length", stop_reason=matched)
            if is_last or (wants_chunks and len(whole.token_ids) > sent):
                piece = slice_completion(whole, sent, len(whole.token_ids))
                sent = len(whole.token_ids)
                yield Chunk(request.request_id, index, piece, is_last, whole.finish_reason if is_last else None)
            if is_last:
                return
        raise self._server.failure("/inference/v1/generate", "ended its stream without a finish reason")

    def _open_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._policy_dir)
        return self._tokenizer

    def _body(self, request: GenerateRequest, index: int, call_id: str) -> dict[str, Any]:
        params = request.params
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": request.top_logprobs,
            "n": 1,
        }
        seed = request.seeds[index] if request.seeds else None if params.seed is None else params.seed + index
        if seed is not None:
            sampling["seed"] = seed % 2**63
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        return {
            "request_id": call_id,
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling,
            "cache_salt": f"{self._version}/{request.cache_namespace}",
            "stream": False,
        }

    def _parse(
        self, pieces: list[Any], request: GenerateRequest, finish: str, *, stop_reason: str | int | None = None
    ) -> Completion:
        ids = [int(token) for piece in pieces for token in piece["token_ids"]]
        rows = [row for piece in pieces for row in (piece.get("logprobs") or {}).get("content") or []]
        if len(rows) != len(ids):
            raise ServiceError("engine_error", f"vLLM gave {len(rows)} logprobs for {len(ids)} tokens")
        raw = [float(row["logprob"]) for row in rows]
        top = None
        if request.top_logprobs:
            best = [self._top(row, request.top_logprobs) for row in rows]
            top = TopLogprobs(
                request.top_logprobs,
                request.top_logprobs_kind,
                [[token for token, _ in row] for row in best],
                [[logprob for _, logprob in row] for row in best],
            )
        last = pieces[-1]
        return Completion(
            token_ids=ids,
            sampling_logprobs=[0.0] * len(ids) if request.params.temperature == 0 else raw,
            logprobs=raw,
            version_spans=parse_spans(
                last.get("weight_versions"), str(self._version), len(ids), self._identities, self._version
            ),
            finish_reason=finish if finish in ("stop", "length") else "abort",  # type: ignore[arg-type]  # checked here
            stop_reason=stop_reason if stop_reason is not None else last.get("stop_reason"),
            top_logprobs=top,
            routed_experts=_read_npy(last.get("routed_experts")) if request.return_routed_experts else None,
        )

    def _top(self, row: Any, k: int) -> list[tuple[int, float]]:
        """The k best of a row; the server puts the sampled token first, which may not be one of them."""
        unique = {int(each["token_id"]): float(each["logprob"]) for each in row["top_logprobs"]}
        return sort_top(list(unique.items()))[:k]

    async def abort(self, request_id: str) -> None:
        await self._abort_ids(self._ids.get(request_id, []))

    async def _abort_ids(self, ids: list[str]) -> None:
        if ids:  # an empty list means everything to the server
            await self._server.call("POST", "/abort_requests", {"request_ids": ids})

    async def pause(self) -> None:
        await self._server.call("POST", "/pause", query={"mode": "keep", "clear_cache": "false"})
        self._is_paused = True

    async def resume(self) -> None:
        await self._server.call("POST", "/resume")
        self._is_paused = False

    async def write_weights(self, update: WeightUpdate) -> None:
        """Patch the local checkpoint and let the workers reload it; an empty update changes the label only."""
        if update.ranges or update.tensors:
            if not self._is_paused:
                raise ServiceError("engine_error", "weights are written only while generation is paused")
            await asyncio.to_thread(self._checkpoint.write, update.ranges, update.tensors)
            arguments = {"weights_path": str(self._checkpoint.directory)}
            await self._server.call("POST", "/collective_rpc", {"method": self._reload_method, "kwargs": arguments})
            await self._server.call("POST", "/reset_prefix_cache", query={"reset_running_requests": "false"})
        await self._server.call("POST", "/update_weight_version", {"new_version": str(update.policy_version)})
        self._version = update.policy_version
        self._identities[update.policy_version] = update.snapshot_identity

    async def close(self) -> None:
        await self._server.close()


def _read_npy(data: str | None) -> Any:
    """Decode a base64 .npy file; pickled arrays are refused."""
    return None if data is None else np.load(io.BytesIO(base64.b64decode(data)), allow_pickle=False)
