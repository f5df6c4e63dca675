"""Fill every choice that was left to the model's recipe.

Owns: `resolve`, the default paths, and `effective_recipe`: the recipe as the sections and `export.slime_args` change
it. A choice of `None` in an Experiment means "as the recipe says"; a resolved
Experiment has none left, except those where empty is a meaning of its own (`ssm_ratio`, `max_staleness`,
`rounds_more`).

Promises: values that the user gave are kept; resolving twice changes nothing. Does not do: check anything.
"""

from __future__ import annotations

from typing import Any

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog, Model, Recipe
from hotloop.experiment.choices import Experiment

MODEL_ROOT = "/data/models"
"""Shared folder that default paths name; every node must see it under the same path."""
SAVE_ROOT = "/data/checkpoints"
MATH_DATA = "/data/dapo-math-17k/dapo-math-17k.jsonl"
EVAL_DATA = "/data/aime-2024/aime-2024.jsonl"

FOLLOWS_RECIPE = (
    "nodes", "rollout_gpus", "precision", "kv_dtype", "prefill_gpus", "eagle_steps", "cpu_adam",
    "hf_path", "train_path", "data_path", "save_path", "megatron_path",
)  # fmt: skip
"""Choices whose `None` is filled here."""


_RECIPE_FLAGS = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--decoder-first-pipeline-num-layers": "first_stage_layers",
    "--decoder-last-pipeline-num-layers": "last_stage_layers",
    "--rollout-num-gpus-per-engine": "engine_gpus",
    "--max-tokens-per-gpu": "max_tokens_per_gpu",
    "--sglang-dp-size": "engine_dp",
    "--sglang-ep-size": "engine_ep",
    "--sglang-mem-fraction-static": "mem_fraction_static",
}
"""slime flags that change a size of the recipe; of a repeated flag the last one counts."""


def read_slime_arg(experiment: Experiment, flag: str) -> str | None:
    """Return the value that the last use of a one-value flag in `export.slime_args` has, or None."""
    args = experiment.export.slime_args
    value = None
    for position, word in enumerate(args):
        name, equals, after = word.partition("=")
        if name != flag:
            continue
        if equals:
            value = after
        elif position + 1 < len(args):
            value = args[position + 1]
    return value


def effective_recipe(experiment: Experiment, model: Model) -> Recipe:
    """Return the model's recipe with the sizes that the file's sections and `export.slime_args` override.

    A value that is not a positive number is left to the flag check, and the recipe's own is kept.
    """
    changed: dict[str, Any] = {}
    if experiment.optimizer.max_tokens_per_microbatch is not None:
        changed["max_tokens_per_gpu"] = experiment.optimizer.max_tokens_per_microbatch
    for flag, name in _RECIPE_FLAGS.items():
        text = read_slime_arg(experiment, flag)
        if text is None:
            continue
        try:
            value = float(text) if name == "mem_fraction_static" else int(text)
        except ValueError:
            continue
        smallest = 0 if name.endswith("stage_layers") else 1e-9
        if smallest <= value < 10**9:
            changed[name] = value
    return model.recipe._replace(**changed) if changed else model.recipe


def serving_directory(model: Model, precision: str) -> str:
    """Return the default `--hf-checkpoint` directory: the published copy where it has the wanted precision."""
    wanted = "fp8" if precision == "fp8train" else precision
    suffix = "" if wanted == model.published_precision else f"-{wanted.upper()}"
    return f"{MODEL_ROOT}/{model.hf_name}{suffix}"


def resolve(experiment: Experiment, catalog: Catalog | None = None) -> Experiment:
    """Return the experiment with every recipe choice filled in.

    Raises: InputError `unknown_model` when the model is not in the catalogue.
    """
    catalog = catalog or load_catalog()
    model = find_model(catalog, experiment.model)
    recipe = effective_recipe(experiment, model)
    nodes = experiment.nodes if experiment.nodes is not None else recipe.nodes
    precision = experiment.precision or recipe.serving_precision or model.published_precision
    filled: dict[str, Any] = {
        "nodes": nodes,
        "rollout_gpus": nodes * recipe.gpus_per_node,
        "precision": precision,
        "kv_dtype": "fp8" if recipe.kv_cache_dtype.startswith("fp8") else "auto",
        "prefill_gpus": recipe.engine_gpus,
        "eagle_steps": model.default_eagle_steps,
        "cpu_adam": recipe.cpu_adam,
        "hf_path": serving_directory(model, precision),
        "train_path": f"{MODEL_ROOT}/{model.hf_name}_torch_dist",
        "data_path": MATH_DATA,
        "save_path": f"{SAVE_ROOT}/{model.hf_name}",
        "megatron_path": catalog.images["megatron_path"],
    }
    if experiment.eval_mode != "off" and not experiment.eval_data and experiment.task == "math":
        experiment = experiment.model_copy(update={"eval_data": EVAL_DATA})
    missing = {name: filled[name] for name in FOLLOWS_RECIPE if getattr(experiment, name) is None}
    return experiment.model_copy(update=missing) if missing else experiment
