"""Answers in the OpenAI shapes, with the rollout's own record beside them.

Owns: chat and text completions, whole or streamed, their logprobs, the vendor aliases and the `nvext` block.
Promises: concatenated chunks of a stream are the answer that the same request gets unstreamed; a stop string's text
never leaves; a token's numbers are those that the engine recorded.
Does not do: parsing requests (rollout_request.py), the block itself (engine_data.py).
Source: hot_load.md section 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hotloop.engines.base import Chunk
from hotloop.models.tokenizer import Detokenizer, Tokenizer, cut_at_stop
from hotloop.service.engine_data import (
    BlockOptions,
    Serving,
    completion_block,
    routed_experts_field,
    routing_matrices,
)
from hotloop.service.rollout_request import RolloutRequest
from hotloop.types import Completion


@dataclass(slots=True)
class ChoiceText:
    """The text of one choice as it grows; holds back what might be the start of a stop string."""

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    _detokenizer: Detokenizer = field(init=False)
    _pending: str = ""
    _is_cut: bool = False

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    def push(self, ids: Sequence[int], *, is_last: bool) -> str:
        """Add tokens and return the text that may leave now."""
        if self._is_cut:
            return ""
        self._pending += self._detokenizer.push(ids)
        if is_last:
            self._pending += self._detokenizer.finish()
        cut = cut_at_stop(self._pending, self.stop)
        if len(cut) < len(self._pending):
            self._is_cut = True
            self._pending = ""
            return cut
        held = 0 if is_last else self._held_back()
        out = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(self._pending) - held :]
        return out

    def _held_back(self) -> int:
        longest = max((len(text) for text in self.stop), default=0) - 1
        for length in range(min(longest, len(self._pending)), 0, -1):
            if any(text.startswith(self._pending[-length:]) for text in self.stop):
                return length
        return 0


class Answer:
    """Builds the answer of one request."""

    def __init__(
        self,
        request: RolloutRequest,
        tokenizer: Tokenizer,
        options: BlockOptions,
        *,
        answer_id: str,
        created: int,
        replica_id: str,
        served_name: str,
        names_identity: bool,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._options = options
        self._id = answer_id
        self._created = created
        self._replica_id = replica_id
        self._served_name = served_name
        self._names_identity = names_identity
        self._texts: dict[int, ChoiceText] = {}
        self._start_versions: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._text_offsets: dict[int, int] = {}

    def whole(
        self, chunks: dict[int, Chunk], serving: Serving, prompt_logprobs: dict[int, Sequence[float | None]]
    ) -> dict[str, Any]:
        """Build the unstreamed answer from the last (only) chunk of every choice."""
        request = self._request
        choices, blocks = [], []
        completion_tokens = cached = 0
        identity = serving.snapshot_identity
        for index in sorted(chunks):
            completion = chunks[index].completion
            prompt = request.prompts[index // request.n]
            text = cut_at_stop(self._tokenizer.decode(completion.token_ids), request.params.stop)
            choices.append(self._choice(index, completion, text, prompt, prompt_logprobs.get(index // request.n)))
            blocks.append(completion_block(completion, serving, self._options, prompt_ids=prompt))
            completion_tokens += len(completion.token_ids)
            cached += completion.cached_tokens
            if completion.version_spans:
                identity = completion.version_spans[-1].snapshot_identity
        answer = self._envelope("chat.completion" if request.kind == "chat" else "text_completion", identity)
        answer["choices"] = choices
        prompt_tokens = sum(len(prompt) for prompt in request.prompts)
        answer["usage"] = _usage(prompt_tokens, completion_tokens, cached)
        first = chunks[0].completion if chunks else None
        nvext = self._nvext(blocks, list(range(len(blocks))), first, prompt_logprobs.get(0), whole=True)
        if nvext:
            answer["nvext"] = nvext
        return answer

    def piece(self, index: int, chunk: Chunk, serving: Serving) -> dict[str, Any]:
        """Build one chunk of a stream."""
        request = self._request
        completion = chunk.completion
        prompt = request.prompts[index // request.n]
        is_first = index not in self._texts
        text_stream = self._texts.setdefault(index, ChoiceText(self._tokenizer, request.params.stop))
        text = text_stream.push(completion.token_ids, is_last=chunk.is_last)
        if completion.version_spans:
            self._start_versions.setdefault(index, completion.version_spans[0].policy_version)
        identity = completion.version_spans[-1].snapshot_identity if completion.version_spans else ""
        kind = "chat.completion.chunk" if request.kind == "chat" else "text_completion"
        answer = self._envelope(kind, identity or serving.snapshot_identity)
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(completion.token_ids)
        choice: dict[str, Any] = {"index": index, "finish_reason": chunk.finish_reason if chunk.is_last else None}
        echoed = self._echo_text(prompt) if is_first else ""
        if request.kind == "chat":
            delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
            if text or echoed or is_first:
                delta["content"] = echoed + text
            choice["delta"] = delta
        else:
            choice["text"] = echoed + text
        logprobs = self._logprobs(completion, prompt, offset) if request.logprobs else None
        if logprobs is not None:
            if is_first and request.echo_tokens is not None and chunk.prompt_logprobs is not None:
                self._prepend_prompt(logprobs, prompt, chunk.prompt_logprobs)
            if request.kind == "text":
                start = self._text_offsets.get(index, 0)
                logprobs["text_offset"] = [start + at for at in logprobs["text_offset"]]
                self._text_offsets[index] = start + sum(map(len, logprobs["tokens"]))
        choice["logprobs"] = logprobs
        if chunk.is_last and completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if request.raw_output:
            choice["raw_output"] = {"completion_token_ids": self._echo_ids(prompt, is_first) + completion.token_ids}
        answer["choices"] = [choice]
        block = completion_block(
            completion,
            serving,
            self._options,
            prompt_ids=prompt if is_first else None,
            start_version=self._start_versions.get(index),
        )
        nvext = self._nvext([block], [index], completion, chunk.prompt_logprobs, whole=False)
        if nvext:
            answer["nvext"] = nvext
        return answer

    def usage_piece(self, prompt_tokens: int, completion_tokens: int, cached: int, serving: Serving) -> dict[str, Any]:
        """Build the closing chunk that `stream_options.include_usage` asks for."""
        kind = "chat.completion.chunk" if self._request.kind == "chat" else "text_completion"
        answer = self._envelope(kind, serving.snapshot_identity)
        answer["choices"] = []
        answer["usage"] = _usage(prompt_tokens, completion_tokens, cached)
        return answer

    def _envelope(self, kind: str, identity: str) -> dict[str, Any]:
        name = f"{self._served_name}@{identity}" if self._names_identity and identity else self._served_name
        return {"id": self._id, "object": kind, "created": self._created, "model": name}

    def _choice(
        self,
        index: int,
        completion: Completion,
        text: str,
        prompt: list[int],
        prompt_logprobs: Sequence[float | None] | None,
    ) -> dict[str, Any]:
        request = self._request
        text = self._echo_text(prompt) + text
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.finish_reason}
        if request.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        logprobs = self._logprobs(completion, prompt, 0) if request.logprobs else None
        if logprobs is not None and request.echo_tokens is not None and prompt_logprobs is not None:
            self._prepend_prompt(logprobs, prompt, prompt_logprobs)
        choice["logprobs"] = logprobs
        if completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if request.raw_output:
            choice["raw_output"] = {"completion_token_ids": self._echo_ids(prompt, True) + completion.token_ids}
        return choice

    def _echo_ids(self, prompt: list[int], is_first: bool) -> list[int]:
        wanted = self._request.echo_tokens
        if wanted is None or not is_first:
            return []
        return list(prompt) if wanted < 0 else list(prompt[len(prompt) - min(wanted, len(prompt)) :])

    def _echo_text(self, prompt: list[int]) -> str:
        ids = self._echo_ids(prompt, True)
        return self._tokenizer.decode(ids) if ids else ""

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._request.tokens_as_ids else self._tokenizer.token_text(token_id)

    def _logprobs(self, completion: Completion, prompt: list[int], offset: int) -> dict[str, Any]:
        request = self._request
        rows = (
            routing_matrices(completion, self._options, len(prompt) + offset)
            if request.include_routing_matrix
            else [None] * len(completion.token_ids)
        )
        content = []
        for position, token_id in enumerate(completion.token_ids):
            token = self._token(token_id)
            entry: dict[str, Any] = {
                "token": token,
                "bytes": list(self._tokenizer.token_text(token_id).encode()),
                "logprob": completion.logprobs[position],
                "sampling_logprob": completion.sampling_logprobs[position],
                "token_id": token_id,
                "top_logprobs": self._top(completion, position),
            }
            if rows[position] is not None:
                entry["routing_matrix"] = rows[position]
            content.append(entry)
        logprobs: dict[str, Any] = {"content": content}
        if request.kind == "text":
            logprobs |= _legacy(content)
        return logprobs

    def _top(self, completion: Completion, position: int) -> list[dict[str, Any]]:
        top = completion.top_logprobs
        if top is None or not self._request.top_logprobs:
            return []
        pairs = zip(top.token_ids[position], top.logprobs[position], strict=True)
        return [
            {
                "token": self._token(token_id),
                "logprob": logprob,
                "token_id": token_id,
                "bytes": list(self._tokenizer.token_text(token_id).encode()),
            }
            for token_id, logprob in pairs
        ]

    def _prepend_prompt(
        self, logprobs: dict[str, Any], prompt: list[int], prompt_logprobs: Sequence[float | None]
    ) -> None:
        ids = self._echo_ids(prompt, True)
        start = len(prompt) - len(ids)
        echoed = [
            {
                "token": self._token(token_id),
                "bytes": list(self._tokenizer.token_text(token_id).encode()),
                "logprob": prompt_logprobs[start + position],
                "token_id": token_id,
                "top_logprobs": [],
            }
            for position, token_id in enumerate(ids)
        ]
        logprobs["content"] = echoed + logprobs["content"]
        if self._request.kind == "text":
            logprobs |= _legacy(logprobs["content"])

    def _nvext(
        self,
        blocks: list[dict[str, Any]],
        indices: list[int],
        first: Completion | None,
        prompt_logprobs: Sequence[float | None] | None,
        *,
        whole: bool,
    ) -> dict[str, Any]:
        wanted = self._request.extra_fields
        out: dict[str, Any] = {}
        if "engine_data" in wanted:
            data: dict[str, Any] = {"schema": 1, "replica_id": self._replica_id}
            if self._request.n * len(self._request.prompts) == 1:
                data |= blocks[0] if blocks else {}
            else:
                named = [{"index": index, **block} for index, block in zip(indices, blocks, strict=True)]
                data["choices"] = named
            out["engine_data"] = data
        if first is not None and "completion_token_ids" in wanted:
            out["completion_token_ids"] = list(first.token_ids)
        if first is not None and "routed_experts" in wanted:
            routes = routed_experts_field(first, self._options)
            if routes is not None:
                out["routed_experts"] = routes
        if "prompt_logprobs" in wanted and prompt_logprobs is not None:
            out["prompt_logprobs"] = list(prompt_logprobs)
        if "worker_id" in wanted:
            out["worker_id"] = self._replica_id
        if "stop_reason" in wanted and first is not None and first.stop_reason is not None:
            out["stop_reason"] = first.stop_reason
        return out


def _legacy(content: list[dict[str, Any]]) -> dict[str, Any]:
    """The logprobs object of text completions: four parallel lists."""
    tokens, token_logprobs, top, offsets = [], [], [], []
    at = 0
    for entry in content:
        tokens.append(entry["token"])
        token_logprobs.append(entry["logprob"])
        top.append({one["token"]: one["logprob"] for one in entry["top_logprobs"]})
        offsets.append(at)
        at += len(entry["token"])
    return {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top, "text_offset": offsets}


def _usage(prompt_tokens: int, completion_tokens: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
