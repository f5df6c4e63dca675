"""Repairs: proved by the checks, smallest first, and never at the cost of what the user alone may choose."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.apply import apply
from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import Plan, build_plan
from hotloop.experiment.repairs import CANDIDATES, PROTECTED

SMALL_POOL = {"slime_args": ["--sglang-mem-fraction-static", "0.14"]}


def plan_of(**choices: Any) -> Plan:
    return build_plan(Experiment.model_validate(choices))


def edits(plan: Plan, code: str) -> list[dict[str, Any]]:
    return [dict(repair.edit) for repair in plan.repairs if repair.code == code]


def test_l40_pd_without_resources_offers_separate_engines_then_pd_off() -> None:
    plan = plan_of(pd=True, rdma_device="mlx5_0")  # flash: one engine of 8 on 8 colocated GPUs
    assert edits(plan, "pd_groups") == [
        {"layout": "separate", "rollout_gpus": 16, "prefill_gpus": 8},
        {"pd": False},
    ]


def test_l40_a_separate_pool_is_raised_first_then_prefill_shrinks_then_pd_goes() -> None:
    plan = plan_of(layout="separate", rollout_gpus=16, prefill_gpus=16, pd=True, rdma_device="mlx5_0")
    assert edits(plan, "pd_groups") == [
        {"rollout_gpus": 16, "prefill_gpus": 8},
        {"prefill_gpus": 8},
        {"pd": False},
    ]


def test_l40_nothing_is_offered_when_pd_has_what_it_needs() -> None:
    plan = plan_of(layout="separate", rollout_gpus=16, pd=True, rdma_device="mlx5_0")
    assert plan.errors == () and plan.repairs == ()


def test_l40_the_preview_shows_changes_allocation_and_remaining() -> None:
    repair = plan_of(pd=True).repairs[0]
    assert {(c.field, c.before, c.after) for c in repair.changes} >= {
        ("layout", "colocate", "separate"),
        ("rollout_gpus", 8, 16),
    }
    assert dict(repair.gpus_after) == {
        "train": 8, "rollout": 16, "prefill": 8, "decode": 8, "external": 0, "ray": 24, "per_node": 8,
    }  # fmt: skip
    assert repair.remaining == ("rdma_device",)


def test_l40_looking_at_repairs_changes_nothing() -> None:
    experiment = Experiment(pd=True)
    build_plan(experiment)
    assert experiment == Experiment(pd=True)


@pytest.mark.parametrize("model", ["flash", "dense", "glm47", "glm5", "deepseek", "qwen38"])
@pytest.mark.parametrize("pool", [1, 13, 32])
def test_l41_sizes_come_from_the_recipe(model: str, pool: int) -> None:
    plan = plan_of(model=model, layout="separate", rollout_gpus=pool, prefill_gpus=pool, pd=True)
    engine = plan.layout.engine_gpus
    offered = [dict(repair.edit) for repair in plan.repairs]
    assert offered
    for repair in plan.repairs:
        if repair.code != "pd_groups" or dict(repair.edit) == {"pd": False}:
            continue
        after = repair.gpus_after
        assert after["rollout"] % engine == after["prefill"] % engine == 0
        assert after["rollout"] >= 2 * engine
        assert 0 < after["prefill"] < after["rollout"]


def test_l42_a_repair_is_one_edit_that_clears_its_finding() -> None:
    plan = plan_of(pd=True, rdma_device="mlx5_0")
    repaired = apply(plan.experiment, plan.repairs[0].edit)
    assert build_plan(repaired).errors == ()


def test_l43_no_device_or_address_is_invented() -> None:
    plan = plan_of(pd=True)
    for repair in plan.repairs:
        repaired = apply(plan.experiment, repair.edit)
        assert repaired.rdma_device == "" and repaired.external_addrs == ""
    assert plan.repairs[0].remaining == ("rdma_device",)
    assert plan.repairs[-1].remaining == ()  # PD off needs no device


@pytest.mark.parametrize(
    ("code", "choices", "expected"),
    [
        ("train_grid", {"model": "glm47", "nodes": 7}, {"nodes": 8}),
        ("train_grid", {"model": "qwen38", "nodes": 5}, {"nodes": 4}),
        ("engine_multiple", {"layout": "separate", "rollout_gpus": 13}, {"rollout_gpus": 16}),
        ("engine_multiple", {"layout": "separate", "rollout_gpus": 11}, {"rollout_gpus": 8}),
        ("memory", {"model": "glm5", "cpu_adam": False}, {"cpu_adam": True}),
        ("staleness", {"layout": "separate", "schedule": "async", "max_staleness": 2}, {"concurrency": 64}),
        ("colocate_async", {"schedule": "async"}, {"layout": "separate"}),
        ("colocate_transport", {"transport": "disk", "weight_dir": "/w"}, {"transport": "nccl"}),
        ("r3_dense", {"model": "dense", "r3": True}, {"r3": False}),
        ("mask_partial", {"mask_prefix": True}, {"mask_prefix": False}),
        ("eagle_no_mtp", {"model": "dense", "eagle": "builtin"}, {"eagle": "off"}),
        ("sample_too_long", {"model": "dense", "response_tokens": 9000}, {"response_tokens": 8192}),
        ("batch_steps", {"optimizer": {"steps_per_round": 5}}, {"optimizer.steps_per_round": 4}),
        ("group_size", {"sampling": {"group_size": 1}}, {"sampling.group_size": 8}),
        ("not_in_target", {"slime_target": "624b824a", "sc": True}, {"slime_target": "v0.4.0"}),
        ("eval", {"layout": "separate", "schedule": "async", "eval_mode": "inline"}, {"eval_mode": "side"}),
        ("staleness", {"partial": True, "max_staleness": 0}, {"partial": False}),
        # 0.14 of an H100 less weights and reserve holds 7,612 tokens, under one response of 1024 + 8000.
        ("memory", {"model": "qwen3-8b", "response_tokens": 8000, "export": SMALL_POOL}, {"kv_dtype": "fp8"}),
        ("ssm_ratio", {"model": "qwen38", "ssm_ratio": -1.0}, {"ssm_ratio": None}),
    ],
)
def test_the_first_repair_is_the_smallest_edit_that_helps(
    code: str, choices: dict[str, Any], expected: dict[str, Any]
) -> None:
    plan = plan_of(**choices)
    assert edits(plan, code)[0] == expected
    repaired = apply(plan.experiment, expected)
    assert code not in {error.code for error in build_plan(repaired).errors}


def test_staleness_takes_the_largest_concurrency_of_the_halvings_that_helps() -> None:
    plan = plan_of(layout="separate", schedule="async", max_staleness=2)
    assert edits(plan, "staleness")[0] == {"concurrency": 64}
    assert [e.code for e in build_plan(apply(plan.experiment, {"concurrency": 64})).errors] == []


def test_a_repair_that_breaks_something_else_is_not_offered() -> None:
    # Separating the engines would clear colocate_async, but PD would then lack its device and groups as before.
    plan = plan_of(schedule="async", deterministic=True)
    for repair in plan.repairs:
        before = {error.code for error in plan.errors}
        after = {error.code for error in build_plan(apply(plan.experiment, repair.edit)).errors}
        assert after < before


def test_what_only_the_user_knows_has_no_repair() -> None:
    codes = {"path_empty", "hook_form", "external_addrs", "disk_dir", "delta_local", "pd_device", "straw_fields"}
    assert not codes & set(CANDIDATES)
    assert plan_of(save_path="").repairs == ()


def test_no_candidate_edits_a_protected_choice() -> None:
    plan = plan_of(gpu="a100-80", precision="fp8", model="dense", r3=True)
    assert plan.repairs
    for repair in plan.repairs:
        assert not {change.field for change in repair.changes} & PROTECTED


def test_an_edit_that_does_more_than_one_that_helps_is_not_offered() -> None:
    plan = plan_of(model="qwen3-8b", response_tokens=8000, export=SMALL_POOL)
    offered = edits(plan, "memory")
    assert {"kv_dtype": "fp8"} in offered
    assert not [edit for edit in offered if "kv_dtype" in edit and len(edit) > 1]
