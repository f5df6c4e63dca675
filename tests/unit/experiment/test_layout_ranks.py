"""Nodes, roles, ranks, stages and chunks."""

from __future__ import annotations

import pytest

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import (
    compute_allgather_chunks,
    compute_layout,
    compute_zigzag_chunks,
    count_causal_pairs,
    count_gpus,
    parse_external_addrs,
)


def slime(*words: str) -> dict[str, object]:
    return {"export": {"slime_args": list(words)}}


def test_tp_is_the_fastest_rank_then_cp_then_dp_then_pp() -> None:
    layout = compute_layout(Experiment(model="flash", nodes=2))  # TP 2, CP 2, PP 2: DP 2
    coordinates = [(gpu.tp, gpu.cp, gpu.dp, gpu.pp) for gpu in layout.gpus]
    assert layout.dp == 2
    assert coordinates[:9] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0),
        (0, 0, 1, 0), (1, 0, 1, 0), (0, 1, 1, 0), (1, 1, 1, 0), (0, 0, 0, 1),
    ]  # fmt: skip
    assert len(set(coordinates)) == 16


def test_the_expert_grid_lies_over_the_same_ranks() -> None:
    layout = compute_layout(Experiment(model="flash", nodes=2))  # ETP 1, EP 4, PP 2: EDP 2
    assert (layout.ep, layout.edp) == (4, 2)
    assert [gpu.ep for gpu in layout.gpus] == [0, 1, 2, 3] * 4
    assert [gpu.edp for gpu in layout.gpus] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_every_gpu_of_the_largest_recipe_has_its_own_place() -> None:
    layout = compute_layout(Experiment(model="glm5"))
    assert len(layout.gpus) == 256
    assert len({(gpu.node, gpu.slot) for gpu in layout.gpus}) == 256
    assert len({(gpu.tp, gpu.cp, gpu.dp, gpu.pp) for gpu in layout.gpus}) == 256
    assert {gpu.node for gpu in layout.gpus} == set(range(32))
    assert {gpu.engine for gpu in layout.gpus} == {0, 1, 2, 3}


def test_512_nodes_are_4096_records() -> None:
    layout = compute_layout(Experiment(model="flash", nodes=512))
    assert (len(layout.gpus), layout.dp) == (4096, 512)
    assert layout.gpus[-1][:4] == (511, 7, "colocated", 4095)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("flash", [24, 23]),
        ("glm47", [23, 23, 23, 23]),
        ("glm5", [14, 8, 8, 8, 8, 8, 8, 16]),
        ("deepseek", [16, 16, 16, 13]),
        ("qwen38", [34, 30]),
        ("kimi-k2", [8, 8, 8, 8, 8, 8, 8, 5]),
    ],
)
def test_stages_are_uneven_as_the_recipe_says(model: str, sizes: list[int]) -> None:
    stages = compute_layout(Experiment(model=model)).stages
    assert [stage.num_layers for stage in stages] == sizes
    assert [stage.first_layer for stage in stages] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert (stages[0].has_embedding, stages[-1].has_head) == (True, True)


def test_dense_layers_of_a_moe_come_first() -> None:
    stages = compute_layout(Experiment(model="deepseek")).stages
    assert [(stage.num_dense, stage.num_moe) for stage in stages] == [(3, 13), (0, 16), (0, 16), (0, 13)]


def test_a_hybrid_counts_its_attention_layers_by_stage() -> None:
    stages = compute_layout(Experiment(model="qwen38")).stages  # layers 4, 8, ..., 64 attend
    assert [stage.num_attention for stage in stages] == [8, 8]
    model = load_catalog().models["qwen38"]
    assert sum(stage.num_attention for stage in stages) == model.arch.kv_layers


def test_zigzag_chunks_give_every_rank_equal_causal_work() -> None:
    # algorithms.md 10: 8 tokens over CP 2 are 18 and 18 causal pairs; contiguous halves would be 10 and 26.
    zigzag = compute_zigzag_chunks(8, 2)
    assert zigzag == (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    assert [count_causal_pairs(ranges) for ranges in zigzag] == [18, 18]
    contiguous = compute_allgather_chunks(8, 2)
    assert [count_causal_pairs(ranges) for ranges in contiguous] == [10, 26]


def test_chunks_cover_a_length_that_does_not_divide() -> None:
    ranges = sorted(r for rank in compute_zigzag_chunks(10, 2) for r in rank)
    assert ranges == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_ray_needs_the_trainer_and_only_managed_engines() -> None:
    # experiment.md 4.3: colocated and external need nodes x 8; separate needs nodes x 8 + rollout GPUs.
    assert compute_layout(Experiment()).ray_gpus == 8
    assert compute_layout(Experiment(layout="separate", rollout_gpus=16)).ray_gpus == 24
    external = compute_layout(Experiment(layout="external"))
    assert (external.ray_gpus, external.external_gpus, len(external.gpus)) == (8, 8, 8)


def test_separate_engines_lie_after_the_trainer() -> None:
    layout = compute_layout(Experiment(layout="separate", rollout_gpus=16))
    engines = [gpu for gpu in layout.gpus if gpu.role == "rollout"]
    assert [gpu.node for gpu in engines] == [1] * 8 + [2] * 8
    assert [gpu.engine for gpu in engines] == [0] * 8 + [1] * 8
    assert {gpu.rank for gpu in engines} == {-1}


def test_prefill_engines_come_before_decode_engines() -> None:
    layout = compute_layout(Experiment(layout="separate", rollout_gpus=24, pd=True, prefill_gpus=8))
    assert [(g.role, g.num_engines, g.gpus) for g in layout.groups] == [("prefill", 1, 8), ("decode", 2, 16)]
    assert [gpu.role for gpu in layout.gpus[8:]] == ["prefill"] * 8 + ["decode"] * 16
    counts = count_gpus(layout)
    assert (counts["prefill"], counts["decode"], counts["rollout"], counts["ray"]) == (8, 16, 24, 32)


def test_sizes_that_do_not_divide_give_a_layout_without_records() -> None:
    layout = compute_layout(Experiment(model="glm47", nodes=3))
    assert (layout.is_whole, layout.dp, layout.gpus) == (False, 0, ())


def test_extra_slime_flags_change_the_layout_as_the_last_flag_counts() -> None:
    experiment = Experiment.model_validate(
        {"model": "dense", **slime("--tensor-model-parallel-size", "2", "--tensor-model-parallel-size=4")}
    )
    layout = compute_layout(experiment)
    assert (layout.tp, layout.cp, layout.dp) == (4, 2, 1)


def test_a_flag_that_is_no_number_leaves_the_recipe() -> None:
    assert compute_layout(Experiment.model_validate(slime("--tensor-model-parallel-size", "two"))).tp == 2


def test_external_addresses_are_split_at_spaces_and_commas() -> None:
    assert parse_external_addrs("a:1, http://b:2\n[::1]:3/") == ["a:1", "b:2", "[::1]:3"]


def test_the_layout_as_json_has_one_row_of_numbers_for_each_gpu() -> None:
    plain = compute_layout(Experiment()).to_json()
    assert plain["gpu_fields"][:4] == ["node", "slot", "role", "rank"]
    assert plain["gpus"][3] == [0, 3, "colocated", 3, 1, 1, 0, 0, 3, 0, 0]
    assert plain["is_whole"] is True
