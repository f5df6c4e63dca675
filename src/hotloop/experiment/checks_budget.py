"""Errors of budgets: memory on GPU and host, the age of samples, rounds that a resume would run.

Owns: memory, staleness, resume, resume_runs_nothing.
Source: X01, X04 and X06 of experiment.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.experiment.records import MemoryTotal
from hotloop.experiment.rules import Facts, Say, error_rule
from hotloop.units import GIB, format_bytes, format_seconds


def _list_largest(facts: Facts, total: MemoryTotal) -> str:
    rows = [row for row in facts.memory.rows if row.phase == total.phase and row.item != "residue"]
    rows.sort(key=lambda row: -row.bytes)
    return ", ".join(f"{row.item} {row.bytes / GIB:.1f}" for row in rows[:4])


def _advise_lever(facts: Facts) -> str:
    lever = facts.memory.largest_lever
    if lever is None:
        return "Use a GPU with more memory, or smaller parallel shares."
    return f"Largest lever: {lever.title}, which saves {format_bytes(lever.saves_bytes)}."


@error_rule("memory", "nodes", "gpu", "cpu_adam", "recompute", "layout")
def check_memory(facts: Facts) -> Iterator[Say]:
    """Every phase fits where it runs."""
    for total in facts.memory.totals:
        if total.verdict != "over":
            continue
        if total.phase == "rollout" and total.bytes <= total.capacity_bytes:
            fraction = facts.recipe.mem_fraction_static
            yield Say(
                f"an engine of {facts.layout.engine_gpus} {facts.gpu.id}",
                f"holds no response of {facts.memory.prompt_tokens + facts.memory.response_tokens} tokens beside its "
                f"weights: static share {fraction:g} of {format_bytes(total.capacity_bytes)}, GiB: "
                f"{_list_largest(facts, total)}",
                "Use a GPU with more memory, a smaller precision, or a larger engine.",
                ("gpu", "precision", "response_tokens"),
            )
        elif total.phase == "host":
            yield Say(
                f"a node needs {format_bytes(total.bytes)} of host memory",
                f"it has {format_bytes(total.capacity_bytes)}. GiB: {_list_largest(facts, total)}",
                _advise_lever(facts),
            )
        else:
            who = "trainer" if total.phase == "train" else "engine"
            kept = sum(row.bytes for row in facts.memory.rows if (row.phase, row.item) == (total.phase, "residue"))
            yield Say(
                f"{who} needs {format_bytes(total.bytes - kept)} on each GPU",
                f"{facts.gpu.id} leaves {format_bytes(total.capacity_bytes - kept)} "
                f"({total.capacity_bytes / GIB:.1f} less {kept / GIB:.1f} kept back)",
                f"GiB: {_list_largest(facts, total)}. {_advise_lever(facts)}",
            )


@error_rule("staleness", "max_staleness", "concurrency", "response_tokens", "schedule")
def check_staleness(facts: Facts) -> Iterator[Say]:
    """Samples are predicted to be young enough when they are trained."""
    bound, predicted = facts.staleness.bound, facts.staleness.predicted
    if bound is None or predicted <= bound:
        return
    experiment = facts.experiment
    if experiment.schedule == "sync":
        yield Say(
            f"max_staleness = {bound}",
            f"partial rollouts are continued in a later round, so their first tokens are predicted to be {predicted} "
            "versions old when they are trained (estimate)",
            "Turn partial off, or lower response_tokens.",
            ("max_staleness", "partial", "response_tokens"),
        )
        return
    yield Say(
        f"max_staleness = {bound}",
        f"a sample is predicted to be {predicted} versions old when it is trained: a response takes "
        f"{format_seconds(facts.staleness.latency_s)}, a round {format_seconds(facts.staleness.round_s)}, and "
        f"{facts.staleness.queued_rounds} rounds of finished groups wait (estimate)",
        f"Lower concurrency (now {experiment.concurrency}, which bounds the queue) or response_tokens (now "
        f"{experiment.response_tokens}), or use the sync schedule.",
    )


@error_rule("resume", "rounds_more", "resume_from")
def check_resume_fields(facts: Facts) -> Iterator[Say]:
    """More rounds are counted from a checkpoint."""
    if facts.experiment.rounds_more is not None and not facts.experiment.resume_from.strip():
        yield Say(
            f"rounds_more = {facts.experiment.rounds_more}",
            "is counted from a checkpoint, and resume_from names none",
            "Set resume_from, or set rounds in place of rounds_more.",
        )


@error_rule("resume_runs_nothing", "rounds", "resume_from", "rounds_more")
def check_resume_runs_nothing(facts: Facts) -> Iterator[Say]:
    """A resumed run has rounds left (X06.1)."""
    plan = facts.resume
    if plan is not None and plan.first_round > 0 and plan.rounds_to_run == 0:
        yield Say(
            f"rounds = {plan.num_rounds}",
            f"rounds is an absolute end, and the checkpoint already holds round {plan.first_round - 1}",
            f"For k more rounds set rounds to {plan.first_round} + k, at least {plan.first_round + 1}.",
        )
