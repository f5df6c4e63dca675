"""A grid of more than two thousand experiments: each is planned, and each without errors exports sound files.

models x layouts x schedules x precisions x corrections x serving x targets is 10,944 combinations; every fifth is
taken, which meets every pair of values because five divides none of the sizes.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.script import render_experiment_sh, render_header
from hotloop.experiment.export.serving import build_serving_rows, render_serving_reference
from hotloop.experiment.export.slime import build_train_argv
from hotloop.experiment.flags import check_flags, load_flags
from hotloop.experiment.plan import Plan, build_plan

STRIDE = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "colocate": {"layout": "colocate"},
    "separate": {"layout": "separate", "transport": "delta", "weight_dir": "/w", "local_weight_dir": "/n"},
    "external": {"layout": "external", "transport": "disk", "weight_dir": "/w", "external_addrs": "h1:1 h2:2"},
}
SERVING: dict[str, dict[str, Any]] = {
    "plain": {},
    "pd": {"pd": True, "rdma_device": "mlx5_0", "hicache": True},
    "eagle": {"eagle": "external", "draft_path": "/draft", "kv_dtype": "fp8"},
    "more": {
        "hicache": True, "partial": True, "mask_prefix": True, "straw": True, "straw_dir": "/q", "straw_run_id": "r",
        "straw_declaration": "/d.json", "eval_mode": "side", "eval_data": "/e.jsonl", "export": {"publish": "s3://b/r"},
    },
}  # fmt: skip
PRECISIONS = ("bf16", "fp8", "fp8train", "int4")
CORRECTIONS = ("tis", "none", "icepop")
TARGETS = ("v0.4.0", "624b824a")


def list_combinations(catalog: Catalog) -> list[Experiment]:
    """Every fifth combination, in the order of the product."""
    product = itertools.product(catalog.models, LAYOUTS, ("sync", "async"), PRECISIONS, CORRECTIONS, SERVING, TARGETS)
    found = []
    for model, layout, schedule, precision, correction, serving, target in itertools.islice(product, 0, None, STRIDE):
        record = catalog.models[model]
        values = {
            "model": model,
            "schedule": schedule,
            "precision": precision,
            "correction": correction,
            "slime_target": target,
            "r3": record.arch.moe and serving == "more",
            **LAYOUTS[layout],
            **SERVING[serving],
        }
        if layout == "separate" and serving == "pd":
            values["rollout_gpus"] = 2 * record.recipe.engine_gpus
        found.append(Experiment.model_validate(values))
    return found


def find_form(script: str) -> str:
    """Return a script without the words of its arrays, its quoted words, its numbers and its comments."""
    without_arrays = re.sub(r"^([A-Z_]+)=\(\n(?:  .*\n)*\)$", r"\1=(x)", script, flags=re.M)
    return re.sub(r"'[^'\n]*'|\b[0-9][0-9.e-]*\b|^#.*$", "x", without_arrays, flags=re.M)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="module")
def plans(catalog: Catalog) -> list[Plan]:
    return [build_plan(experiment, catalog=catalog) for experiment in list_combinations(catalog)]


def sound(plans: list[Plan]) -> Iterator[Plan]:
    return (plan for plan in plans if not plan.errors)


@pytest.mark.slow
def test_every_combination_is_planned_without_an_exception(plans: list[Plan]) -> None:
    assert len(plans) >= 2000
    assert all(plan.memory for plan in plans)


@pytest.mark.slow
def test_a_good_share_of_the_grid_can_be_exported(plans: list[Plan]) -> None:
    exported = list(sound(plans))
    assert len(exported) >= 300
    assert {plan.resolved.layout for plan in exported} == set(LAYOUTS)
    assert {plan.resolved.schedule for plan in exported} == {"sync", "async"}
    assert {plan.resolved.precision for plan in exported} == set(PRECISIONS)
    assert {plan.resolved.correction for plan in exported} == set(CORRECTIONS)
    assert {plan.resolved.slime_target for plan in exported} == set(TARGETS)
    assert any(plan.resolved.pd for plan in exported)
    assert any(plan.resolved.straw for plan in exported)


@pytest.mark.slow
def test_every_flag_is_one_that_the_parsers_know_with_its_arity_and_value(plans: list[Plan], catalog: Catalog) -> None:
    table = load_flags()
    serving_names = {"--" + name.removeprefix("--sglang-") for name in table.flags if name.startswith("--sglang-")}
    for plan in sound(plans):
        choices = plan.resolved
        model = find_model(catalog, choices.model)
        argv = build_train_argv(choices, model)
        assert check_flags(argv, choices.slime_target) == []
        if choices.slime_target == "624b824a":
            assert not table.later_only & set(argv)
        for name, *values in build_serving_rows(choices, model):
            assert name in serving_names or name in table.serving_only
            assert "--sglang-" + name[2:] not in table.not_in_serving
            flag = table.flags.get("--sglang-" + name[2:]) or table.serving_only[name]
            assert len(values) == flag.arity


@pytest.mark.slow
def test_every_export_passes_bash_and_shellcheck(plans: list[Plan], catalog: Catalog, tmp_path: Path) -> None:
    """bash reads every script; shellcheck reads one of each form, where a form is what is left without the words of
    arrays, quoted words and numbers. (Those are quoted by one function, which test_export_shell.py proves.)"""
    shapes: dict[str, Path] = {}
    paths: list[str] = []
    for number, plan in enumerate(sound(plans)):
        model = find_model(catalog, plan.resolved.model)
        scripts = {
            "experiment": render_experiment_sh(plan.resolved, model, catalog),
            "serving": render_serving_reference(plan.resolved, model, render_header(plan.resolved, model)),
        }
        for name, text in scripts.items():
            path = tmp_path / f"{name}-{number}.sh"
            path.write_text(text)
            paths.append(str(path))
            shapes.setdefault(find_form(text), path)
    assert len(shapes) >= 20
    loop = 'for path in "$@"; do bash -n "$path" || exit 1; done'
    done = subprocess.run(["bash", "-c", loop, "bash", *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checked = [str(path) for path in shapes.values()]
    for start in range(0, len(checked), 100):
        done = subprocess.run(
            ["shellcheck", "-S", "error", *checked[start : start + 100]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_check_runs_in_an_empty_directory_and_names_what_is_missing(
    plans: list[Plan], catalog: Catalog, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for plan in itertools.islice(sound(plans), 0, None, 20):
        choices = plan.resolved.model_copy(
            update={"hf_path": "hf", "train_path": "train", "data_path": "data.jsonl", "straw_declaration": "decl.json"}
        )
        script = tmp_path / "experiment.sh"
        script.write_text(render_experiment_sh(choices, find_model(catalog, choices.model), catalog))
        done = subprocess.run(
            ["bash", str(script), "check"], cwd=empty, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        expected = ["hf/config.json", "train/latest_checkpointed_iteration.txt", "data.jsonl"]
        expected += ["decl.json"] if choices.straw else []
        assert re.findall(r"^missing: .*: (.*)$", done.stderr, flags=re.M) == expected
    assert list(empty.iterdir()) == []
