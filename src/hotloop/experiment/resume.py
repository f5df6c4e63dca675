"""Arithmetic of a resumed run: where it starts, how many rounds are left, when it saves.

Owns: X06 of the experiment specification, as pure functions used by the plan and by the run before its first round.

Promises: the same numbers on the page, in the plan and in the run. Iterations are round numbers, counted from 0; the
number of rounds is an absolute end, not a count of more rounds.
Does not do: reading checkpoints (loop/checkpoint.py).

Source: slime 624b824a, `train.py` and its `should_run_periodic_action`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hotloop.errors import InputError, Problem

_BATCH_KEYS = ("sampling.num_groups", "sampling.group_size", "optimizer.steps_per_round")
_PARALLEL_KEYS = ("nodes", "rollout_gpus", "prefill_gpus", "layout")


class ResumePlan(NamedTuple):
    """What a run that starts from a checkpoint, or from nothing, will do."""

    first_round: int
    rounds_to_run: int
    num_rounds: int
    """Absolute end: the last round is `num_rounds - 1`."""
    steps_per_round: int
    saves: tuple[int, ...]
    """Rounds after which a checkpoint is written."""
    prompts_consumed: int
    """Before the first round to run; exact for a sync run without a filter."""

    def render(self) -> str:
        """Say it in one line."""
        if self.first_round == 0:
            return f"{self.num_rounds} rounds from round 0, {self._render_saves()}"
        return (
            f"resume at round {self.first_round}: {self.rounds_to_run} of {self.num_rounds} rounds left, "
            f"{self.prompts_consumed} prompts consumed, {self._render_saves()}"
        )

    def _render_saves(self) -> str:
        if not self.saves:
            return "no save"
        shown = [str(round_) for round_ in self.saves]
        if len(shown) > 6:
            shown = [*shown[:3], "...", *shown[-2:]]
        return f"saves after rounds {', '.join(shown)}"


def is_save_due(round_: int, *, interval: int, num_rounds: int) -> bool:
    """Tell whether a checkpoint follows a round: every `interval` rounds, and the last one."""
    return (round_ + 1) % interval == 0 or round_ == num_rounds - 1


def compute_resume(
    latest_iteration: int | None,
    num_rounds: int,
    *,
    interval: int,
    num_groups: int,
    group_size: int,
    global_batch: int | None = None,
) -> ResumePlan:
    """Compute what a run does from the latest saved iteration.

    Args:
        latest_iteration: number in the tracker file; None when there is no checkpoint.
        num_rounds: absolute end.
        global_batch: rollouts per optimizer step; empty means the whole round.

    Formula: first round = latest + 1; rounds to run = max(0, num_rounds - first round); optimizer steps per round =
        num_groups * group_size / global_batch; prompts consumed = first round * num_groups.
    """
    first = 0 if latest_iteration is None else latest_iteration + 1
    per_round = num_groups * group_size
    return ResumePlan(
        first_round=first,
        rounds_to_run=max(0, num_rounds - first),
        num_rounds=num_rounds,
        steps_per_round=per_round // (global_batch or per_round),
        saves=tuple(r for r in range(first, num_rounds) if is_save_due(r, interval=interval, num_rounds=num_rounds)),
        prompts_consumed=first * num_groups,
    )


def compute_end_for_more(first_round: int, more_rounds: int) -> int:
    """Compute the absolute end that gives `more_rounds` more rounds."""
    return first_round + more_rounds


def check_resume(plan: ResumePlan) -> None:
    """Refuse a resume that would run nothing.

    Raises:
        InputError: code `resume_runs_nothing`, with the smallest value that runs a round.
    """
    if plan.first_round > 0 and plan.rounds_to_run == 0:
        raise InputError(
            "resume_runs_nothing",
            f"rounds is an absolute end, and the checkpoint already holds round {plan.first_round - 1}",
            where=f"rounds = {plan.num_rounds}",
            do=f"For k more rounds set rounds to {plan.first_round} + k, at least {plan.first_round + 1}.",
        )


def compare_for_resume(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Problem]:
    """List what a changed experiment changes for a resumed run.

    Args:
        before, after: flat choices, dotted path -> value, of the checkpoint's experiment and of the resuming one.

    Returns: one note per changed key. `resume_horizon`: batch sizes move the learning-rate horizon;
        `resume_parallel`: sizes that may change freely; `resume_changed`: anything else.
    """
    notes: list[Problem] = []
    for key in sorted(set(before) | set(after)):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        where = f"{key}: {old!r} -> {new!r}"
        if key in _BATCH_KEYS:
            why = "changes the optimizer steps per round, and with them the learning-rate horizon"
            notes.append(Problem("resume_horizon", why, where))
        elif key in _PARALLEL_KEYS:
            notes.append(Problem("resume_parallel", "may change: checkpoints can be resharded", where))
        else:
            notes.append(Problem("resume_changed", "differs from the run that saved the checkpoint", where))
    return notes
