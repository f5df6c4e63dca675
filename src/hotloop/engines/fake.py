"""A scripted engine without torch: the Engine port over a table of next-token logits.

Owns: `FakeEngine`. Its policy is a bigram table ("fake.weight", [V, V] fp32): the logits of the next token depend on
the last token only, so a test can work out every number by hand. Opened on a policy directory, it keeps that
directory's tensors byte for byte instead (so installs can be checked) and derives the table from their bytes.

Promises: the Engine port, held by the same contract tests as the real engine. With `manual` steps only happen in
`advance(n)`, so a test decides exactly what happens before, between and after two tokens; without it, a task steps and
lets other tasks run between steps.

Does not do: routes, slots, speed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.engines.base import Chunk, EngineInfo, EngineSettings, GenerateRequest, WeightUpdate
from hotloop.errors import HotloopError, InputError, RunError
from hotloop.models.tokenizer import StopMatcher, Tokenizer, open_tokenizer
from hotloop.types import Completion, FinishReason, Support, TopLogprobs, VersionSpan

Floats = npt.NDArray[np.float64]
_Prefixes = dict[int, Any]
"""Prompts as a tree: token -> what has followed it there. As many nodes as there are different prefixes."""
TABLE = "fake.weight"


@dataclass(slots=True, eq=False)
class _Answer:
    """One completion in flight."""

    request: GenerateRequest
    index: int
    seed: int
    stream: bool
    out: asyncio.Queue[Chunk | BaseException]
    matcher: StopMatcher | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, str]] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)
    sent: int = 0
    cached_tokens: int = 0


class FakeEngine:
    """An engine whose every number can be worked out by hand."""

    def __init__(
        self,
        *,
        vocab_size: int = 32,
        max_context: int = 64,
        max_slots: int = 64,
        table: npt.NDArray[np.float32] | None = None,
        tensors: Mapping[str, tuple[str, bytes]] | None = None,
        tokenizer: Tokenizer | None = None,
        manual: bool = False,
        fails_once_at: int | None = None,
    ) -> None:
        self._info = EngineInfo("fake", vocab_size, max_context, 1, 0, 0)
        self._max_slots = max_slots
        self._tokenizer = tokenizer
        self._manual = manual
        self._fails_once_at = fails_once_at
        """Policy version whose first write breaks off midway."""
        self._dtypes = {name: dtype for name, (dtype, _) in (tensors or {}).items()}
        self._bytes = {name: bytearray(data) for name, (_, data) in (tensors or {}).items()}
        if not self._bytes:
            if table is None:
                table = np.random.default_rng(0).normal(size=(vocab_size, vocab_size)).astype(np.float32)
            self._dtypes[TABLE] = "F32"
            self._bytes[TABLE] = bytearray(np.ascontiguousarray(table, dtype="<f4").tobytes())
        self._table = self._build_table()
        self._version, self._identity = 0, ""
        self._active: list[_Answer] = []
        self._seen: dict[str, _Prefixes] = {}
        self._is_paused = False
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None
        self.num_steps = 0

    @classmethod
    def open(cls, settings: EngineSettings) -> FakeEngine:
        """Open from settings; `options` may hold `vocab_size`, `manual`, `fails_once_at`.

        Raises:
            InputError: the policy directory has no config.json.
        """
        tensors: dict[str, tuple[str, bytes]] = {}
        tokenizer = None
        vocab_size = int(settings.options.get("vocab_size", 32))
        if settings.policy_dir:
            directory = Path(settings.policy_dir)
            config = directory / "config.json"
            if not config.is_file():
                raise InputError("policy_not_found", "there is no config.json", where=str(directory))
            vocab_size = int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
            for path in sorted(directory.glob("*.safetensors")):
                tensors |= _read_tensors(path)
            if (directory / "tokenizer.json").is_file():
                tokenizer = open_tokenizer(directory)
        return cls(
            vocab_size=vocab_size,
            max_context=settings.max_context or 64,
            max_slots=settings.max_slots,
            tensors=tensors,
            tokenizer=tokenizer,
            manual=bool(settings.options.get("manual", False)),
            fails_once_at=settings.options.get("fails_once_at"),
        )

    # -- the port ----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    @property
    def policy_version(self) -> int:
        """Version of the tensors held."""
        return self._version

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Yield chunks as tokens come (`stream`), or one last chunk per completion; see the port."""
        if self._is_closed:
            raise RunError("engine_closed", "the engine was closed")
        self._check(request)
        out: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()
        cached = self._count_cached(request)
        base = secrets.randbits(63) if request.params.seed is None else request.params.seed
        answers = [
            _Answer(
                request=request,
                index=index,
                seed=request.seeds[index] if request.seeds else (base * 1_000_003 + index) % 2**63,
                stream=stream,
                out=out,
                matcher=self._open_matcher(request),
                cached_tokens=cached,
            )
            for index in range(request.n)
        ]
        if request.params.max_new_tokens == 0:
            for answer in answers:
                self._emit(answer, "length", None)
        else:
            self._active.extend(answers)
            self._wake()
        left = request.n
        try:
            while left:
                chunk = await out.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                left -= chunk.is_last
                yield chunk
        finally:
            self._active = [answer for answer in self._active if answer.out is not out]

    async def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown ids do nothing."""
        for answer in [one for one in self._active if one.request.request_id == request_id]:
            self._active.remove(answer)
            self._emit(answer, "abort", None)

    async def pause(self) -> None:
        """Stop stepping; requests stay."""
        self._is_paused = True

    async def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        self._wake()

    async def write_weights(self, update: WeightUpdate) -> None:
        """Install whole tensors and ranges.

        Raises:
            HotloopError: code `not_paused`, or `install_failed`; nothing was written.
        """
        if not self._is_paused and self._active:
            raise HotloopError("not_paused", "weights can only be written while the engine is paused")
        if update.policy_version == self._fails_once_at and (update.ranges or update.tensors):
            self._bytes = {name: bytearray(len(data)) for name, data in self._bytes.items()}
            raise HotloopError("install_failed", "the device failed after half of the write")
        fresh = {name: bytearray(data) for name, data in self._bytes.items()}
        for name, value in update.tensors.items():
            self._require(name)
            data = _cast(value, self._dtypes[name])
            if len(data) != len(fresh[name]):
                raise _failed(name, f"{len(data)} bytes where the policy has {len(fresh[name])}")
            fresh[name][:] = data
        for one in update.ranges:
            self._require(one.name)
            new, at = memoryview(one.data).cast("B"), 0
            for offset, length in zip(list(one.offsets), list(one.lengths), strict=True):
                if offset < 0 or length < 0 or offset + length > len(fresh[one.name]):
                    raise _failed(one.name, f"a range lies outside the tensor's {len(fresh[one.name])} bytes")
                fresh[one.name][offset : offset + length] = new[at : at + length]
                at += int(length)
            if at != len(new):
                raise _failed(one.name, f"the ranges cover {at} bytes and {len(new)} came")
        self._bytes = fresh
        self._table = self._build_table()
        self._version, self._identity = update.policy_version, update.snapshot_identity

    async def close(self) -> None:
        """End every request with `engine_closed`."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        for answer in self._active:
            answer.out.put_nowait(RunError("engine_closed", "the engine was closed"))
        self._active.clear()

    # -- for tests ---------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Completions in flight."""
        return len(self._active)

    def tensor_bytes(self, name: str) -> bytes:
        """Give what is held for a checkpoint tensor."""
        return bytes(self._bytes[name])

    def distribution(self, last_id: int) -> Floats:
        """Give the raw log-probabilities after a token, [V]."""
        return _log_softmax(self._table[last_id])

    async def advance(self, steps: int = 1) -> None:
        """Take steps by hand; each gives every completion in flight one token. Other tasks run after each."""
        for _ in range(steps):
            await asyncio.sleep(0)
            self._step()
            await asyncio.sleep(0)

    # -- inside ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._manual and self._active and not self._is_paused and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        await asyncio.sleep(0)
        while self._active and not self._is_paused:
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        self.num_steps += 1
        for answer in list(self._active):
            self._draw(answer)
            reason, stop_reason = self._find_end(answer)
            if reason is not None:
                self._active.remove(answer)
            if reason is not None or answer.stream:
                self._emit(answer, reason, stop_reason)

    def _draw(self, answer: _Answer) -> None:
        request, params = answer.request, answer.request.params
        last = answer.ids[-1] if answer.ids else int(request.prompt_ids[-1])
        logits = self._table[last].astype(np.float64)
        raw = _log_softmax(logits)
        for token, value in params.logit_bias.items():
            logits[int(token)] += value
        kept = np.ones(len(logits), dtype=bool)
        if params.temperature == 0:
            sampling = np.full(len(logits), -math.inf)
            sampling[int(logits.argmax())] = 0.0
        else:
            with np.errstate(over="ignore"):  # a tiny temperature is almost greedy, not an error
                logits = (logits - logits.max()) / params.temperature
            kept = _keep(logits, params.top_k, params.top_p, params.min_p)
            sampling = _log_softmax(np.where(kept, logits, -math.inf))
        uniform = np.random.default_rng([answer.seed, len(answer.ids)]).random()
        cumulative = np.exp(sampling).cumsum()
        token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        answer.ids.append(token)
        answer.logprobs.append(float(raw[token]))
        answer.sampling_logprobs.append(float(sampling[token]))
        answer.versions.append((self._version, self._identity))
        if request.top_logprobs:
            source = sampling if request.top_logprobs_kind == "sampling" else raw
            order = [int(i) for i in np.lexsort((np.arange(len(source)), -source)) if source[i] > -math.inf]
            best = order[: request.top_logprobs]
            answer.top.append((best, [float(source[i]) for i in best]))
        if request.return_support:
            answer.support.append(np.flatnonzero(kept).tolist())

    def _find_end(self, answer: _Answer) -> tuple[FinishReason | None, str | int | None]:
        params, token = answer.request.params, answer.ids[-1]
        if token in params.stop_token_ids:
            return "stop", token
        if answer.matcher is not None:
            text = answer.matcher.push(token)
            if text is not None:
                return "stop", text
        room = self._info.max_context - len(answer.request.prompt_ids)
        return ("length", None) if len(answer.ids) >= min(params.max_new_tokens, room) else (None, None)

    def _emit(self, answer: _Answer, reason: FinishReason | None, stop_reason: str | int | None) -> None:
        request, start, stop = answer.request, answer.sent, len(answer.ids)
        part = slice(start, stop)
        top = support = None
        if request.top_logprobs:
            rows = answer.top[part]
            top = TopLogprobs(
                request.top_logprobs,
                request.top_logprobs_kind,
                [ids for ids, _ in rows],
                [values for _, values in rows],
            )
        params = request.params
        if request.return_support and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            kept = answer.support[part]
            offsets = [0]
            for row in kept:
                offsets.append(offsets[-1] + len(row))
            support = Support(offsets, [token for row in kept for token in row])
        completion = Completion(
            token_ids=answer.ids[part],
            sampling_logprobs=answer.sampling_logprobs[part],
            logprobs=answer.logprobs[part],
            version_spans=_spans(answer.versions, start),
            finish_reason=reason or "length",
            stop_reason=stop_reason,
            top_logprobs=top,
            support=support,
            cached_tokens=answer.cached_tokens,
        )
        prompt_logprobs = None
        if request.return_prompt_logprobs and start == 0:
            ids = [int(token) for token in request.prompt_ids]
            prompt_logprobs = [
                None,
                *(float(self.distribution(before)[after]) for before, after in itertools.pairwise(ids)),
            ]
        answer.sent = stop
        answer.out.put_nowait(
            Chunk(request.request_id, answer.index, completion, reason is not None, reason, prompt_logprobs)
        )

    def _check(self, request: GenerateRequest) -> None:
        where = f"request {request.request_id}"
        size, context = len(request.prompt_ids), self._info.max_context
        if size == 0:
            raise InputError("empty_prompt", "a prompt needs at least one token", where=where)
        if size > context or (size == context and request.params.max_new_tokens > 0):
            raise InputError(
                "prompt_too_long", f"the prompt has {size} tokens, the context holds {context}", where=where
            )
        if any(not 0 <= token < self._info.vocab_size for token in request.prompt_ids):
            raise InputError("token_out_of_vocabulary", f"the vocabulary has {self._info.vocab_size} ids", where=where)
        if any(not 0 <= int(token) < self._info.vocab_size for token in request.params.logit_bias):
            raise InputError("sampling_params", f"logit_bias names a token outside 0..{self._info.vocab_size - 1}")
        if not 1 <= request.n <= self._max_slots:
            raise InputError(
                "too_many_completions", f"must be 1 to {self._max_slots}", where=f"{where}: n = {request.n}"
            )

    def _count_cached(self, request: GenerateRequest) -> int:
        """Pretend to reuse the longest earlier prompt of this namespace that begins this one, but its last token."""
        node = self._seen.setdefault(request.cache_namespace, {})
        best = 0
        for position, token in enumerate(request.prompt_ids):
            if token in node:
                best = position + 1
            node = node.setdefault(int(token), {})
        return min(best, len(request.prompt_ids) - 1)

    def _open_matcher(self, request: GenerateRequest) -> StopMatcher | None:
        if not request.params.stop:
            return None
        if self._tokenizer is None:
            raise InputError("tokenizer_not_found", "stop strings need a tokenizer and this engine has none")
        return StopMatcher(self._tokenizer, request.params.stop)

    def _require(self, name: str) -> None:
        if name not in self._bytes:
            raise _failed(name, "the policy has no such tensor")

    def _build_table(self) -> Floats:
        size = self._info.vocab_size
        if TABLE in self._bytes:
            return np.frombuffer(bytes(self._bytes[TABLE]), dtype="<f4").reshape(size, size).astype(np.float64)
        seed = 0
        for name in sorted(self._bytes):
            seed = zlib.crc32(self._bytes[name], seed)
        return np.random.default_rng(seed).normal(size=(size, size))


def _spans(versions: list[tuple[int, str]], start: int) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for at in range(start, len(versions)):
        if spans and versions[at] == versions[at - 1]:
            spans[-1] = VersionSpan(spans[-1].start, at + 1, *versions[at])
        else:
            spans.append(VersionSpan(at, at + 1, *versions[at]))
    return spans


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    result: Floats = shifted - math.log(np.exp(shifted).sum())
    return result


def _keep(logits: Floats, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k > 0:
        order = order[:top_k]
    probs = np.exp(_log_softmax(logits[order]))
    count = len(order)
    if top_p < 1:
        count = min(count, int(((probs.cumsum() - probs) < top_p).sum()))
    if min_p > 0:
        count = min(count, int((probs >= min_p * probs[0]).sum()))
    kept = np.zeros(len(logits), dtype=bool)
    kept[order[: max(count, 1)]] = True
    return kept


def _failed(where: str, why: str) -> HotloopError:
    return HotloopError("install_failed", why, where=where, do="Publish an anchor of this policy and load that.")


def _cast(value: Any, dtype: str) -> bytes:
    """Turn an array into the bytes of a checkpoint dtype."""
    array = np.asarray(value)
    if dtype == "BF16":
        if array.dtype.name == "bfloat16" or array.dtype.itemsize == 2:
            return array.tobytes()
        bits = np.ascontiguousarray(array, dtype="<f4").view("<u4").astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        return rounded.astype("<u2").tobytes()
    return np.ascontiguousarray(
        array, dtype={"F64": "<f8", "F32": "<f4", "F16": "<f2"}.get(dtype, array.dtype)
    ).tobytes()


def _read_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Read a safetensors file: 8 bytes of header length, a JSON header, then the tensors."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    return {
        name: (entry["dtype"], body[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in header.items()
        if name != "__metadata__"
    }
