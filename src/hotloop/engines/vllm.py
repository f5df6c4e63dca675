"""The Engine port over a running vLLM server (0.32, 0.33), through `/inference/v1/generate`.

Owns: the routes and fields of vLLM and their translation. The server must run with `VLLM_SERVER_DEV_MODE=1` (pause,
resume and weight routes), `--logprobs-mode processed_logprobs` and `--enable-scale-out` (the token route).

Promises: pausing is `keep`, so that requests keep their KV; the prefix cache is salted with the policy version; a
stream across a write is held back until its last event says whose its tokens are. Stop strings are matched here,
because the token route does not see text. No label is put on weights of which a part is known to stay the old one: on
vLLM's CPU backend a policy with a tied head or experts is refused (`find_stale_part`).
Does not do: starting the server; its `sparse_nccl` backend, which needs the trainer in one NCCL group with the
server, so weights reach it as a local checkpoint that a worker method reloads.
Source: vLLM 0.33.0, its published wheel, and 0.32.0, run on a CPU; docs/concepts/engine_adapters.md.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engines.base import Chunk, EngineSettings, GenerateRequest
from hotloop.engines.remote import RemoteEngine, sort_top
from hotloop.engines.sglang import greedy_top
from hotloop.engines.version_labels import Started, clip_spans
from hotloop.errors import ServiceError
from hotloop.models.tokenizer import StopMatcher, Tokenizer, open_tokenizer
from hotloop.types import Completion, TopLogprobs, VersionSpan

RELOAD_METHOD = "reload_weights"
"""Worker method that reads the checkpoint again; `options.reload_method` names another one."""
CALL_PREFIX = "generate-tokens-"
"""What the token route puts before a request's id; the server aborts by the whole."""


@dataclass(slots=True)
class _Taken:
    """What has come of one completion; tokens behind a stop string are counted and left out."""

    matcher: StopMatcher | None
    ids: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    total: int = 0
    matched: str | None = None

    def add(self, choice: Any) -> None:
        tokens = [int(token) for token in choice["token_ids"]]
        rows = (choice.get("logprobs") or {}).get("content") or []
        if len(rows) != len(tokens):
            raise ServiceError(
                "engine_error", f"vLLM gave {len(rows)} logprobs for {len(tokens)} tokens", retryable=True
            )
        self.total += len(tokens)
        for token, row in zip(tokens, rows, strict=True):
            if self.matched is None:
                self.ids.append(token)
                self.rows.append(row)
                self.matched = self.matcher.push(token) if self.matcher is not None else None


class VllmEngine(RemoteEngine):
    """One vLLM server."""

    name = "vLLM"

    def __init__(self, settings: EngineSettings) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InputError: no address, or no policy directory to reload from.
        """
        super().__init__(settings)
        self._policy_dir = settings.policy_dir
        self._reload_method = str(settings.options.get("reload_method", RELOAD_METHOD))
        self._tokenizer: Tokenizer | None = None
        self._ties_head = _ties_head(Path(settings.policy_dir)) or not self._checkpoint.has("lm_head.weight")
        self._is_reload_exact = False

    async def _complete(self, request: GenerateRequest, index: int, call_id: str, stream: bool) -> AsyncIterator[Chunk]:
        started = self._labels.start()
        body = self._body(request, index, call_id)
        stop = request.params.stop
        taken = _Taken(StopMatcher(self._open_tokenizer(), stop) if stop else None)
        if not stream and not stop:
            choice = (await self._server.call("POST", "/inference/v1/generate", body))["choices"][0]
            taken.add(choice)
            completion = self._finish(taken, 0, request, choice, started)
            yield Chunk(request.request_id, index, completion, True, completion.finish_reason)
            return
        sent, is_ending = 0, False
        async for event in self._server.events("/inference/v1/generate", {**body, "stream": True}):
            choice = event["choices"][0]
            taken.add(choice)
            if choice.get("finish_reason") is not None:
                completion = self._finish(taken, sent, request, choice, started)
                yield Chunk(request.request_id, index, completion, True, completion.finish_reason)
                return
            if taken.matched is not None:
                if not is_ending:
                    is_ending = True
                    await self._abort_call(call_id)
            elif stream and len(taken.ids) > sent and self._labels.is_certain(started):
                spans = [VersionSpan(sent, len(taken.ids), started.version, started.identity)]
                yield Chunk(request.request_id, index, self._slice(taken, sent, request, spans), False)
                sent = len(taken.ids)
        raise self._server.failure("/inference/v1/generate", "ended its stream without a finish reason")

    def _open_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._policy_dir)
        return self._tokenizer

    def _body(self, request: GenerateRequest, index: int, call_id: str) -> dict[str, Any]:
        params = request.params
        sampling: dict[str, Any] = {
            "max_tokens": self._limit_of(request),
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # only what was asked for ends an answer
            # The server's list has this length with the sampled token first, which may not be one of the best.
            "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
            "n": 1,
        }
        seed = request.seeds[index] if request.seeds else None if params.seed is None else params.seed + index
        if seed is not None:
            sampling["seed"] = seed % 2**63
        return {
            "request_id": call_id,
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling,
            # Prefixes must not be reused across policies; the version is part of the salt for that reason.
            "cache_salt": make_salt(self._labels.version, request.cache_namespace),
            "stream": False,
        }

    def _finish(self, taken: _Taken, start: int, request: GenerateRequest, choice: Any, started: Started) -> Completion:
        """Read the tokens from `start` on together with what only the last event says."""
        spans = self._labels.spans(choice.get("weight_versions"), None, taken.total, started)
        finish = choice["finish_reason"]
        routes = choice.get("routed_experts") if request.return_routed_experts else None
        return replace(
            self._slice(taken, start, request, clip_spans(spans, start, len(taken.ids))),
            finish_reason="stop" if taken.matched is not None else finish if finish in ("stop", "length") else "abort",
            stop_reason=taken.matched if taken.matched is not None else choice.get("stop_reason"),
            routed_experts=None
            if routes is None
            else _read_npy(routes)[: len(request.prompt_ids) + len(taken.ids) - 1],
        )

    def _slice(self, taken: _Taken, start: int, request: GenerateRequest, spans: Sequence[VersionSpan]) -> Completion:
        ids, rows = taken.ids[start:], taken.rows[start:]
        raw = [float(row["logprob"]) for row in rows]
        is_greedy = request.params.temperature == 0
        k, kind = request.top_logprobs, request.top_logprobs_kind
        top = None
        if k and is_greedy and kind == "sampling":
            top = greedy_top(k, ids)
        elif k:
            best = [_best_of(row, k) for row in rows]
            top = TopLogprobs(
                k,
                kind,
                [[token for token, _ in row] for row in best],
                [[logprob for _, logprob in row] for row in best],
            )
        return Completion(
            token_ids=ids,
            sampling_logprobs=[0.0] * len(ids) if is_greedy else raw,
            logprobs=raw,
            version_spans=list(spans),
            finish_reason="length",
            top_logprobs=top,
        )

    async def _abort_call(self, call_id: str) -> None:
        # An empty list means everything, and an unknown id nothing.
        await self._server.call("POST", "/abort_requests", {"request_ids": [CALL_PREFIX + call_id]})

    async def _set_paused(self, paused: bool) -> None:
        if paused:
            await self._server.call("POST", "/pause", query={"mode": "keep", "clear_cache": "false"})
        else:
            await self._server.call("POST", "/resume")

    async def _reload(self, label: str) -> None:
        """Reload and label; a refusal of either leaves weights that nobody has named."""
        await self._check_reload()
        arguments = {"weights_path": str(self._checkpoint.directory)}
        try:
            await self._server.call("POST", "/collective_rpc", {"method": self._reload_method, "kwargs": arguments})
            await self._relabel(label)
        except ServiceError as error:
            raise ServiceError("install_failed", str(error), where=error.where, retryable=True) from error
        # Declined while requests run; the salt keeps policies apart all the same, this only frees memory.
        query = {"reset_running_requests": "false"}
        await self._server.call("POST", "/reset_prefix_cache", query=query, may_decline=True)

    async def _check_reload(self) -> None:
        """Refuse a reload that would leave a part of the old weights in use; nothing was sent yet.

        Raises:
            ServiceError: `engine_error`.
        """
        if self._is_reload_exact or self._reload_method != RELOAD_METHOD:
            return
        info = await self._server.call("GET", "/server_info", query={"config_format": "json"})
        stale = find_stale_part(info, self._ties_head, self._info.num_experts)
        if stale:
            raise ServiceError(
                "engine_error",
                f"vLLM's CPU backend does not reload {stale}, so its tokens would be of no version",
                where=self._server.url,
                do="Give the server `--worker-extension-cls hotloop.engines.vllm_worker.HeadReload` and set"
                " engine.options.reload_method to reload_with_head (tied heads only), or use the torch engine.",
                details={"answered": True, "stale_part": stale},
            )
        self._is_reload_exact = True

    async def _relabel(self, label: str) -> None:
        await self._server.call("POST", "/update_weight_version", {"new_version": label})


def find_stale_part(info: Any, ties_head: bool, num_experts: int) -> str:
    """Name what a reload does not reach on this server; empty where it reaches everything.

    On CPUs vLLM 0.32 multiplies by packed copies. Its reload packs a layer again when the checkpoint names it, which it
    does not for a head that shares the embedding's weight. Experts are packed in a way of their own that was not tried.

    Args:
        info: what `/server_info` answered.
    """
    try:
        device = str(info["vllm_config"]["device_config"]["device"])
    except (KeyError, TypeError):
        device = ""  # not known, so not trusted either
    if device and not device.startswith("cpu"):
        return ""
    return "a head that is tied to the embedding" if ties_head else "experts for certain" if num_experts else ""


def _ties_head(policy_dir: Path) -> bool:
    """Read `tie_word_embeddings`; a config without it may mean either."""
    config = json.loads((policy_dir / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings", True))


def make_salt(version: int, namespace: str) -> str:
    """Name what may share prefixes: a digest, because the server refuses slashes, `@` and more than 128 characters."""
    return hashlib.sha256(f"{version}/{namespace}".encode()).hexdigest()


def _best_of(row: Any, k: int) -> list[tuple[int, float]]:
    """The k best of a row; the server puts the sampled token first, which may not be one of them."""
    unique = {int(each["token_id"]): float(each["logprob"]) for each in row["top_logprobs"]}
    return sort_top(list(unique.items()))[:k]


def _read_npy(data: str) -> Any:
    """Decode a base64 .npy file; pickled arrays are refused."""
    return np.load(io.BytesIO(base64.b64decode(data)), allow_pickle=False)
