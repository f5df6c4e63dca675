"""A grid of combinations: every one has a plan, and its JSON; nothing raises, whatever is wrong with the experiment."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import build_plan
from hotloop.experiment.records import to_plain

MODELS = sorted(load_catalog().models)
LAYOUTS = ["colocate", "separate", "external"]
SCHEDULES = ["sync", "async"]
PRECISIONS = ["bf16", "fp8", "fp8train", "int4"]
CORRECTIONS = ["tis", "none", "icepop"]
TARGETS = ["v0.4.0", "624b824a"]
SERVING: list[dict[str, Any]] = [
    {"pd": True, "rdma_device": "mlx5_0", "hicache": True},
    {"eagle": "builtin", "partial": True, "max_staleness": 1},
]
KEYS = [
    "gpus", "layout", "memory", "verdict", "errors", "notes", "repairs", "estimates", "resume", "launch",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_combination_has_a_plan(model: str) -> None:
    count = 0
    for layout, schedule, precision, correction, target, serving in itertools.product(
        LAYOUTS, SCHEDULES, PRECISIONS, CORRECTIONS, TARGETS, SERVING
    ):
        experiment = Experiment.model_validate(
            {
                "model": model, "layout": layout, "schedule": schedule, "precision": precision,
                "correction": correction, "slime_target": target, **serving,
            }
        )  # fmt: skip
        plan = build_plan(experiment)
        assert (plan.verdict == "over") == ("memory" in {error.code for error in plan.errors})
        assert sum(total.bytes for total in plan.memory_plan.totals) == sum(row.bytes for row in plan.memory)
        count += 1
    assert count * len(MODELS) >= 2000


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_is_json_with_the_keys_of_the_specification(model: str) -> None:
    plan = build_plan(Experiment(model=model))
    document = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert [key for key in document if key in KEYS] == KEYS
    assert set(document["memory"][0]) == {"phase", "where", "item", "bytes", "formula"}
    assert all(set(note) == {"code", "message", "fields"} for note in document["notes"])
    assert document["launch"] and set(document["launch"][0]) == {"where", "what", "command"}


def test_a_plan_is_a_pure_function_of_its_experiment() -> None:
    experiment = Experiment(model="glm5", pd=True, schedule="async", nodes=3)
    assert to_plain(build_plan(experiment).to_json()) == to_plain(build_plan(experiment).to_json())
