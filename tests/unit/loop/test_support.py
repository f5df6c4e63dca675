"""Every key of the schema is carried out, the cluster's own, or refused. None is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.errors import InputError
from hotloop.experiment.load import known_paths, load_experiment
from hotloop.experiment.presets import make_laptop_preset
from hotloop.loop.hooks import check_hooks
from hotloop.loop.support import SUPPORT, check_support


def test_the_table_has_exactly_the_keys_of_the_schema() -> None:
    assert set(SUPPORT) == set(known_paths())


def test_the_preset_is_carried_out() -> None:
    check_support(make_laptop_preset())


@pytest.mark.parametrize(
    "setting",
    [
        "schedule=async",
        "precision=fp8",
        "kv_dtype=fp8",
        "sc=true",
        "pd=true",
        "hicache=true",
        "eagle=builtin",
        "straw=true",
        "partial=true",
        "mask_prefix=true",
        "task=custom",
        "generate_hook=a.b",
        "reward_hook=a.b",
        "eval_mode=side",
        "eval_data=aime x.jsonl",
        "resume_from=x",
        "rounds_more=3",
        "algorithm.kl_coef=0.1",
        "laptop.hooks.custom-rm=a.b",
        "ssm_dtype=float32",
    ],
)
def test_what_is_not_carried_out_is_refused_by_name(setting: str) -> None:
    experiment = load_experiment(None, [setting], base=make_laptop_preset()).experiment
    with pytest.raises(InputError) as caught:
        check_support(experiment)
    path = setting.partition("=")[0]
    assert caught.value.code == "not_yet_supported" and caught.value.exit_code == 2
    assert caught.value.where.startswith(path if "hooks" not in path else "laptop.hooks")


def test_a_misspelt_hook_is_told_apart_from_one_that_is_not_called() -> None:
    hooks = {"custom-rn": "a.b", "custom_rm_path": "a.b"}
    problems = [(problem.code, problem.do) for problem in check_hooks(hooks)]
    assert problems[0] == ("unknown_hook", "Did you mean custom-rm?")
    assert problems[1] == ("not_yet_supported", 'Set reward.kind = "python" and reward.function.')


@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_estimator_without_its_arithmetic_is_refused(kind: str) -> None:
    experiment = make_laptop_preset()
    values: dict[str, Any] = experiment.model_dump(mode="json") | {"algorithm": {"kind": kind}}
    with pytest.raises(InputError, match=rf"algorithm.kind = '{kind}': hotloop run does not carry this out yet"):
        check_support(type(experiment).model_validate(values))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["sampling.group_size=1"], "group_size"),
        (["sampling.temperature=0"], "temperature_zero"),
        (["laptop.max_slots=15"], "max_slots"),
        (["sampling.over_sampling=4"], "over_sampling"),
        (["laptop.task=", "eval_mode=off"], "no_prompts"),
        (["data_path=x.jsonl"], "two_prompt_sources"),
        (["laptop.task=", "data_path=x.jsonl"], "no_held_out"),
        (["r3=true"], "r3_dense"),
        (["laptop.policy="], "no_policy"),
        (["sampling.top_k=0"], "out_of_range"),
        (['sampling.stop=[""]'], "out_of_range"),
        (["sampling.num_groups=4", "sampling.group_size=4", "optimizer.steps_per_round=17"], "empty_step"),
    ],
)
def test_rules_of_a_run(settings: list[str], code: str) -> None:
    with pytest.raises(InputError) as caught:
        check_support(load_experiment(None, settings, base=make_laptop_preset()).experiment)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_everything_wrong_is_reported_together() -> None:
    experiment = load_experiment(None, ["sc=true", "sampling.group_size=1"], base=make_laptop_preset()).experiment
    with pytest.raises(InputError) as caught:
        check_support(experiment)
    assert [problem.code for problem in caught.value.problems] == ["not_yet_supported", "group_size"]


def test_what_belongs_to_the_cluster_alone_changes_nothing_here() -> None:
    settings = ["nodes=4", "gpu=h200", "image=rocm", "hf_path=/x", "cpu_adam=true", "export.slime_args=['--a']"]
    check_support(load_experiment(None, settings, base=make_laptop_preset()).experiment)
