"""The one call of page, command and export: an Experiment in, everything that follows from it out.

Owns: `Plan` and `build_plan`. A plan holds the layout, the memory account, the estimates, every finding, the proved
repairs, the resume arithmetic and the launch guide.

Promises: a pure function of the experiment (and of what the caller says about its resume folder and host); never
raises for an experiment whose model and GPU are in the catalogue. Does not do: write files (export/) or print (cli/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotloop.experiment.argv_rules import check_argv, note_argv
from hotloop.experiment.catalog.load import find_gpu, find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.checks import find_errors
from hotloop.experiment.choices import Experiment
from hotloop.experiment.launch import build_launch_guide
from hotloop.experiment.layout import Layout, compute_layout
from hotloop.experiment.memory import HOST_RAM_BYTES, compute_memory
from hotloop.experiment.notes import find_notes
from hotloop.experiment.records import (
    Estimate,
    Finding,
    LaunchStep,
    Lever,
    MemoryPlan,
    MemoryRow,
    Repair,
    Staleness,
    Verdict,
    to_plain,
)
from hotloop.experiment.resolve import effective_recipe, resolve
from hotloop.experiment.resume import ResumePlan, compute_end_for_more, compute_resume
from hotloop.experiment.rules import Facts, ResumeFacts
from hotloop.experiment.staleness import predict_staleness
from hotloop.experiment.throughput import compute_timings

__all__ = ["Estimate", "Finding", "LaunchStep", "MemoryRow", "Plan", "Repair", "ResumeFacts", "build_plan"]

SAVE_INTERVAL = 20
"""Rounds between saves that the export writes; 1 with the persistent queue."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that follows from an experiment."""

    experiment: Experiment
    """As given."""
    resolved: Experiment
    """Every empty choice filled from the model's recipe."""
    gpus: Mapping[str, int]
    """train, rollout, prefill, decode, external, ray, per_node."""
    layout: Layout
    memory: tuple[MemoryRow, ...]
    verdict: Verdict
    largest_lever: Lever | None
    memory_plan: MemoryPlan
    errors: tuple[Finding, ...]
    """Findings that stop an export and a run."""
    notes: tuple[Finding, ...]
    """Findings that do not."""
    repairs: tuple[Repair, ...]
    estimates: tuple[Estimate, ...]
    staleness: Staleness
    resume: ResumePlan | None
    """X06 arithmetic; None when the experiment does not resume."""
    launch: tuple[LaunchStep, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, the keys in the order of `hotloop plan --json`."""
        return {
            "gpus": to_plain(self.gpus),
            "layout": self.layout.to_json(),
            "memory": to_plain(self.memory),
            "verdict": self.verdict,
            "memory_totals": to_plain(self.memory_plan.totals),
            "largest_lever": to_plain(self.largest_lever),
            "assumptions": list(self.memory_plan.assumptions),
            "errors": to_plain(self.errors),
            "notes": to_plain(self.notes),
            "repairs": to_plain(self.repairs),
            "estimates": to_plain(self.estimates),
            "staleness": to_plain(self.staleness),
            "resume": to_plain(self.resume),
            "launch": to_plain(self.launch),
        }


def plan_resume(experiment: Experiment, facts: ResumeFacts | None) -> ResumePlan | None:
    """Compute what a resumed run does; None without a folder, or when nobody read it.

    Args: experiment: resolved.
    """
    if not experiment.resume_from or facts is None:
        return None
    end = experiment.rounds
    if experiment.rounds_more is not None:
        first = 0 if facts.latest_iteration is None else facts.latest_iteration + 1
        end = compute_end_for_more(first, experiment.rounds_more)
    sampling = experiment.sampling
    per_round = sampling.num_groups * sampling.group_size
    return compute_resume(
        facts.latest_iteration,
        end,
        interval=1 if experiment.straw else SAVE_INTERVAL,
        num_groups=sampling.num_groups,
        group_size=sampling.group_size,
        global_batch=max(1, per_round // experiment.optimizer.steps_per_round),
    )


def collect_facts(
    experiment: Experiment,
    catalog: Catalog,
    resume: ResumeFacts | None = None,
    host_ram_bytes: int = HOST_RAM_BYTES,
) -> Facts:
    """Compute everything that rules look at.

    Raises: InputError `unknown_model` or `unknown_gpu`.
    """
    model = find_model(catalog, experiment.model)
    gpu = find_gpu(catalog, experiment.gpu)
    resolved = resolve(experiment, catalog)
    recipe = effective_recipe(resolved, model)
    layout = compute_layout(resolved, catalog, model)
    memory = compute_memory(resolved, catalog, layout=layout, host_ram_bytes=host_ram_bytes)
    timings = compute_timings(resolved, model, recipe, gpu, layout, memory)
    return Facts(
        experiment=resolved,
        given=experiment,
        model=model,
        recipe=recipe,
        gpu=gpu,
        layout=layout,
        memory=memory,
        timings=timings,
        staleness=predict_staleness(resolved, layout, timings),
        catalog=catalog,
        resume=plan_resume(resolved, resume),
        resume_facts=resume,
        host_ram_bytes=host_ram_bytes,
    )


def collect_errors(facts: Facts) -> tuple[Finding, ...]:
    """Return the errors of the choices, then those of the argument vector that the choices did not already give."""
    errors = find_errors(facts)
    known = {error.code for error in errors}
    if facts.model.rollout_only:
        return errors
    more = (finding for finding in check_argv(facts.experiment, facts.model, facts.gpu) if finding.code not in known)
    return (*errors, *more)


def collect_notes(facts: Facts) -> tuple[Finding, ...]:
    """Return the notes of the choices, then those of the argument vector."""
    notes = find_notes(facts)
    known = {note.code for note in notes}
    if facts.model.rollout_only:
        return notes
    more = (finding for finding in note_argv(facts.experiment, facts.model, facts.gpu) if finding.code not in known)
    return (*notes, *more)


def count_gpus(layout: Layout) -> dict[str, int]:
    """Count GPUs by what they do."""
    by_role = {group.role: group.gpus for group in layout.groups}
    return {
        "train": layout.train_gpus,
        "rollout": layout.rollout_gpus,
        "prefill": by_role.get("prefill", 0),
        "decode": by_role.get("decode", 0),
        "external": layout.external_gpus,
        "ray": layout.ray_gpus,
        "per_node": layout.gpus_per_node,
    }


def build_plan(
    experiment: Experiment,
    *,
    catalog: Catalog | None = None,
    resume: ResumeFacts | None = None,
    host_ram_bytes: int = HOST_RAM_BYTES,
) -> Plan:
    """Work out everything that follows from an experiment.

    Args:
        catalog: the packaged one unless the caller added models.
        resume: what the caller found in the folder of `resume_from`; empty when nobody looked.
        host_ram_bytes: of one node.

    Raises: InputError `unknown_model` or `unknown_gpu`.
    """
    catalog = catalog or load_catalog()
    facts = collect_facts(experiment, catalog, resume, host_ram_bytes)
    errors = collect_errors(facts)
    return Plan(
        experiment=experiment,
        resolved=facts.experiment,
        gpus=count_gpus(facts.layout),
        layout=facts.layout,
        memory=facts.memory.rows,
        verdict=facts.memory.verdict,
        largest_lever=facts.memory.largest_lever,
        memory_plan=facts.memory,
        errors=errors,
        notes=collect_notes(facts),
        repairs=(),
        estimates=(),
        staleness=facts.staleness,
        resume=facts.resume,
        launch=build_launch_guide(facts.experiment, facts.model, facts.layout),
    )
