"""The three ways a round can be scheduled, side by side, as spans on one clock.

Owns: `answer_schedules`: for sync, fully async and partial, what the sampler and the trainer would do, from the plan of
the experiment with that schedule chosen.

Promises: durations, staleness and mixed-version shares are the plan's own estimates; this file only lays them end to
end.

    sync     sampler |== sample ==|          |push|== sample ==|
             trainer              |= train =||push|
    async    sampler |== sample ==|push|== sample ==|push|
             trainer (waits)      |push|= train =|  |push|= train =|
    partial  as sync, and each round begins with the answers that the one before left unfinished
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotloop.experiment.apply import apply_edit
from hotloop.experiment.choices import Experiment
from hotloop.experiment.facts import SAVE_INTERVAL
from hotloop.experiment.plan import Plan
from hotloop.experiment.resume import is_save_due
from hotloop.lab.answers import plan_for, read_experiment

_ROUNDS_DRAWN = 3
_EDITS: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync", "partial": False},
    "async": {"schedule": "async", "partial": False},
    "partial": {"schedule": "sync", "partial": True},
}


def answer_schedules(body: Mapping[str, Any]) -> dict[str, Any]:
    """Lay out the three schedules of an experiment."""
    experiment = read_experiment(body.get("experiment"))
    chosen = "partial" if experiment.partial and experiment.schedule == "sync" else experiment.schedule
    schedules = [_describe(experiment, kind, kind == chosen) for kind in _EDITS]
    span = max(schedule["round_s"] for schedule in schedules) * (_ROUNDS_DRAWN - 0.9)
    for schedule in schedules:
        schedule["spans"] = [
            item | {"end_s": min(item["end_s"], span)} for item in schedule["spans"] if item["start_s"] < span
        ]
        schedule["checkpoints_s"] = [at for at in schedule["checkpoints_s"] if at <= span]
    return {"schedules": schedules, "span_s": span}


def _describe(experiment: Experiment, kind: str, is_chosen: bool) -> dict[str, Any]:
    applied = apply_edit(experiment, {} if is_chosen else _EDITS[kind])
    plan = plan_for(applied.experiment)
    times = {item.name: item.value for item in plan.estimates}
    rollout_s, train_s, sync_s, round_s = (times[name] for name in ("rollout_s", "train_s", "sync_s", "round_s"))
    mixed = plan.staleness.mixed_version_frac
    lay = _lay_async if kind == "async" else _lay_sync
    spans, saves = lay(plan, rollout_s, train_s, sync_s, round_s, mixed if kind == "partial" else 0.0)
    return {
        "kind": kind,
        "is_chosen": is_chosen,
        "round_s": round_s,
        "staleness": plan.staleness.predicted,
        "mixed_version_frac": mixed,
        "trainer_idle_frac": max(0.0, 1 - train_s / round_s) if round_s else 0.0,
        "moves": [change.field for change in applied.followed if change.field in ("layout", "transport")],
        "spans": spans,
        "checkpoints_s": saves,
        "save_interval": 1 if plan.resolved.straw else SAVE_INTERVAL,
    }


def _span(lane: str, kind: str, start: float, end: float) -> dict[str, Any]:
    return {"lane": lane, "kind": kind, "start_s": start, "end_s": end}


def _saves(plan: Plan, round_: int) -> bool:
    interval = 1 if plan.resolved.straw else SAVE_INTERVAL
    return is_save_due(round_, interval=interval, num_rounds=plan.resolved.rounds)


def _lay_sync(
    plan: Plan, rollout_s: float, train_s: float, sync_s: float, round_s: float, resumed: float
) -> tuple[list[dict[str, Any]], list[float]]:
    spans: list[dict[str, Any]] = []
    saves: list[float] = []
    for round_ in range(_ROUNDS_DRAWN + 1):
        start = round_ * round_s
        continued = start + (rollout_s * resumed if round_ else 0.0)
        if continued > start:
            spans.append(_span("sampler", "resume", start, continued))
        spans.append(_span("sampler", "sample", continued, start + rollout_s))
        spans.append(_span("trainer", "train", start + rollout_s, start + rollout_s + train_s))
        pushed = start + rollout_s + train_s
        spans += [_span(lane, "sync", pushed, pushed + sync_s) for lane in ("sampler", "trainer")]
        if _saves(plan, round_):
            saves.append(pushed)
    return spans, saves


def _lay_async(
    plan: Plan, rollout_s: float, train_s: float, sync_s: float, round_s: float, resumed: float
) -> tuple[list[dict[str, Any]], list[float]]:
    spans: list[dict[str, Any]] = []
    saves: list[float] = []
    for round_ in range(_ROUNDS_DRAWN + 2):
        start = round_ * round_s
        work = round_s - sync_s
        spans.append(_span("sampler", "sample", start, start + work))
        if round_:  # the first batch has to be sampled before there is anything to train on
            spans.append(_span("trainer", "train", start, start + train_s))
            if _saves(plan, round_ - 1):
                saves.append(start + train_s)
        spans += [_span(lane, "sync", start + work, start + round_s) for lane in ("sampler", "trainer")]
    return spans, saves
