"""X02.2: the laptop form keeps the algorithm, and every choice is in exactly one list."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.errors import InputError
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.presets import PRESETS, find_preset
from hotloop.experiment.rehearsal import LEARNING, Rehearsal, laptop_form
from hotloop.experiment.resolve import resolve

ALGORITHM: dict[str, Any] = {
    "layout": "separate",
    "schedule": "async",
    "transport": "delta",
    "weight_dir": "/w",
    "local_weight_dir": "/n",
    "correction": "icepop",
    "r3": True,
    "sc": True,
    "partial": True,
    "mask_prefix": True,
    "straw": True,
    "straw_dir": "/q",
    "straw_run_id": "r",
    "straw_declaration": "/d",
    "max_staleness": 2,
    "eagle": "builtin",
    "algorithm": {"kind": "gspo", "eps_clip": 0.0004, "kl_loss_coef": 0.01},
    "reward": {"kind": "python", "function": "mine.reward"},
}


def names(form: Rehearsal) -> list[str]:
    return [entry.name for entry in (*form.kept, *form.replaced, *form.not_rehearsed)]


def test_x02_the_algorithm_is_kept() -> None:
    form = laptop_form(Experiment.model_validate(ALGORITHM))
    for key in ("schedule", "transport", "correction", "r3", "sc", "partial", "mask_prefix", "straw", "max_staleness"):
        assert getattr(form.experiment, key) == ALGORITHM[key], key
        assert key in {kept.name for kept in form.kept}
    assert form.experiment.algorithm.kind == "gspo"
    assert form.experiment.algorithm.eps_clip == 0.0004
    assert form.experiment.algorithm.kl_loss_coef == 0.01


def test_x02_eagle_is_off_and_said_so() -> None:
    form = laptop_form(Experiment.model_validate(ALGORITHM))
    assert form.experiment.eagle == "off"
    assert "eagle" in {entry.name for entry in form.not_rehearsed}


def test_x02_the_user_s_reward_and_hooks_are_kept() -> None:
    form = laptop_form(Experiment.model_validate(ALGORITHM))
    assert form.experiment.reward.kind == "python"
    assert "reward.function" in {kept.name for kept in form.kept}
    custom = laptop_form(Experiment(task="custom", generate_hook="m.g", reward_hook="m.r"))
    assert (custom.experiment.task, custom.experiment.generate_hook, custom.experiment.reward_hook) == (
        "custom", "m.g", "m.r",
    )  # fmt: skip


@pytest.mark.parametrize(("model", "policy"), [("flash", "moe"), ("dense", "dense"), ("qwen38", "dense")])
def test_x02_the_policy_is_of_the_same_family(model: str, policy: str) -> None:
    form = laptop_form(Experiment(model=model))
    assert form.experiment.laptop.policy == policy
    (replaced,) = [entry for entry in form.replaced if entry.name == "model"]
    assert (replaced.before, replaced.after) == (model, f"laptop.policy = {policy}")


def test_x02_attention_that_the_built_in_policies_lack_is_not_rehearsed() -> None:
    assert ("attention", "mla") in [(e.name, e.value) for e in laptop_form(Experiment()).not_rehearsed]
    assert "attention" not in names(laptop_form(Experiment(model="dense")))


def test_x02_sizes_are_replaced_by_values_that_learn() -> None:
    form = laptop_form(Experiment())
    values = dict(flatten(form.experiment.model_dump()))
    assert all(values[path] == value for path, value in LEARNING.items())
    assert form.experiment.rounds == 30
    assert {"optimizer.lr", "rounds", "sampling.num_groups", "response_tokens"} <= {e.name for e in form.replaced}


def test_x02_data_that_is_here_is_kept_and_data_that_is_not_becomes_the_built_in_task() -> None:
    experiment = Experiment(data_path="/mine.jsonl")
    here = laptop_form(experiment, has_file=lambda path: path == "/mine.jsonl")
    assert here.experiment.data_path == "/mine.jsonl"
    assert here.experiment.laptop.task == ""
    assert here.experiment.reward.kind == "deepscaler"
    gone = laptop_form(experiment)
    assert gone.experiment.data_path is None
    assert gone.experiment.laptop.task == "sort5"
    assert gone.experiment.reward.kind == "exact"
    assert "reward.kind" in {entry.name for entry in gone.replaced}


def test_x02_an_experiment_with_a_laptop_policy_runs_as_it_is_written() -> None:
    laptop = find_preset("laptop")
    form = laptop_form(laptop)
    assert form.experiment == laptop
    assert form.replaced == form.not_rehearsed == ()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_x02_2_every_choice_that_says_something_is_in_exactly_one_list(name: str) -> None:
    experiment = find_preset(name)
    form = laptop_form(experiment)
    listed = names(form)
    assert len(listed) == len(set(listed))
    if experiment.laptop.policy:
        return
    resolved = dict(flatten(resolve(experiment).model_dump(mode="json")))
    quiet = {
        "eagle": "off", "ssm_dtype": "auto", "kv_dtype": "auto", "precision": "bf16", "correction": "none",
    }  # fmt: skip
    for path, value in resolved.items():
        if path.startswith("laptop.") or path in ("eagle_steps", "prefill_gpus"):
            continue
        if value in (None, False, 0, "", [], {}) or quiet.get(path) == value:
            continue
        assert path in listed, path


def test_x02_2_every_catalogue_model_has_a_laptop_form() -> None:
    for model in load_catalog().models:
        form = laptop_form(Experiment(model=model))
        assert form.experiment.laptop.policy in ("dense", "moe")
        assert Experiment.model_validate(form.experiment.model_dump()) == form.experiment


def test_what_the_loop_cannot_do_goes_to_its_default_and_is_named() -> None:
    refused = {"schedule": "async", "layout": "separate", "straw": True, "algorithm.kl_loss_coef": 0.01, "sc": True}
    form = laptop_form(
        Experiment.model_validate(ALGORITHM), is_supported=lambda path, value: refused.get(path, object()) != value
    )
    assert (form.experiment.schedule, form.experiment.layout, form.experiment.straw) == ("sync", "colocate", False)
    assert form.experiment.algorithm.kind == "gspo"
    assert form.experiment.algorithm.kl_loss_coef == 0.0
    missing = {entry.name: entry for entry in form.not_rehearsed}
    assert set(refused) <= set(missing)
    assert missing["schedule"].value == "async"
    assert not set(refused) & {entry.name for entry in form.kept}


def test_an_estimator_that_the_loop_lacks_becomes_grpo_and_is_named() -> None:
    experiment = Experiment.model_validate({"algorithm": {"kind": "reinforce_plus_plus", "gamma": 0.9}})
    supported = {"grpo", "gspo"}

    def is_supported(path: str, value: Any) -> bool:
        if path in ("algorithm.gamma", "algorithm.normalize_advantages"):
            return False
        return path != "algorithm.kind" or value in supported

    form = laptop_form(experiment, is_supported=is_supported)
    assert form.experiment.algorithm.kind == "grpo"
    missing = {entry.name for entry in form.not_rehearsed}
    assert {"algorithm.kind", "algorithm.gamma", "algorithm.normalize_advantages"} <= missing


def test_custom_tasks_that_the_loop_lacks_take_the_built_in_reward() -> None:
    experiment = Experiment(task="custom", generate_hook="m.g", reward_hook="m.r")
    form = laptop_form(experiment, is_supported=lambda path, value: path != "task" or value == "math")
    assert (form.experiment.task, form.experiment.generate_hook, form.experiment.reward.kind) == ("math", "", "exact")
    assert {"task", "generate_hook", "reward_hook"} <= {entry.name for entry in form.not_rehearsed}


def test_a_cluster_s_evaluation_is_measured_inline_or_beside() -> None:
    assert laptop_form(Experiment()).experiment.eval_mode == "inline"
    aside = Experiment(layout="separate", schedule="async")
    assert laptop_form(aside).experiment.eval_mode == "side"
    form = laptop_form(aside, is_supported=lambda path, value: not (path == "eval_mode" and value == "side"))
    assert form.experiment.eval_mode == "inline"


def test_over_sampling_keeps_its_share() -> None:
    form = laptop_form(Experiment.model_validate({"sampling": {"num_groups": 8, "over_sampling": 16}}))
    assert form.experiment.sampling.over_sampling == 64


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(InputError, match="unknown_model"):
        laptop_form(Experiment(model="nothing"))
