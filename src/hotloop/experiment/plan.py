"""The one call of page, command and export: an Experiment in, everything that follows from it out.

Owns: `Plan` and `build_plan`. A plan holds the layout, the memory account, the estimates, every finding, the proved
repairs, the resume arithmetic and the launch guide.

Promises: a pure function of the experiment (and of what the caller says about its resume folder and host); never
raises for an experiment whose model and GPU are in the catalogue. Does not do: write files (export/) or print (cli/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.estimates import list_estimates
from hotloop.experiment.export.launch import launch_guide
from hotloop.experiment.facts import collect_errors, collect_facts, collect_notes
from hotloop.experiment.layout import Layout, count_gpus
from hotloop.experiment.memory import HOST_RAM_BYTES
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
from hotloop.experiment.repairs import find_repairs
from hotloop.experiment.resume import ResumePlan
from hotloop.experiment.rules import ResumeFacts

__all__ = ["Estimate", "Finding", "LaunchStep", "MemoryRow", "Plan", "Repair", "ResumeFacts", "build_plan"]


class Plan(NamedTuple):
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
        repairs=find_repairs(facts, errors) if errors else (),
        estimates=list_estimates(facts),
        staleness=facts.staleness,
        resume=facts.resume,
        launch=tuple(launch_guide(facts.experiment, facts.layout, catalog)),
    )
