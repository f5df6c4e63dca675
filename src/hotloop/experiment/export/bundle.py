"""The files of an export: experiment.json always, the two scripts when nothing is wrong.

Owns: `Bundle`, `build_bundle`, `render_experiment_json`.

Promises: a pure function of the plan and the build: same choices, same bytes. An error in the plan blocks both scripts
(L11) and never the JSON (L08); a note blocks nothing. `validation.scope` is always `static`: nothing here was run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotloop.experiment.catalog.load import find_model
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.choices import SCHEMA
from hotloop.experiment.export.script import render_experiment_sh, render_header
from hotloop.experiment.export.serving import render_serving_reference
from hotloop.experiment.plan import Plan
from hotloop.experiment.provenance import BuildInfo, build_provenance
from hotloop.experiment.records import to_plain

APP = "hotloop"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What an export consists of."""

    files: Mapping[str, str]
    """Name -> text; without the scripts when `blocked_by` is not empty."""
    blocked_by: tuple[str, ...]
    """Codes of the errors that hold the scripts back."""


def build_bundle(plan: Plan, catalog: Catalog, build: BuildInfo) -> Bundle:
    """Make every file that the plan allows."""
    files = {"experiment.json": render_experiment_json(plan, catalog, build)}
    blocked = tuple(dict.fromkeys(error.code for error in plan.errors))
    if not blocked:
        model = find_model(catalog, plan.resolved.model)
        files["experiment.sh"] = render_experiment_sh(plan.resolved, model, catalog)
        files["serving-reference.sh"] = render_serving_reference(
            plan.resolved, model, render_header(plan.resolved, model)
        )
    return Bundle(files, blocked)


def render_experiment_json(plan: Plan, catalog: Catalog, build: BuildInfo) -> str:
    """Return experiment.json (E11), which `hotloop run` and `Load JSON` read back."""
    model = find_model(catalog, plan.resolved.model)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "app": APP,
        "choices": plan.experiment.model_dump(mode="json"),
        "model": to_plain(model),
        "validation": {"scope": "static", "errors": to_plain(plan.errors), "notes": to_plain(plan.notes)},
        "plan": {
            "gpus": to_plain(plan.gpus),
            "memory": to_plain(plan.memory),
            "staleness": to_plain(plan.staleness),
            "resume": to_plain(plan.resume),
        },
        "provenance": build_provenance(plan.resolved, model, catalog, build),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
