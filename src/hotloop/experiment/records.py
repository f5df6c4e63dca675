"""What a plan is made of: the nouns that the planner's parts hand to each other and to page, command and export.

Owns: `Finding`, `Change`, `Repair`, `MemoryRow`, `MemoryPlan`, `Estimate`, `Staleness`, `LaunchStep`, and `to_plain`,
which turns any of them into JSON values.

Promises: immutable; no rules and no arithmetic here; a byte count is an integer. Named tuples, as all records of the
planner that many others stand beside: at each start of a command a frozen dataclass takes five times as long to make.
Does not do: layout records (layout.py), which carry their own rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Verdict = Literal["fits", "tight", "over"]
Phase = Literal["train", "rollout", "host"]


class Finding(NamedTuple):
    """A broken rule (in `errors`) or something to know (in `notes`)."""

    code: str
    message: str
    """Where, why [code], do: the whole sentence for a person."""
    fields: tuple[str, ...]
    """Choices that it concerns, snake_case."""


class Change(NamedTuple):
    """One choice before and after an edit, both as resolved by the recipe."""

    field: str
    before: Any
    after: Any
    rule: str = ""
    """The dependency rule (D01..D10) that made it; empty for what the user edited."""


class Repair(NamedTuple):
    """An edit that clears a finding and adds none; proved by running the checks on the edited experiment."""

    code: str
    """The finding that it clears."""
    title: str
    edit: Mapping[str, Any]
    """What to pass to `apply_edit`."""
    changes: tuple[Change, ...]
    clears: tuple[str, ...]
    """Codes of every error that is gone after it."""
    gpus_after: Mapping[str, int]
    """Allocation after the edit: train, rollout, prefill, decode, ray."""
    remaining: tuple[str, ...] = ()
    """What the user still has to supply, such as the RDMA device; never invented."""


class MemoryRow(NamedTuple):
    """One item of a memory account."""

    phase: Phase
    where: str
    """`gpu, stage 2 of 4`, `gpu, decode engine`, `node`."""
    item: str
    bytes: int
    formula: str
    """The formula with its numbers."""


class MemoryTotal(NamedTuple):
    """The sum of a phase's rows against what there is."""

    phase: Phase
    bytes: int
    capacity_bytes: int
    verdict: Verdict


class Lever(NamedTuple):
    """The edit that lowers the tightest phase most."""

    edit: Mapping[str, Any]
    phase: Phase
    saves_bytes: int
    title: str


class MemoryPlan(NamedTuple):
    """Itemised bytes of the worst GPU of each phase and of a node's host."""

    rows: tuple[MemoryRow, ...]
    totals: tuple[MemoryTotal, ...]
    verdict: Verdict
    largest_lever: Lever | None
    stage_bytes: tuple[int, ...]
    """Training bytes of a GPU of each pipeline stage."""
    cpu_optimizer_bytes: int
    """Host memory of the CPU optimizer on a trainer node; 0 when it is off."""
    hicache_bytes: int
    """Host memory of the host cache on a node with engines that have one; 0 when it is off."""
    kv_bytes_per_token: int
    """On one engine GPU, for a token that it keeps."""
    kv_capacity_tokens: int
    """Tokens of KV cache that one engine holds; 0 when nothing is left for it."""
    requests_capacity: int
    """Whole responses (prompt and response) that one engine can hold at a time."""
    balanced_state_ratio: float
    """State over KV at which both run out together; 0 for a model without recurrent layers."""
    prompt_tokens: int
    response_tokens: int
    assumptions: tuple[str, ...]

    def total(self, phase: Phase) -> MemoryTotal:
        """Return the total of one phase."""
        return next(total for total in self.totals if total.phase == phase)


class Estimate(NamedTuple):
    """A predicted figure. Always an estimate: it names what it assumes."""

    name: str
    value: float
    unit: str
    formula: str
    assumptions: tuple[str, ...]
    is_estimate: Literal[True] = True


class Staleness(NamedTuple):
    """Predicted age of a sample when it is trained (X04)."""

    bound: int | None
    predicted: int
    latency_s: float
    round_s: float
    queued_rounds: int
    mixed_version_frac: float
    """Share of responses expected to hold tokens of more than one version."""


class LaunchStep(NamedTuple):
    """One thing to do on one place, in order. Shown, never run by hotloop."""

    where: str
    """`every node`, `head node`, `node 1..7`, `outside the cluster`."""
    what: str
    command: str = ""
    """Shell text, or empty when the step is a thing to check."""


class Applied(NamedTuple):
    """An edit and all that followed from it, as one undoable step."""

    experiment: Any
    edited: tuple[Change, ...]
    followed: tuple[Change, ...] = ()


def to_plain(value: Any) -> Any:
    """Return a record as JSON values: objects, lists, numbers, text."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: to_plain(item) for key, item in value._asdict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value
