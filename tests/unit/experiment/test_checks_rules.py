"""Every error rule of the planner: an experiment that breaks only it, and its nearest neighbour that does not."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.apply import apply
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.checks import list_error_rules
from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import build_plan
from hotloop.experiment.rules import ResumeFacts

Edit = dict[str, Any]

ASYNC: Edit = {"layout": "separate", "schedule": "async"}
SEPARATE_PD: Edit = {"layout": "separate", "rollout_gpus": 16, "pd": True, "rdma_device": "mlx5_0"}
CUSTOM: Edit = {"task": "custom", "generate_hook": "my_task.generate", "reward_hook": "my_task.reward"}
EXTERNAL: Edit = {
    "layout": "external",
    "transport": "disk",
    "weight_dir": "/shared/w",
    "external_addrs": "10.0.0.1:30000",
}
STRAW: Edit = {"straw": True, "straw_dir": "/shared/q", "straw_run_id": "run-1", "straw_declaration": "/shared/d.json"}
DELTA: Edit = {"layout": "separate", "transport": "delta", "weight_dir": "/shared/w", "local_weight_dir": "/local/w"}


def slime(*words: str) -> Edit:
    return {"export": {"slime_args": list(words)}}


CASES: list[tuple[str, str, Edit, Edit]] = [
    # code, what the case shows, breaking edit, neighbour edit (merged over the breaking one)
    ("train_grid", "24 GPUs over a grid of 32", {"model": "qwen38", "nodes": 3}, {"nodes": 4}),
    ("expert_grid", "the published EP 8 on one node", slime("--expert-model-parallel-size", "8"),
     slime("--expert-model-parallel-size", "4")),
    ("expert_grid", "experts over EP 32 of 48", {"nodes": 3, **slime("--expert-model-parallel-size", "12")},
     slime("--expert-model-parallel-size", "4")),
    ("stage_layers", "78 - 13 - 16 over 6 stages",
     {"model": "glm5", **slime("--decoder-first-pipeline-num-layers", "13")},
     slime("--decoder-first-pipeline-num-layers", "14")),
    ("stage_layers", "stage 2 starts on layer 9, which is no index layer",
     {"model": "glm5", **slime("--decoder-first-pipeline-num-layers", "8", "--decoder-last-pipeline-num-layers", "22")},
     slime("--decoder-first-pipeline-num-layers", "14", "--decoder-last-pipeline-num-layers", "16")),
    ("stage_layers", "a count with one stage", {"model": "dense", **slime("--decoder-last-pipeline-num-layers", "20")},
     slime()),
    ("engine_multiple", "12 GPUs for engines of 8", {"layout": "separate", "rollout_gpus": 12}, {"rollout_gpus": 16}),
    ("engine_multiple", "fewer GPUs than one engine", {"layout": "separate", "rollout_gpus": 4}, {"rollout_gpus": 8}),
    ("pd_groups", "prefill takes the whole pool", {**SEPARATE_PD, "prefill_gpus": 16}, {"prefill_gpus": 8}),
    ("pd_groups", "prefill of half an engine", {**SEPARATE_PD, "prefill_gpus": 4}, {"prefill_gpus": 8}),
    ("group_size", "one rollout has no baseline", {"sampling": {"group_size": 1}}, {"sampling": {"group_size": 2}}),
    ("batch_steps", "64 rollouts in 3 steps", {"optimizer": {"steps_per_round": 3}},
     {"optimizer": {"steps_per_round": 4}}),
    ("sample_too_long", "8192 x 2 - 1024 = 15360", {"response_tokens": 15361}, {"response_tokens": 15360}),
    ("colocate_async", "both at once", {"schedule": "async"}, {"layout": "separate"}),
    ("colocate_transport", "disk while colocated", {"transport": "disk", "weight_dir": "/shared/w"},
     {"layout": "separate"}),
    ("r3_dense", "no experts to replay", {"model": "dense", "r3": True}, {"model": "flash"}),
    ("deterministic_async", "order of finishing", {**ASYNC, "deterministic": True}, {"schedule": "sync"}),
    ("mask_partial", "no prefix without partial", {"mask_prefix": True}, {"partial": True}),
    ("eagle_no_mtp", "GLM-4-9B has no MTP head", {"model": "dense", "eagle": "builtin"}, {"model": "flash"}),
    ("eagle_path", "a draft without a path", {"eagle": "external"}, {"draft_path": "/data/draft"}),
    ("external_pd", "PD on somebody else's engines",
     {**EXTERNAL, "pd": True, "rdma_device": "mlx5_0", "rollout_gpus": 16},
     {"pd": False}),
    ("gpu_precision", "FP8 on an A100", {"gpu": "a100-80", "precision": "fp8"}, {"gpu": "h100"}),
    ("gpu_precision", "FP8 KV on an A100", {"gpu": "a100-80", "kv_dtype": "fp8"}, {"kv_dtype": "auto"}),
    ("not_in_target", "score centering is later", {"slime_target": "624b824a", "sc": True}, {"slime_target": "v0.4.0"}),
    ("not_in_target", "the queue is later", {"slime_target": "624b824a", **STRAW}, {"slime_target": "v0.4.0"}),
    ("rollout_only", "no model script", {"model": "glm53-flash", "gpu": "h200"}, {"model": "flash"}),
    ("sc_conflict", "another policy loss", {"sc": True, "algorithm": {"kind": "gspo"}},
     {"algorithm": {"kind": "grpo"}}),
    ("sc_conflict", "a truncated vocabulary", {"sc": True, "sampling": {"top_k": 50}}, {"sampling": {"top_k": -1}}),
    ("eval", "inline in async (E10)", {**ASYNC, "eval_mode": "inline"}, {"eval_mode": "side"}),
    ("eval", "a custom task without held-out data", {**CUSTOM, "eval_mode": "inline"},
     {"eval_data": "/data/held.jsonl"}),
    ("path_empty", "no place to save", {"save_path": ""}, {"save_path": "/data/out"}),
    ("path_empty", "blanks are no path", {"train_path": "  "}, {"train_path": "/data/t"}),
    ("hook_form", "no dot", {**CUSTOM, "reward_hook": "reward"}, {"reward_hook": "my_task.reward"}),
    ("hook_form", "a path in place of a module", {**CUSTOM, "generate_hook": "my_task/generate.py"},
     {"generate_hook": "my_task.generate"}),
    ("external_addrs", "none given", {**EXTERNAL, "external_addrs": ""}, {"external_addrs": "10.0.0.1:30000"}),
    ("external_addrs", "https", {**EXTERNAL, "external_addrs": "https://a:1"}, {"external_addrs": "http://a:1"}),
    ("external_addrs", "IPv6 without brackets", {**EXTERNAL, "external_addrs": "fd00::1:30000"},
     {"external_addrs": "[fd00::1]:30000"}),
    ("external_addrs", "a port out of range", {**EXTERNAL, "external_addrs": "a:65536"}, {"external_addrs": "a:65535"}),
    ("disk_dir", "files without a folder", {"layout": "separate", "transport": "disk"}, {"weight_dir": "/shared/w"}),
    ("delta_local", "no copy to patch", {**DELTA, "local_weight_dir": ""}, {"local_weight_dir": "/local/w"}),
    ("pd_device", "no RDMA device", {**SEPARATE_PD, "rdma_device": ""}, {"rdma_device": "mlx5_0"}),
    ("straw_fields", "a relative folder", {**STRAW, "straw_dir": "queue"}, {"straw_dir": "/queue"}),
    ("straw_fields", "a run id with a slash", {**STRAW, "straw_run_id": "a/b"}, {"straw_run_id": "a-b"}),
    ("straw_fields", "a run id of 65", {**STRAW, "straw_run_id": "a" * 65}, {"straw_run_id": "a" * 64}),
    ("straw_fields", "no declaration", {**STRAW, "straw_declaration": ""}, {"straw_declaration": "/d.json"}),
    ("ssm_ratio", "nothing for the state", {"model": "qwen38", "ssm_ratio": 0.0}, {"ssm_ratio": 0.5}),
    ("memory", "the optimizer of GLM-5.3 on the GPUs", {"model": "glm5", "cpu_adam": False}, {"cpu_adam": True}),
    ("memory", "an engine without room for one response", {"model": "qwen38", "gpu": "a100-40"}, {"gpu": "a100-80"}),
    ("staleness", "a partial rollout is a version old", {"partial": True, "max_staleness": 0}, {"max_staleness": 1}),
    ("staleness", "a queue of 128 groups", {**ASYNC, "max_staleness": 1}, {"schedule": "sync"}),
    ("resume", "more rounds than what", {"rounds_more": 5}, {"resume_from": "/data/out"}),
]  # fmt: skip


def plan_codes(edit: Edit) -> list[str]:
    experiment = Experiment.model_validate(edit)
    return [error.code for error in build_plan(experiment).errors]


@pytest.mark.parametrize(("code", "why", "breaking", "neighbour"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_an_experiment_that_breaks_one_rule_gives_its_code_alone(
    code: str, why: str, breaking: Edit, neighbour: Edit
) -> None:
    assert set(plan_codes(breaking)) == {code}
    assert plan_codes({**breaking, **neighbour}) == []


def test_delta_colocate_comes_with_the_rule_on_transports() -> None:
    breaking = {**DELTA, "layout": "colocate"}
    assert plan_codes(breaking) == ["colocate_transport", "delta_colocate"]
    assert plan_codes({**breaking, "layout": "separate"}) == []


def test_sc_conflict_a_greedy_sampler_has_no_distribution_to_centre() -> None:
    greedy = plan_codes({"sc": True, "sampling": {"temperature": 0}})
    assert greedy == ["sc_conflict", "temperature"]  # slime itself refuses a temperature of 0 too
    assert plan_codes({"sc": True, "sampling": {"temperature": 0.01}}) == []


@pytest.mark.parametrize(
    ("code", "breaking", "do"),
    [
        ("disk_dir", {**DELTA, "weight_dir": ""}, "Set weight_dir to a path that every node sees."),
        ("delta_local", {**DELTA, "local_weight_dir": ""}, "Set local_weight_dir to a path on a local disk."),
        ("delta_colocate", {**DELTA, "layout": "colocate"}, 'Set layout to "separate", or transport to "nccl".'),
        ("not_in_target", {"slime_target": "624b824a", "sc": True}, 'Set slime_target to "v0.4.0", or turn sc off.'),
    ],
)
def test_a_rule_that_slime_checks_too_is_said_once_in_the_words_of_the_choices(
    code: str, breaking: Edit, do: str
) -> None:
    said = [error.message for error in build_plan(Experiment.model_validate(breaking)).errors if error.code == code]
    assert len(said) == 1 and do in said[0]


def test_memory_counts_the_host_of_a_node_too() -> None:
    experiment = Experiment(model="deepseek")
    needed = build_plan(experiment).memory_plan.total("host").bytes
    [error] = build_plan(experiment, host_ram_bytes=needed - 1).errors
    assert error.code == "memory" and "of host memory" in error.message
    assert build_plan(experiment, host_ram_bytes=needed).errors == ()


def test_resume_runs_nothing_names_the_corrected_value() -> None:
    experiment = Experiment(resume_from="/data/out", rounds=3)
    plan = build_plan(experiment, resume=ResumeFacts(latest_iteration=2))
    assert [error.code for error in plan.errors] == ["resume_runs_nothing"]
    assert "at least 4" in plan.errors[0].message
    assert build_plan(experiment.model_copy(update={"rounds": 4}), resume=ResumeFacts(2)).errors == ()


def test_every_error_rule_has_a_case() -> None:
    covered = {case[0] for case in CASES} | {"delta_colocate", "resume_runs_nothing"}
    assert {rule.code for rule in list_error_rules()} == covered


def test_every_message_says_where_why_and_what_to_do() -> None:
    for code, _, breaking, _ in CASES:
        for error in build_plan(Experiment.model_validate(breaking)).errors:
            where, _, rest = error.message.partition(": ")
            assert where and f"[{code}]. " in rest, error.message
            assert not rest.endswith("]."), error.message


def test_every_finding_names_choices_that_exist() -> None:
    known = set(Experiment.model_fields)
    for rule in list_error_rules():
        assert rule.fields
        assert {field.split(".")[0] for field in rule.fields} <= known


def test_train_grid_reads_like_the_example_of_the_style_guide() -> None:
    message = build_plan(Experiment(model="glm47", nodes=6)).errors[0].message
    assert message == (
        "nodes = 6: 48 GPUs are not a multiple of TP 8 x PP 4 x CP 2 = 64 for glm47 [train_grid]. Use 8 nodes."
    )


def test_train_grid_offers_the_counts_below_and_above() -> None:
    message = build_plan(Experiment(model="glm47", nodes=12)).errors[0].message
    assert message.endswith("Use 8 or 16 nodes.")


def test_two_broken_rules_are_both_reported() -> None:
    codes = plan_codes({"r3": True, "model": "dense", "mask_prefix": True})
    assert codes == ["r3_dense", "mask_partial"]


def test_the_memory_message_has_the_sizes_and_a_lever() -> None:
    message = build_plan(Experiment(model="glm5", cpu_adam=False)).errors[0].message
    assert message.startswith("trainer needs ")
    assert "h100 leaves 75.6 GiB (79.6 less 4.0 kept back)" in message
    assert "optimizer" in message and "Largest lever: keep the optimizer on the host" in message


@pytest.mark.parametrize("model", ["flash", "dense", "glm47", "glm5", "deepseek", "qwen38"])
def test_the_default_of_each_lab_model_has_no_error(model: str) -> None:
    assert build_plan(Experiment(model=model)).errors == ()
    assert build_plan(apply(Experiment(), {"model": model})).errors == ()


def test_every_recipe_of_the_catalogue_passes_its_grids() -> None:
    for model_id in load_catalog().models:
        codes = {error.code for error in build_plan(Experiment(model=model_id)).errors}
        assert not codes & {"train_grid", "expert_grid", "stage_layers", "engine_multiple"}, model_id
