"""L15: the four presets are whole experiments with the choices of section 6."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError
from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import build_plan
from hotloop.experiment.presets import PRESETS, find_preset
from hotloop.experiment.resolve import resolve


def error_codes(name: str) -> set[str]:
    return {error.code for error in build_plan(find_preset(name)).errors}


def test_l15_start_is_the_default_experiment() -> None:
    resolved = resolve(find_preset("start"))
    assert find_preset("start") == Experiment()
    chosen = (
        resolved.model,
        resolved.task,
        resolved.layout,
        resolved.schedule,
        resolved.precision,
        resolved.correction,
    )
    assert chosen == ("flash", "math", "colocate", "sync", "bf16", "tis")
    assert error_codes("start") == set()


def test_l15_scale_lacks_only_the_device_that_nobody_can_invent() -> None:
    scale = find_preset("scale")
    assert (scale.model, scale.precision, scale.pd, scale.correction, scale.layout) == (
        "glm5", "fp8", True, "icepop", "separate",
    )  # fmt: skip
    assert error_codes("scale") == {"pd_device"}


def test_l15_agent_stays_blocked_by_its_empty_hooks() -> None:
    agent = find_preset("agent")
    assert (agent.layout, agent.schedule, agent.straw, agent.partial) == ("separate", "async", True, True)
    assert (agent.precision, agent.pd, agent.hicache, agent.rollout_gpus) == ("fp8", True, True, 16)
    assert agent.generate_hook == agent.reward_hook == ""
    assert "hook_form" in error_codes("agent")
    filled = agent.model_copy(
        update={
            "generate_hook": "agent.generate",
            "reward_hook": "agent.reward",
            "rdma_device": "mlx5_0",
            "straw_dir": "/q",
            "straw_run_id": "run-1",
            "straw_declaration": "/q/declaration.json",
        }
    )
    assert build_plan(filled).errors == ()


def test_l15_laptop_runs_here_and_is_qwen_on_a_cluster() -> None:
    laptop = find_preset("laptop")
    assert (laptop.laptop.policy, laptop.laptop.task) == ("dense", "sort5")
    assert (laptop.layout, laptop.schedule, laptop.correction, laptop.model) == (
        "colocate", "sync", "none", "qwen2.5-0.5b",
    )  # fmt: skip
    assert (laptop.rounds, laptop.sampling.num_groups, laptop.sampling.group_size) == (500, 32, 16)
    assert error_codes("laptop") == set()


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown_preset.*Did you mean scale"):
        find_preset("scales")


def test_presets_are_made_anew_and_equal_each_time() -> None:
    assert all(make() == make() for make in PRESETS.values())
