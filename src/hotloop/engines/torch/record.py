"""What was recorded when tokens were drawn: per-completion buffers, and `Completion` records cut from them.

Owns: one row of preallocated arrays per completion in flight (random number, token, both logprobs, routes), its version
spans, and the optional heads (top logprobs, support).

Promises: writing a step is one indexed store per array, whatever the number of completions; Python lists are made
only when a completion ends or a chunk is sent; a version span starts exactly at the first token drawn after a write.

Does not do: decide when a completion ends (core.py).

Shapes: T tokens of a completion, L layers, E experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from hotloop.engines.torch.draw import Keys, compute_uniforms
from hotloop.types import Completion, FinishReason, Support, TopLogprobs, VersionSpan

Ints = npt.NDArray[np.int64]
_FIRST_WIDTH = 32


@dataclass(slots=True)
class Heads:
    """Optional per-token rows of one completion, in drawing order."""

    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which optional heads a request asked for."""

    top_k: int = 0
    top_kind: Literal["sampling", "raw"] = "sampling"
    support: bool = False

    @property
    def anything(self) -> bool:
        """True when per-token Python work is needed."""
        return self.top_k > 0 or self.support


Numbers = tuple[list[int], list[float], list[float]]
"""Tokens, sampling logprobs and raw logprobs of one completion."""

# Most completions of a step have equal spans; the record is immutable, so one object serves all.
_span = lru_cache(maxsize=4096)(VersionSpan)


@dataclass(frozen=True, slots=True)
class Lists:
    """Tokens and logprobs of several completions, longer than each may need."""

    tokens: list[list[int]]
    sampling_logprobs: list[list[float]]
    logprobs: list[list[float]]

    def pick(self, at: int) -> Numbers:
        """Give those of one completion."""
        return self.tokens[at], self.sampling_logprobs[at], self.logprobs[at]


class RecordBuffer:
    """Arrays for every completion in flight, addressed by slot; widths grow by doubling."""

    def __init__(self, num_slots: int, route_shape: tuple[int, int] | None, route_dtype: type[np.generic]) -> None:
        self._route_shape = route_shape
        self._route_dtype = route_dtype
        self._free = list(range(num_slots - 1, -1, -1))
        self._width = 0
        self._num_slots = num_slots
        self.tokens = np.empty((num_slots, 0), dtype=np.int32)
        self.logprobs = np.empty((num_slots, 0), dtype=np.float32)
        self.sampling_logprobs = np.empty((num_slots, 0), dtype=np.float32)
        self._keys = np.zeros(num_slots, dtype=np.uint64)
        self._uniforms = np.empty((num_slots, 0))
        self._routes: npt.NDArray[np.generic] | None = None
        self._spans: list[list[tuple[int, int, str]]] = [[] for _ in range(num_slots)]
        self._heads: dict[int, Heads] = {}

    def open(self, keys: Keys, version: int, identity: str) -> Ints:
        """Take a slot for each key: new completions whose first token will come from this version."""
        slots = [self._free.pop() for _ in range(len(keys))]
        for slot in slots:
            self._spans[slot] = [(0, version, identity)]
        taken = np.array(slots, dtype=np.int64)
        self._keys[taken] = keys
        self._uniforms[taken] = compute_uniforms(keys[:, None], np.arange(self._width)[None])
        return taken

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)
        if self._heads:
            self._heads.pop(slot, None)

    def uniforms(self, slots: Ints, positions: Ints) -> npt.NDArray[np.float64]:
        """Give the random number of each completion at its position; see draw.compute_uniforms."""
        need = int(positions.max()) + 1
        if need > self._width:
            self._grow(need)
        numbers: npt.NDArray[np.float64] = self._uniforms.ravel()[slots * self._width + positions]
        return numbers

    def uniform(self, slot: int, position: int) -> float:
        """Give the random number of one completion."""
        if position >= self._width:
            self._grow(position + 1)
        return float(self._uniforms[slot, position])

    def write_one(self, slot: int, position: int, token: int, logprob: float) -> None:
        """Store one token that was drawn from the raw distribution."""
        self.tokens[slot, position] = token
        self.logprobs[slot, position] = logprob
        self.sampling_logprobs[slot, position] = logprob

    def write(
        self,
        slots: Ints,
        positions: Ints,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        sampling_logprobs: npt.NDArray[np.float32],
    ) -> None:
        """Store the tokens that were just drawn with the numbers that `uniforms` gave for these positions."""
        where = slots * self._width + positions
        self.tokens.ravel()[where] = tokens
        self.logprobs.ravel()[where] = logprobs
        self.sampling_logprobs.ravel()[where] = sampling_logprobs

    def read(self, slots: Ints, length: int) -> Lists:
        """Turn the first `length` tokens and logprobs of several completions into Python lists at once."""
        return Lists(
            self.tokens[slots, :length].tolist(),
            self.sampling_logprobs[slots, :length].tolist(),
            self.logprobs[slots, :length].tolist(),
        )

    def write_routes(self, slots: Ints, positions: Ints, routes: npt.NDArray[np.generic]) -> None:
        """Store the routes [C, L, E] of completion token `positions`, known when that token has been fed."""
        if self._routes is None:
            assert self._route_shape is not None
            self._routes = np.zeros((self._num_slots, self._width, *self._route_shape), dtype=self._route_dtype)
        self._routes[slots, positions] = routes

    def all_routes(self, slot: int, prompt_routes: npt.NDArray[np.generic], count: int) -> npt.NDArray[np.generic]:
        """Give the routes of the prompt and of the count - 1 tokens that have been fed, [prompt + count - 1, L, E]."""
        if self._routes is None:
            return prompt_routes
        return np.concatenate((prompt_routes, self._routes[slot, : count - 1]))

    def heads(self, slot: int) -> Heads:
        """Give the optional rows of one completion."""
        return self._heads.setdefault(slot, Heads())

    def start_version(self, slots: Ints, counts: Ints, version: int, identity: str) -> None:
        """Note that tokens from `counts` on come from another version."""
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            spans = self._spans[slot]
            if spans[-1][0] == count:
                spans.pop()
            spans.append((count, version, identity))

    def spans(self, slot: int, start: int, stop: int) -> list[VersionSpan]:
        """Give the version spans that touch tokens start .. stop-1, in absolute positions."""
        edges = self._spans[slot]
        if len(edges) == 1:
            return [_span(start, stop, *edges[0][1:])] if start < stop else []
        found = []
        for index, (begin, version, identity) in enumerate(edges):
            end = edges[index + 1][0] if index + 1 < len(edges) else stop
            lower, upper = max(begin, start), min(end, stop)
            if lower < upper:
                found.append(_span(lower, upper, version, identity))
        return found

    def cut(
        self,
        slot: int,
        start: int,
        stop: int,
        numbers: Numbers,
        *,
        finish_reason: FinishReason,
        stop_reason: str | int | None,
        wanted: Wanted,
        cached_tokens: int,
        prompt_routes: npt.NDArray[np.generic] | None,
        prompt_length: int,
    ) -> Completion:
        """Make the record of tokens start .. stop-1.

        Args:
            numbers: what `read` gave for this slot, from token 0 on.
            prompt_routes: [prompt, L, E] when routes were asked for. A chunk holds the rows that became known since
                the chunk before: the row of a token is known once it has been fed, one step after it was drawn.
        """
        top = support = None
        if wanted.anything:
            heads = self.heads(slot)
            if wanted.top_k > 0:
                top = TopLogprobs(
                    wanted.top_k, wanted.top_kind, heads.top_ids[start:stop], heads.top_logprobs[start:stop]
                )
            if wanted.support:
                rows = heads.support[start:stop]
                offsets = [0, *np.cumsum([len(row) for row in rows], dtype=np.int64).tolist()]
                support = Support(offsets, [token for row in rows for token in row])
        routes, routes_start = None, 0
        if prompt_routes is not None:
            known = max(stop - 1, 0)
            parts = [prompt_routes] if start == 0 else []
            if start == 0 and stop == 0:
                parts = [prompt_routes[:-1]]
            if self._routes is not None:
                parts.append(self._routes[slot, max(start - 1, 0) : known])
            routes = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
            routes_start = 0 if start == 0 else prompt_length + start - 1
        return Completion(
            token_ids=numbers[0][start:stop],
            sampling_logprobs=numbers[1][start:stop],
            logprobs=numbers[2][start:stop],
            version_spans=self.spans(slot, start, stop),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            top_logprobs=top,
            support=support,
            routed_experts=routes,
            routed_experts_start=routes_start,
            cached_tokens=cached_tokens,
        )

    def _grow(self, need: int) -> None:
        width = max(_FIRST_WIDTH, 1 << (need - 1).bit_length())
        extra = width - self._width
        pad = np.zeros((self._num_slots, extra))
        self.tokens = np.concatenate((self.tokens, pad.astype(np.int32)), 1)
        self.logprobs = np.concatenate((self.logprobs, pad.astype(np.float32)), 1)
        self.sampling_logprobs = np.concatenate((self.sampling_logprobs, pad.astype(np.float32)), 1)
        fresh = compute_uniforms(self._keys[:, None], np.arange(self._width, width)[None])
        self._uniforms = np.concatenate((self._uniforms, fresh), 1)
        if self._routes is not None:
            more = np.zeros((self._num_slots, extra, *self._routes.shape[2:]), dtype=self._route_dtype)
            self._routes = np.concatenate((self._routes, more), 1)
        self._width = width
