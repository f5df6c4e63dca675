"""D01-D10: an edit and what follows from it are one step."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError
from hotloop.experiment.apply import apply, apply_edit
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import compute_layout
from hotloop.experiment.plan import build_plan
from hotloop.experiment.resolve import resolve


def follow(experiment: Experiment, **edit: object) -> dict[str, tuple[object, object, str]]:
    return {c.field: (c.before, c.after, c.rule) for c in apply_edit(experiment, edit).followed}


def test_d01_async_while_colocated_separates_the_engines() -> None:
    assert follow(Experiment(), schedule="async") == {"layout": ("colocate", "separate", "D01")}


def test_d01_does_nothing_when_already_separate() -> None:
    assert follow(Experiment(layout="separate"), schedule="async") == {}


def test_d02_colocate_takes_the_sync_schedule_and_nccl() -> None:
    before = Experiment(layout="separate", schedule="async", transport="disk", weight_dir="/w")
    assert follow(before, layout="colocate") == {
        "schedule": ("async", "sync", "D02"),
        "transport": ("disk", "nccl", "D02"),
    }


def test_d03_external_engines_take_weights_from_disk() -> None:
    assert follow(Experiment(), layout="external") == {"transport": ("nccl", "disk", "D03")}


def test_d04_another_model_resets_what_belongs_to_the_old_one() -> None:
    before = Experiment(
        nodes=4, rollout_gpus=48, prefill_gpus=16, cpu_adam=False, hf_path="/mine", train_path="/t", data_path="/d",
        save_path="/s", megatron_path="/m", kv_dtype="fp8", ssm_dtype="bfloat16", ssm_ratio=0.4, eagle="external",
        draft_path="/draft", eagle_steps=7,
    )  # fmt: skip
    after = apply(before, {"model": "glm47"})
    assert after == Experiment(model="glm47")
    resolved = resolve(after)
    assert (resolved.nodes, resolved.rollout_gpus, resolved.prefill_gpus, resolved.cpu_adam) == (8, 64, 32, True)
    assert resolved.hf_path == "/data/models/GLM-4.7"
    layout = compute_layout(after)
    assert (layout.tp, layout.pp, layout.cp, layout.ep, layout.engine_gpus) == (8, 4, 2, 16, 32)


def test_d04_keeps_what_does_not_belong_to_the_model() -> None:
    before = Experiment(layout="separate", schedule="async", correction="icepop", response_tokens=1000, r3=True)
    after = apply(before, {"model": "glm47"})
    assert (after.layout, after.schedule, after.correction, after.response_tokens, after.r3) == (
        "separate", "async", "icepop", 1000, True,
    )  # fmt: skip


def test_d04_is_reported_by_the_values_that_really_changed() -> None:
    changed = follow(Experiment(nodes=1), model="dense")
    assert changed["cpu_adam"] == (True, False, "D04")
    assert changed["prefill_gpus"] == (8, 2, "D04")
    assert "nodes" not in changed  # one node before and after


def test_choosing_the_same_model_again_changes_nothing() -> None:
    before = Experiment(nodes=4)
    assert apply(before, {"model": "flash"}) == before


def test_d05_a_dense_model_turns_r3_off() -> None:
    assert follow(Experiment(r3=True), model="dense")["r3"] == (True, False, "D05")
    assert apply(Experiment(r3=True), {"model": "glm47"}).r3 is True


@pytest.mark.parametrize(("model", "kv"), [("glm5", "fp8"), ("deepseek", "auto")])
def test_d06_models_published_in_fp8_are_served_in_fp8(model: str, kv: str) -> None:
    after = resolve(apply(Experiment(precision="bf16", kv_dtype="auto"), {"model": model}))
    assert (after.precision, after.kv_dtype) == ("fp8", kv)


def test_d06_leaves_the_precision_of_other_models() -> None:
    assert apply(Experiment(precision="int4"), {"model": "glm47"}).precision == "int4"
    assert resolve(apply(apply(Experiment(), {"model": "glm5"}), {"model": "flash"})).precision == "bf16"


def test_d07_partial_off_turns_prefix_masking_off() -> None:
    before = Experiment(partial=True, mask_prefix=True)
    assert follow(before, partial=False) == {"mask_prefix": (True, False, "D07")}


def test_d08_other_conflicts_stay_visible_and_change_nothing() -> None:
    result = apply_edit(Experiment(model="dense"), {"r3": True})
    assert result.followed == ()
    assert [error.code for error in build_plan(result.experiment).errors] == ["r3_dense"]


def test_d08_what_the_edit_names_is_not_changed_by_a_rule() -> None:
    after = apply(Experiment(), {"schedule": "async", "layout": "colocate"})
    assert (after.schedule, after.layout) == ("async", "colocate")
    assert [error.code for error in build_plan(after).errors] == ["colocate_async"]


def test_d09_async_with_the_queue_has_distributed_producers_and_changes_no_choice() -> None:
    before = Experiment(layout="separate", schedule="async")
    result = apply_edit(before, {"straw": True})
    assert result.followed == ()
    assert compute_layout(result.experiment).producers == "distributed"
    assert compute_layout(before).producers == "driver"
    assert compute_layout(Experiment(straw=True)).producers == "driver"


def test_d10_pd_with_hicache_caches_on_prefill_only() -> None:
    before = Experiment(layout="separate", rollout_gpus=16, hicache=True)
    result = apply_edit(before, {"pd": True})
    assert result.followed == ()
    assert [(group.role, group.hicache) for group in compute_layout(result.experiment).groups] == [
        ("prefill", True),
        ("decode", False),
    ]
    assert [(group.role, group.hicache) for group in compute_layout(before).groups] == [("regular", True)]


def test_a_dotted_key_edits_a_section() -> None:
    result = apply_edit(Experiment(), {"sampling.num_groups": 16})
    assert result.experiment.sampling.num_groups == 16
    assert [(c.field, c.before, c.after) for c in result.edited] == [("sampling.num_groups", 8, 16)]


def test_a_new_kind_keeps_the_values_that_it_shares() -> None:
    before = apply(
        Experiment(), {"algorithm.kind": "reinforce_plus_plus", "algorithm.gamma": 0.9, "algorithm.eps_clip": 0.1}
    )
    after = apply(before, {"algorithm.kind": "gspo"})
    assert (after.algorithm.kind, after.algorithm.eps_clip) == ("gspo", 0.1)


def test_a_value_that_the_schema_refuses_is_an_input_error_and_nothing_changes() -> None:
    before = Experiment()
    with pytest.raises(InputError) as caught:
        apply(before, {"nodes": 0, "sampling.temprature": 1})
    assert len(caught.value.problems) == 2
    assert before == Experiment()


def test_an_unknown_section_is_an_input_error() -> None:
    with pytest.raises(InputError, match="unknown_key"):
        apply(Experiment(), {"nodes.x": 1})


def test_resolving_fills_every_recipe_choice_and_keeps_what_was_given() -> None:
    given = Experiment(nodes=2, cpu_adam=False, save_path="/mine")
    resolved = resolve(given)
    assert (resolved.nodes, resolved.cpu_adam, resolved.save_path) == (2, False, "/mine")
    assert resolved.rollout_gpus == 16
    assert resolve(resolved) == resolved
    assert (resolved.ssm_ratio, resolved.max_staleness, resolved.rounds_more) == (None, None, None)


@pytest.mark.parametrize(
    ("model", "precision", "directory"),
    [
        ("flash", "bf16", "/data/models/GLM-4.7-Flash"),
        ("flash", "fp8", "/data/models/GLM-4.7-Flash-FP8"),
        ("flash", "fp8train", "/data/models/GLM-4.7-Flash-FP8"),
        ("flash", "int4", "/data/models/GLM-4.7-Flash-INT4"),
        ("deepseek", "fp8", "/data/models/DeepSeek-R1"),
        ("deepseek", "bf16", "/data/models/DeepSeek-R1-BF16"),
    ],
)
def test_the_serving_directory_follows_the_precision(model: str, precision: str, directory: str) -> None:
    assert resolve(Experiment.model_validate({"model": model, "precision": precision})).hf_path == directory


def test_inline_evaluation_of_math_has_a_default_file() -> None:
    assert resolve(Experiment(eval_mode="inline")).eval_data == "/data/aime-2024/aime-2024.jsonl"
    assert resolve(Experiment(eval_mode="inline", eval_data="/mine.jsonl")).eval_data == "/mine.jsonl"
    assert resolve(Experiment()).eval_data == ""
