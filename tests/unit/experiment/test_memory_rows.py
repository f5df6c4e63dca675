"""X01: the memory account, against the formulas of algorithms.md 10 and 11 worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.memory import PROMPT_TOKENS, compute_logits_bytes, compute_memory, judge
from hotloop.experiment.parameters import count_total_params
from hotloop.experiment.plan import build_plan
from hotloop.experiment.records import MemoryPlan
from hotloop.experiment.serving_memory import (
    compute_kv_bytes_on_gpu,
    compute_kv_bytes_per_token,
    compute_mean_kv_bytes_on_gpu,
    compute_state_bytes,
)

GIB = 1024**3
MODELS = sorted(load_catalog().models)


def size_of(plan: MemoryPlan, phase: str, item: str) -> int:
    return sum(row.bytes for row in plan.rows if (row.phase, row.item) == (phase, item))


def plan_of(**choices: Any) -> MemoryPlan:
    return compute_memory(Experiment.model_validate(choices))


def test_x01_1_weights_gradients_and_optimizer_of_glm_4_9b_equal_the_formula_to_the_byte() -> None:
    # TP 2, CP 2, 8 GPUs: DP 2. P = 9,399,435,264 / 2; optimizer sharded over DP x CP = 4.
    plan = plan_of(model="dense")
    assert size_of(plan, "train", "weights") == 2 * 4_699_717_632 == 9_399_435_264
    assert size_of(plan, "train", "gradients") == 4 * 4_699_717_632
    assert size_of(plan, "train", "optimizer") == 12 * 4_699_717_632 // 4 == 14_099_152_896


def test_x01_1_experts_shard_over_their_own_replicas() -> None:
    # flash on 2 nodes: EP 4, PP 2, EDP 2. Stage 2 has 23 MoE layers of 64 experts of 3 x 2048 x 1536.
    plan = plan_of(nodes=2, cpu_adam=False)
    experts = 23 * 64 * 3 * 2048 * 1536 // 4
    row = next(row for row in plan.rows if row.item == "optimizer")
    assert f"12 x {experts:,} expert parameters / EDP 2" in row.formula
    dense = size_of(plan, "train", "weights") // 2 - experts
    assert row.bytes == 12 * dense // (2 * 2) + 12 * experts // 2


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_every_catalogue_model_add_up(model: str) -> None:
    arch = load_catalog().models[model].arch
    assert count_total_params(arch) == arch.params_total


@pytest.mark.parametrize(
    ("model", "gib"), [("qwen2.5-0.5b", 8.3), ("qwen3-0.6b", 10.0), ("qwen3-4b", 67.4), ("dense", 157.6)]
)
def test_static_sets_without_sharding_are_18_bytes_a_parameter(model: str, gib: float) -> None:
    # algorithms.md 10: Qwen2.5-0.5B 8.3 GiB, Qwen3-0.6B 10.0, Qwen3-4B 67, GLM-4-9B 158.
    arch = load_catalog().models[model].arch
    assert 18 * arch.params_total / GIB == pytest.approx(gib, abs=0.05)


def test_x01_2_one_copy_of_the_logits() -> None:
    assert compute_logits_bytes(9216, 151936, 2) == 2_800_484_352
    plan = plan_of(model="qwen3-4b")
    assert size_of(plan, "train", "logits") == 3 * 2_800_484_352


def test_x01_2_chunked_logprobs_keep_one_whole_copy() -> None:
    plan = plan_of(model="qwen3-4b", export={"slime_args": ["--log-probs-chunk-size", "1024"]})
    assert size_of(plan, "train", "logits") == 2_800_484_352 + 2 * compute_logits_bytes(1024, 151936, 2)


def test_logits_lie_on_the_last_stage_only() -> None:
    plan = plan_of(model="glm47")
    assert len(plan.stage_bytes) == 4
    assert next(row.where for row in plan.rows if row.item == "logits") == "gpu, stage 4 of 4"


@pytest.mark.parametrize("model", MODELS)
def test_x01_3_kv_bytes_per_token_are_those_of_the_catalogue_and_fp8_halves_them(model: str) -> None:
    arch = load_catalog().models[model].arch
    assert compute_kv_bytes_per_token(arch) == arch.kv_bytes_per_token_bf16
    assert compute_kv_bytes_per_token(arch, "fp8") * 2 == arch.kv_bytes_per_token_bf16


def test_x01_3_mla_is_not_divided_by_tp_unless_dp_attention() -> None:
    arch = load_catalog().models["flash"].arch
    assert compute_kv_bytes_on_gpu(arch, tp=8) == 54144
    assert compute_mean_kv_bytes_on_gpu(arch, tp=8) == 54144
    assert compute_mean_kv_bytes_on_gpu(arch, tp=8, dp=8) == 54144 / 8


def test_x01_3_gqa_is_divided_by_tp_up_to_its_heads() -> None:
    arch = load_catalog().models["glm47"].arch  # 8 KV heads
    assert compute_kv_bytes_on_gpu(arch, tp=4) == 376832 // 4
    assert compute_kv_bytes_on_gpu(arch, tp=32) == 376832 // 8
    assert compute_kv_bytes_on_gpu(arch, tp=32, dp=4) == 376832 // 8


def test_x01_4_cpu_adam_moves_12_bytes_a_local_parameter_to_the_host() -> None:
    on_gpu, on_host = plan_of(model="dense", cpu_adam=False), plan_of(model="dense", cpu_adam=True)
    moved = size_of(on_gpu, "train", "optimizer")
    assert moved == 12 * 4_699_717_632 // 4
    assert size_of(on_host, "host", "CPU optimizer") == 8 * moved
    assert size_of(on_host, "train", "optimizer") == 0
    assert size_of(on_host, "train", "optimizer staging") == GIB
    assert on_host.total("train").bytes == on_gpu.total("train").bytes - moved + GIB


def test_x01_4_recompute_lowers_activations_by_the_formula() -> None:
    # dense: 4608 tokens on each GPU, h 4096, TP 2, 40 layers, one microbatch in flight.
    values = 4608 * 4096 // 2
    assert size_of(plan_of(model="dense", recompute=False), "train", "activations") == 34 * values * 40
    assert size_of(plan_of(model="dense"), "train", "activations") == 2 * values * 40 + 34 * values


def test_x01_4_both_change_the_verdict_towards_fits() -> None:
    order = ["fits", "tight", "over"]
    for choice in ("cpu_adam", "recompute"):
        off = plan_of(model="glm5", **{choice: False}).total("train").verdict
        on = plan_of(model="glm5", **{choice: True}).total("train").verdict
        assert order.index(on) <= order.index(off)
    assert plan_of(model="glm5", cpu_adam=False).verdict == "over"
    assert plan_of(model="glm5", cpu_adam=True).verdict == "fits"


def test_the_first_stage_keeps_the_most_microbatches_in_flight() -> None:
    plan = plan_of(model="glm47", recompute=False, sampling={"num_groups": 512})
    assert plan.stage_bytes[1] > plan.stage_bytes[2]
    assert plan.rows[0].where == "gpu, stage 1 of 4"
    activations = next(row for row in plan.rows if row.item == "activations")
    assert "4 in flight" in activations.formula


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["colocate", "separate", "external"])
def test_x01_5_rows_add_up_to_the_total(model: str, layout: str) -> None:
    plan = plan_of(model=model, layout=layout, pd=layout == "separate", hicache=True)
    for total in plan.totals:
        assert sum(row.bytes for row in plan.rows if row.phase == total.phase) == total.bytes
    assert all(isinstance(row.bytes, int) and row.bytes >= 0 and row.formula for row in plan.rows)


def test_x01_5_a_sample_longer_than_a_microbatch_is_an_error() -> None:
    limit = 4608 * 2 - PROMPT_TOKENS
    assert build_plan(Experiment(model="dense", response_tokens=limit)).errors == ()
    errors = build_plan(Experiment(model="dense", response_tokens=limit + 1)).errors
    assert [error.code for error in errors] == ["sample_too_long"]
    assert f"Use at most {limit} response tokens" in errors[0].message


def test_x01_6_too_few_whole_responses_for_the_concurrency_is_a_note_with_the_number() -> None:
    plan = build_plan(Experiment(model="qwen3-8b"))
    fits = plan.memory_plan.requests_capacity
    assert fits == plan.memory_plan.kv_capacity_tokens // (PROMPT_TOKENS + 4096)
    below = build_plan(Experiment(model="qwen3-8b", concurrency=fits + 1))
    note = next(note for note in below.notes if note.code == "kv_capacity")
    assert f"holds {fits} whole responses" in note.message
    assert "kv_capacity" not in {note.code for note in build_plan(Experiment(model="qwen3-8b", concurrency=fits)).notes}


def test_x01_6_capacity_is_the_static_share_less_weights_and_reserve() -> None:
    # qwen3-8b on 2 GPUs: 0.7 x 85,520,809,984 - 2 x 8,190,427,136 / 2 - 3 GiB, KV 147,456 / 2 bytes a token.
    pool = int(0.7 * 85_520_809_984) - 8_190_427_136 - 3 * GIB
    plan = plan_of(model="qwen3-8b")
    assert size_of(plan, "rollout", "KV cache") == pool
    assert plan.kv_capacity_tokens == pool // (147_456 // 2)


def test_x01_7_every_assumption_is_shown_and_nothing_is_guaranteed() -> None:
    plan = build_plan(Experiment(model="glm5", precision="fp8train", eagle="external", draft_path="/d"))
    assert any(line.startswith("estimate") for line in plan.memory_plan.assumptions)
    assert any("draft model is not counted" in line for line in plan.memory_plan.assumptions)
    everything = str(plan.to_json())
    assert "guarantee" not in everything.lower()
    assert all(estimate["is_estimate"] and estimate["assumptions"] for estimate in plan.to_json()["estimates"])


def test_recurrent_state_of_qwen38_is_that_of_the_specification() -> None:
    arch = load_catalog().models["qwen38"].arch
    conv = 48 * 3 * 10240 * 2
    assert compute_state_bytes(arch, "auto") == 150_994_944 + conv
    assert compute_state_bytes(arch, "bfloat16") == 150_994_944 // 2 + conv
    assert compute_state_bytes(arch, "auto", tp=2) == (150_994_944 + conv) // 2


def test_recurrent_state_of_delta_attention_is_that_of_the_catalogue() -> None:
    arch = load_catalog().models["glm53-flash"].arch
    conv = 34 * 3 * (3 * 64 * 128) * 2
    assert compute_state_bytes(arch, "auto") == arch.state_bytes_per_request_fp32 + conv


def test_a_hybrid_splits_its_pool_by_the_ratio() -> None:
    plan = plan_of(model="qwen38", ssm_ratio=1.0)
    state, kv = size_of(plan, "rollout", "recurrent state"), size_of(plan, "rollout", "KV cache")
    assert abs(state - kv) <= 1
    default = plan_of(model="qwen38")
    ratio = size_of(default, "rollout", "recurrent state") / size_of(default, "rollout", "KV cache")
    assert ratio == pytest.approx(0.9, rel=1e-6)


def test_the_balanced_ratio_holds_as_many_states_as_sequences() -> None:
    balanced = plan_of(model="qwen38").balanced_state_ratio
    at_balance = plan_of(model="qwen38", ssm_ratio=round(balanced, 6)).requests_capacity
    assert at_balance > plan_of(model="qwen38").requests_capacity
    assert at_balance >= plan_of(model="qwen38", ssm_ratio=2 * balanced).requests_capacity


def test_int4_and_fp8_weights_are_smaller_by_their_bits() -> None:
    sizes = [size_of(plan_of(model="glm47", precision=p), "rollout", "weights") for p in ("bf16", "fp8", "int4")]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[1] / sizes[0] == pytest.approx(0.5, abs=0.06)


def test_hicache_takes_twice_the_pool_of_each_rank_on_a_node() -> None:
    plan = plan_of(model="dense", hicache=True)
    assert size_of(plan, "host", "HiCache") == 2 * size_of(plan, "rollout", "KV cache") * 8


def test_hicache_with_pd_is_on_prefill_nodes_only() -> None:
    plan = plan_of(model="dense", layout="separate", rollout_gpus=8, pd=True, prefill_gpus=2, hicache=True)
    assert size_of(plan, "host", "HiCache") == 2 * size_of(plan, "rollout", "KV cache") * 2


def test_a_reference_policy_is_kept_on_the_host_when_kl_is_on() -> None:
    plan = plan_of(model="dense", algorithm={"kind": "grpo", "kl_loss_coef": 0.01})
    assert size_of(plan, "host", "reference policy") == 2 * 4_699_717_632 * 8


def test_the_residue_is_kept_back_on_each_gpu() -> None:
    plan = plan_of()
    assert size_of(plan, "train", "residue") == 4 * GIB == size_of(plan, "rollout", "residue")
    assert size_of(plan_of(layout="separate"), "rollout", "residue") == 0


def test_external_engines_have_no_rollout_rows() -> None:
    plan = plan_of(layout="external")
    assert not [row for row in plan.rows if row.phase == "rollout"]
    assert plan.total("rollout").verdict == "fits"


def test_host_memory_of_the_node_decides_too() -> None:
    small = compute_memory(Experiment(model="deepseek"), host_ram_bytes=500 * 10**9)
    assert small.total("host").verdict == "over"
    assert small.largest_lever is not None and small.largest_lever.phase == "host"


def test_the_largest_lever_really_saves_what_it_says() -> None:
    experiment = Experiment(model="glm5", cpu_adam=False)
    plan = compute_memory(experiment)
    lever = plan.largest_lever
    assert lever is not None and dict(lever.edit) == {"cpu_adam": True}
    after = compute_memory(experiment.model_copy(update=dict(lever.edit)))
    assert plan.total("train").bytes - after.total("train").bytes == lever.saves_bytes


@pytest.mark.parametrize(("used", "verdict"), [(90, "fits"), (91, "tight"), (100, "tight"), (101, "over")])
def test_a_verdict_is_tight_with_under_a_tenth_left(used: int, verdict: str) -> None:
    assert judge(used, 100) == verdict


def test_a_layout_that_does_not_divide_still_has_an_account() -> None:
    plan = plan_of(model="glm5", nodes=3)
    assert plan.total("train").bytes > 0
