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

from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import Layout
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

__all__ = ["Estimate", "Finding", "LaunchStep", "MemoryRow", "Plan", "Repair"]


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
    resume: Mapping[str, Any] | None
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
