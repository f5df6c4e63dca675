"""The launch guide: which command on which node, with GPU counts that sum to what the job needs."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.launch import launch_guide, render_publish_commands, split_ray_gpus
from hotloop.experiment.layout import compute_layout
from hotloop.experiment.records import LaunchStep


def guide(**choices: Any) -> list[LaunchStep]:
    experiment = Experiment.model_validate(choices)
    return launch_guide(experiment, compute_layout(experiment))


def commands(steps: list[LaunchStep], start: str) -> list[str]:
    return [step.command for step in steps if step.command.startswith(start)]


def ray_gpus(steps: list[LaunchStep]) -> int:
    """Sum of GPUs over every node that a `ray start` line is for."""
    total = 0
    for step in steps:
        found = re.search(r"^ray start .*--num-gpus (\d+)", step.command)
        if found:
            nodes = re.search(r"nodes (\d+)\.\.(\d+)", step.where)
            total += int(found[1]) * (int(nodes[2]) - int(nodes[1]) + 1 if nodes else 1)
    return total


@pytest.mark.parametrize("model", sorted(load_catalog().models))
@pytest.mark.parametrize("layout", ["colocate", "separate", "external"])
def test_the_ray_start_lines_offer_exactly_the_gpus_that_ray_must_have(model: str, layout: str) -> None:
    experiment = Experiment(model=model, layout=layout)  # type: ignore[arg-type]
    placed = compute_layout(experiment)
    steps = launch_guide(experiment, placed)
    assert ray_gpus(steps) == placed.ray_gpus == sum(split_ray_gpus(placed))
    assert len(commands(steps, "ray start --head")) == 1


def test_a_pool_that_ends_inside_a_node_gives_the_last_node_fewer() -> None:
    steps = guide(model="dense", layout="separate", rollout_gpus=4)
    joined = commands(steps, "ray start --address")
    assert len(joined) == 1
    assert "--num-gpus 4" in joined[0]


def test_convert_has_one_line_for_each_node() -> None:
    lines = commands(guide(model="deepseek"), "CONVERT_MASTER_ADDR")
    assert [re.search(r"CONVERT_NODE_RANK=(\d)", line)[1] for line in lines] == list("0123")  # type: ignore[index]
    assert commands(guide(), "bash experiment.sh convert") == ["bash experiment.sh convert"]


def test_the_guide_ends_with_the_job_and_checks_before_it() -> None:
    steps = [step.command for step in guide()]
    assert steps[-1] == "bash experiment.sh train"
    order = [steps.index(f"bash experiment.sh {name}") for name in ("prepare", "convert", "check", "train")]
    assert order == sorted(order)


def test_shared_paths_and_a_fresh_output_folder_are_named() -> None:
    steps = guide(save_path="/out/run 1")
    assert "/data/models/GLM-4.7-Flash" in steps[0].what
    assert "/out/run 1" in steps[0].what
    (fresh,) = [step for step in steps if "fresh output folder" in step.what]
    assert shlex.split(fresh.command)[:4] == ["ls", "-A", "--", "/out/run 1"]


def test_a_resumed_run_is_asked_for_its_tracker_and_not_for_a_fresh_folder() -> None:
    steps = guide(resume_from="/old")
    assert not [step for step in steps if "fresh output folder" in step.what]
    assert commands(steps, "cat") == ["cat '/old/latest_checkpointed_iteration.txt'"]


def test_external_engines_are_outside_ray_and_must_answer_first() -> None:
    steps = guide(layout="external", transport="disk", weight_dir="/w", external_addrs="h1:8000, http://h2:8001")
    (serve,) = [step for step in steps if step.command == "bash serving-reference.sh"]
    assert serve.where == "outside the cluster"
    assert "2 SGLang engines" in serve.what
    assert "/w" in serve.what
    assert commands(steps, "curl") == ["curl -fsS 'http://h1:8000/health'", "curl -fsS 'http://h2:8001/health'"]
    assert steps.index(serve) < next(i for i, step in enumerate(steps) if step.command.endswith("train"))


def test_nothing_is_invented_for_what_only_the_user_knows() -> None:
    assert any("rdma_device; it is still empty" in step.what for step in guide(pd=True))
    assert any("external_addrs" in step.what for step in guide(layout="external"))


def test_side_evaluation_has_its_own_cluster() -> None:
    steps = guide(layout="separate", schedule="async", eval_mode="side", eval_data="/e")
    assert steps[-1].command.endswith("bash experiment.sh evaluate")
    assert "8 GPUs" in steps[-1].what


def test_a_persistent_queue_needs_a_run_id_that_is_new() -> None:
    assert any("run-7" in step.what for step in guide(straw=True, straw_run_id="run-7"))


def test_the_user_s_own_modules_must_be_importable() -> None:
    steps = guide(task="custom", generate_hook="my_env.turns.generate", reward_hook="my_env.reward.score")
    assert any("my_env.turns, my_env.reward importable" in step.what for step in steps)
    assert not [step for step in guide() if "importable" in step.what]


def test_e13_the_base_is_published_before_the_job_and_the_bucket_is_fresh() -> None:
    steps = guide(
        layout="separate", transport="delta", weight_dir="/w", local_weight_dir="/n", export={"publish": "s3://b/r"},
        hf_path="/m/GLM",
    )  # fmt: skip
    published = next(step.command for step in steps if step.command.startswith("hotloop publish full"))
    assert shlex.split(published) == [
        "hotloop", "publish", "full", "--dir", "/m/GLM", "--bucket", "s3://b/r", "--identity", "weight_v000000",
        "--policy-version", "0", "--startup",
    ]  # fmt: skip
    assert any("fresh bucket prefix" in step.what for step in steps)
    assert any("slime deletes /w" in step.what for step in steps)


def test_user_text_in_a_command_is_one_quoted_word() -> None:
    hostile = "'; touch x; '"
    experiment = Experiment.model_validate({"export": {"publish": hostile}, "hf_path": hostile})
    assert shlex.split(render_publish_commands(experiment)[0])[4:7] == [hostile, "--bucket", hostile]
