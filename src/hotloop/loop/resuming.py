"""Picking a stopped run up: its experiment, its last checkpoint, and the removal of what lies beyond it.

Owns: `Resumption` and `prepare_resume`.

Promises: after it, metrics and rollouts end with the round that the checkpoint holds, so the rounds that follow write
what an uninterrupted run would have written. Nothing is removed before every check has passed.
Does not do: the arithmetic (experiment/resume.py), checkpoints themselves (checkpoint.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotloop.errors import InputError, Problem
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.resume import ResumePlan, check_resume, compare_for_resume, compute_resume
from hotloop.loop.checkpoint import LoopState, find_latest, read_state, remove_unfinished
from hotloop.loop.run_folder import RunFolder
from hotloop.telemetry.jsonl import cut_lines

_ROLLOUT_FILE = re.compile(r"rollout_(\d+)\.jsonl\.zst")


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a run goes on."""

    plan: ResumePlan
    checkpoint: tuple[LoopState, Path] | None
    """None: nothing was saved, so the run starts over."""
    notes: Sequence[Problem]
    """What changed since the checkpoint was saved."""


def plan_run(experiment: Experiment, latest: int | None) -> ResumePlan:
    """Compute what a run of an experiment does from a saved iteration, or from nothing."""
    return compute_resume(
        latest,
        experiment.rounds,
        interval=experiment.laptop.checkpoint_interval,
        num_groups=experiment.sampling.num_groups,
        group_size=experiment.sampling.group_size,
        global_batch=max(
            1,
            experiment.sampling.num_groups * experiment.sampling.group_size // experiment.optimizer.steps_per_round,
        ),
    )


def prepare_resume(folder: RunFolder, before: Experiment, after: Experiment) -> Resumption:
    """Check that a run can go on and cut what lies beyond its last checkpoint.

    Args:
        before: the experiment in the run folder.
        after: the same with the settings of this resume.

    Raises:
        InputError: `resume_runs_nothing`, `resume_seed`, `resume_policy`, `checkpoint_broken`.
    """
    latest = find_latest(folder)
    plan = plan_run(after, latest)
    is_finished = folder.summary.is_file()
    if is_finished or plan.first_round > after.rounds:
        check_resume(plan)
    if latest is not None and before.laptop.seed != after.laptop.seed:
        raise InputError(
            "resume_seed",
            f"the run was started with seed {before.laptop.seed}, and its random numbers follow from it",
            where=f"laptop.seed = {after.laptop.seed}",
            do="Resume without a seed, or start a new run.",
        )
    if before.laptop.policy != after.laptop.policy:
        raise InputError(
            "resume_policy",
            f"the run started from {before.laptop.policy!r}, and its weights go on from there",
            where=f"laptop.policy = {after.laptop.policy!r}",
            do="Resume without a policy, or start a new run.",
        )
    checkpoint = None if latest is None else read_state(folder, latest)
    old, new = (dict(flatten(experiment.model_dump(mode="json"))) for experiment in (before, after))
    _cut(folder, latest)
    return Resumption(plan, checkpoint, compare_for_resume(old, new))


def _cut(folder: RunFolder, latest: int | None) -> None:
    last = -1 if latest is None else latest
    remove_unfinished(folder, latest)
    cut_lines(folder.metrics, lambda record: bool(record["round"] <= last))
    for path in list(folder.rollouts.iterdir()):
        match = _ROLLOUT_FILE.fullmatch(path.name)
        if match is None or int(match[1]) > last:
            path.unlink()
    folder.summary.unlink(missing_ok=True)
