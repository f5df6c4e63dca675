"""Records of the field, shared by every package. Nouns only: no I/O, no torch, no rules beyond a length check.

Owns: Task, SamplingParams, VersionSpan, Completion, Score, Rollout, Group, Sample. Token-level records are flat
and equal in length; a field says its length in brackets.

Promises: records are immutable; a token's policy version and its behaviour logprob travel with it from the engine to
the optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
RolloutStatus = Literal["completed", "truncated", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, and what a verifier needs to judge an answer."""

    task_id: str
    prompt: str | tuple[Mapping[str, str], ...]
    """Text, or chat messages with `role` and `content`."""
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine draws tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; the sampling logprob of a greedy token is 0.0."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Stop strings; the text of the completion is cut before the first match, the token ids are kept whole."""
    seed: int | None = None
    """Same seed, same prompt, same weights: same tokens, whatever else runs beside the request."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Half-open range of completion tokens produced by one policy version."""

    start: int
    end: int
    policy_version: int
    snapshot_identity: str = ""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The k best tokens at each position; rows sorted by logprob, ties by id, possibly shorter than k."""

    k: int
    kind: Literal["sampling", "raw"]
    token_ids: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Support:
    """Tokens that survived top-k, top-p and min-p at each position, as a ragged array."""

    offsets: list[int]
    """[T + 1], first 0."""
    token_ids: list[int]
    """[offsets[-1]], rising inside each row."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of an engine: T sampled tokens and everything recorded when they were drawn."""

    token_ids: list[int]
    """[T] one per token; includes the stop token if one was sampled."""
    sampling_logprobs: list[float]
    """[T] natural logs under the distribution actually sampled from."""
    logprobs: list[float]
    """[T] natural logs from the raw logits (temperature 1, nothing removed)."""
    version_spans: list[VersionSpan]
    """Cover [0, T) in order; empty when T is 0."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    top_logprobs: TopLogprobs | None = None
    support: Support | None = None
    routed_experts: Any = None
    """uint8 or uint16 numpy array [prompt + T - 1 - start, layers, top_k], or None for a dense policy."""
    routed_experts_start: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused."""


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's judgement of one rollout."""

    reward: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rollout:
    """One attempt at one task, from its first token to its end."""

    rollout_id: int
    group_id: int
    index: int
    """Position among the siblings, 0 .. group_size - 1; never used for grouping."""
    task: Task
    prompt_ids: list[int]
    completion: Completion
    response: str
    status: RolloutStatus
    score: Score | None = None
    failure: str = ""
    """Why a failed rollout failed; failed rollouts are never trained on and never count as reward 0."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt that share a baseline."""

    group_id: int
    task: Task
    rollouts: list[Rollout]


@dataclass(slots=True)
class Sample:
    """One flat training sequence of T = len(ids) tokens, cut from a rollout."""

    ids: list[int]
    """[T] prompt and response."""
    mask: list[int]
    """[T] 1 where the token enters the loss; 0 on the prompt and on tool tokens."""
    behaviour_logprobs: list[float]
    """[T] recorded when drawn; 0.0 where mask is 0."""
    advantages: list[float]
    """[T] per token."""
    rollout_id: int
    group_id: int
    oldest_policy_version: int
    routed_experts: Any = None
    support: Support | None = None
    """Tokens that survived truncation at the last `len(offsets) - 1` positions, an empty row meaning all; None: no
    truncation. The trainer's logprobs are taken over the same tokens."""
