"""Cost models against figures worked out by hand, and the prediction of X04."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.facts import collect_facts
from hotloop.experiment.plan import Plan, build_plan
from hotloop.experiment.rules import Facts
from hotloop.experiment.throughput import (
    compute_accepted_tokens,
    compute_bubble_frac,
    compute_forward_flops,
    count_experts_touched,
    count_group_slots,
)


def plan_of(**choices: Any) -> Plan:
    return build_plan(Experiment.model_validate(choices))


def facts_of(**choices: Any) -> Facts:
    return collect_facts(Experiment.model_validate(choices), load_catalog())


def estimate(plan: Plan, name: str) -> float:
    return next(item.value for item in plan.estimates if item.name == name)


def test_eagle_at_acceptance_0_8_and_depth_3_commits_2_952_tokens() -> None:
    assert compute_accepted_tokens(0.8, 3) == pytest.approx(2.952)
    assert compute_accepted_tokens(1.0, 3) == 4
    assert compute_accepted_tokens(0.0, 3) == 1


def test_one_token_touches_k_experts_and_many_touch_all() -> None:
    assert count_experts_touched(64, 4, 1) == pytest.approx(4)
    assert count_experts_touched(64, 4, 2) == pytest.approx(64 * (1 - (60 / 64) ** 2))
    assert count_experts_touched(64, 4, 10_000) == pytest.approx(64)
    assert count_experts_touched(0, 0, 8) == 0


@pytest.mark.parametrize(("pp", "m", "frac"), [(1, 7, 0.0), (4, 1, 0.75), (4, 9, 0.25)])
def test_the_bubble_of_a_pipeline(pp: int, m: int, frac: float) -> None:
    assert compute_bubble_frac(pp, m) == pytest.approx(frac)


def test_group_slots_round_down() -> None:
    assert count_group_slots(100, 3, 8) == 37


def test_forward_flops_are_twice_the_active_parameters_and_causal_attention() -> None:
    arch = load_catalog().models["qwen3-8b"].arch  # 36 layers, 32 heads of 128
    expected = 2 * 8_190_427_136 * 1000 + 2 * 36 * 1000**2 * 32 * 128
    assert compute_forward_flops(arch, 1000) == expected


def test_a_decode_step_of_a_small_batch_waits_for_memory() -> None:
    # GLM-4-9B, 64 rollouts over 4 engines of 2 GPUs: batch 16 at a mean context of 1024 + 2048.
    timings = facts_of(model="dense").timings
    read = 2 * 9_399_435_264 + 16 * 3072 * 40_960
    assert timings.batch_per_engine == 16
    assert timings.decode_step_s == pytest.approx(read / (2 * 3.35e12))
    assert timings.response_latency_s == pytest.approx(timings.prefill_s + 4096 * timings.decode_step_s)


def test_a_sync_round_is_the_sum_and_an_async_round_the_longer_part() -> None:
    sync = facts_of(model="dense", layout="separate").timings
    assert sync.round_s == pytest.approx(sync.rollout_s + sync.train_s + sync.sync_s)
    later = facts_of(model="dense", layout="separate", schedule="async").timings
    assert later.round_s == pytest.approx(max(later.rollout_s, later.train_s) + later.sync_s)


def test_more_rollouts_than_slots_take_another_wave() -> None:
    one = facts_of(model="flash", concurrency=64).timings
    two = facts_of(model="flash", concurrency=63).timings
    assert one.rollout_s == pytest.approx(one.response_latency_s)
    assert two.rollout_s == pytest.approx(2 * two.response_latency_s)


def test_speculation_runs_at_most_48_requests_unless_told_otherwise() -> None:
    assert facts_of(eagle="builtin").timings.batch_per_engine == 48
    assert facts_of().timings.batch_per_engine == 64
    told = facts_of(eagle="builtin", export={"slime_args": ["--sglang-max-running-requests", "64"]})
    assert told.timings.batch_per_engine == 64


def test_eagle_shortens_the_response_by_its_speedup() -> None:
    plan = plan_of(model="flash", eagle="builtin")
    speedup = estimate(plan, "eagle_speedup")
    assert speedup == pytest.approx(2.952 / (1 + 3 / 47))


def test_pd_is_as_fast_as_its_slowest_part() -> None:
    timings = facts_of(layout="separate", rollout_gpus=16, pd=True, rdma_device="mlx5_0").timings
    kv = 1024 * 54_144
    assert timings.transfer_rate == pytest.approx(2 * 50e9 / kv)
    plan = plan_of(layout="separate", rollout_gpus=16, pd=True, rdma_device="mlx5_0")
    slowest = min(timings.prefill_rate, timings.decode_rate, timings.transfer_rate)
    assert estimate(plan, "pd_requests_per_s") == pytest.approx(slowest)


def test_delta_sync_is_quicker_than_full_files() -> None:
    common = {"layout": "separate", "weight_dir": "/w", "local_weight_dir": "/l"}
    full = facts_of(**common, transport="disk").timings.sync_s
    delta = facts_of(**common, transport="delta").timings.sync_s
    assert full == pytest.approx(2 * 2 * 29_943_136_256 / 2e9 + 2)
    assert delta == pytest.approx(0.1 * 2 * 29_943_136_256 / 2e9 + 2)


def test_a_gpu_without_published_rates_leaves_compute_out_and_says_so() -> None:
    plan = plan_of(model="qwen2.5-0.5b", gpu="gb10")
    assert "rates_unknown" in {note.code for note in plan.notes}
    assert estimate(plan, "train_s") == 0
    assert math.isfinite(estimate(plan, "round_s"))


def test_every_estimate_has_a_unit_a_formula_and_its_assumptions() -> None:
    plan = plan_of(model="qwen38", layout="separate", pd=True, rdma_device="m", eagle="builtin", hicache=True)
    names = [item.name for item in plan.estimates]
    assert len(names) == len(set(names))
    assert {"eagle_speedup", "pd_requests_per_s", "hicache_gain_s", "balanced_ssm_ratio"} <= set(names)
    assert all(item.unit and item.formula and item.assumptions for item in plan.estimates)


def test_x04_a_sync_sample_has_age_0() -> None:
    plan = plan_of(max_staleness=0)
    assert plan.staleness.predicted == 0
    assert plan.errors == ()


def test_x04_partial_rollouts_are_a_round_older() -> None:
    staleness = plan_of(partial=True).staleness
    assert staleness.predicted == 1
    assert staleness.mixed_version_frac == 0.5  # 16 groups submitted, 8 kept


def test_x04_predicted_age_is_latency_over_round_time_and_queued_rounds() -> None:
    facts = facts_of(layout="separate", schedule="async")
    timings = facts.timings
    assert timings.train_s > timings.rollout_s  # finished groups pile up to 128 x 1 engine, 8 a round
    assert facts.staleness.queued_rounds == 16
    ceiling = math.ceil(timings.response_latency_s / timings.round_s)
    assert facts.staleness.predicted == ceiling + 16


def test_x04_nothing_queues_when_rollouts_are_the_slower_part() -> None:
    facts = facts_of(layout="separate", schedule="async", concurrency=32)
    assert facts.timings.rollout_s > facts.timings.train_s
    assert facts.staleness.queued_rounds == 0


def test_x04_above_the_bound_is_an_error_that_names_the_knobs() -> None:
    plan = plan_of(layout="separate", schedule="async", max_staleness=1)
    error = next(error for error in plan.errors if error.code == "staleness")
    assert "18 versions old" in error.message
    assert all(knob in error.message for knob in ("concurrency", "response_tokens", "sync"))
    assert plan_of(layout="separate", schedule="async", max_staleness=18).errors == ()


def test_x04_4_the_bound_is_a_note_for_slime() -> None:
    plan = plan_of(layout="separate", schedule="async", max_staleness=18)
    assert "staleness_bound" in {note.code for note in plan.notes}
