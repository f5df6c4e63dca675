"""One edit and everything that follows from it, as one undoable step: the dependency rules D01-D10.

Owns: `apply_edit` (with the list of what followed) and `apply`. An edit is a mapping from choice to value; a dotted key
reaches into a section (`sampling.num_groups`).

    D01 async while colocated        -> layout separate
    D02 layout colocate              -> schedule sync, transport nccl
    D03 layout external              -> transport disk
    D04 another model                -> sizes, paths, KV, recurrent and draft choices follow the new recipe
    D05 a dense model                -> R3 off
    D06 GLM-5.x or DeepSeek-R1       -> precision (GLM-5.x: KV too) follows the recipe, which is FP8
    D07 partial off                  -> prefix masking off
    D08 any other conflict           -> nothing; checks.py shows it
    D09 async + straw                -> distributed producers, which layout.py works out; no choice changes
    D10 PD + HiCache                 -> HiCache on prefill only, which layout.py works out; no choice changes

Promises: pure; what the edit itself names is never changed by a rule, so a contradiction inside one edit stays visible
as
an error. Does not do: checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from hotloop.errors import InputError, Problem
from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten, validate
from hotloop.experiment.records import Applied, Change
from hotloop.experiment.resolve import resolve
from hotloop.experiment.sections import (
    Cispo,
    DeepscalerReward,
    ExactReward,
    FormatReward,
    Grpo,
    Gspo,
    MathReward,
    PythonReward,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RemoteReward,
)

_KINDS: dict[str, type[BaseModel]] = {
    record.model_fields["kind"].default: record
    for record in (
        Grpo, Gspo, Cispo, ReinforcePlusPlus, ReinforcePlusPlusBaseline,
        DeepscalerReward, ExactReward, MathReward, FormatReward, PythonReward, RemoteReward,
    )
}  # fmt: skip
"""Tag -> record of the sections that are tagged by `kind`."""

_MODEL_RESETS: dict[str, Any] = {
    "nodes": None,
    "rollout_gpus": None,
    "prefill_gpus": None,
    "cpu_adam": None,
    "hf_path": None,
    "train_path": None,
    "data_path": None,
    "save_path": None,
    "megatron_path": None,
    "kv_dtype": None,
    "ssm_dtype": "auto",
    "ssm_ratio": None,
    "eagle": "off",
    "draft_path": "",
    "eagle_steps": None,
}
"""D04: what a new model resets. `None` follows the recipe; parallel sizes, converter and engine size always do."""


def _collect_rules(
    before: Experiment, after: Experiment, edit: Mapping[str, Any], catalog: Catalog
) -> dict[str, tuple[Any, str]]:
    """Return choice -> (value, rule) that follow from an edit, later rules over earlier ones."""
    follows: dict[str, tuple[Any, str]] = {}
    if "model" in edit and after.model != before.model:
        model = find_model(catalog, after.model)
        follows.update({name: (value, "D04") for name, value in _MODEL_RESETS.items()})
        if not model.arch.moe:
            follows["r3"] = (False, "D05")
        if model.published_precision == "fp8":
            follows["precision"] = (None, "D06")
        if model.recipe.kv_cache_dtype.startswith("fp8"):
            follows["kv_dtype"] = (None, "D06")
    if "layout" in edit and after.layout == "colocate":
        follows["schedule"] = ("sync", "D02")
        follows["transport"] = ("nccl", "D02")
    if "layout" in edit and after.layout == "external":
        follows["transport"] = ("disk", "D03")
    if "schedule" in edit and after.schedule == "async" and after.layout == "colocate":
        follows["layout"] = ("separate", "D01")
    if "partial" in edit and not after.partial:
        follows["mask_prefix"] = (False, "D07")
    return {name: value for name, value in follows.items() if name not in edit}


def _change_kind(section: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return a tagged section with another kind, keeping the values that the new kind has too."""
    record = _KINDS.get(kind)
    if record is None:
        return {"kind": kind}
    return {name: value for name, value in section.items() if name in record.model_fields} | {"kind": kind}


def _replace(experiment: Experiment, edit: Mapping[str, Any]) -> Experiment:
    """Return a validated copy with the edit's values."""
    values: dict[str, Any] = experiment.model_dump()
    problems: list[Problem] = []
    for dotted, value in edit.items():
        plain = value.model_dump() if isinstance(value, BaseModel) else value
        section, dot, key = dotted.partition(".")
        if not dot:
            values[dotted] = plain
        elif not isinstance(values.get(section), dict):
            problems.append(Problem("unknown_key", f"{section} is not a section", dotted, "See: hotloop schema."))
        elif key == "kind":
            values[section] = _change_kind(values[section], plain)
        else:
            values[section][key] = plain
    after = validate(values, {}, problems)
    if after is None or problems:
        raise InputError.of(problems)
    return after


def _compare(before: Experiment, after: Experiment, catalog: Catalog) -> dict[str, tuple[Any, Any]]:
    """Return choice -> (before, after) of every resolved value that differs."""
    old = dict(flatten(resolve(before, catalog).model_dump()))
    new = dict(flatten(resolve(after, catalog).model_dump()))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _apply(
    experiment: Experiment, edit: Mapping[str, Any], catalog: Catalog
) -> tuple[Experiment, dict[str, tuple[Any, str]]]:
    """Return the experiment after an edit, and choice -> (value, rule) of what followed."""
    after = _replace(experiment, edit)
    rules = _collect_rules(experiment, after, edit, catalog)
    if rules:
        after = after.model_copy(update={name: value for name, (value, _) in rules.items()})
    return after, rules


def apply_edit(experiment: Experiment, edit: Mapping[str, Any], catalog: Catalog | None = None) -> Applied:
    """Apply an edit and the rules that it triggers.

    Returns: the new experiment, what the user changed, and what followed: both as values after the recipe filled them.
    Raises: InputError with every fault of an edit that the schema refuses (codes of load.py); `unknown_model`.
    """
    catalog = catalog or load_catalog()
    after, rules = _apply(experiment, edit, catalog)
    edited, followed = [], []
    for name, (old, new) in _compare(experiment, after, catalog).items():
        if name in edit or name.split(".", 1)[0] in edit:
            edited.append(Change(name, old, new))
        else:
            rule = rules[name][1] if name in rules else "recipe"
            followed.append(Change(name, old, new, rule))
    return Applied(after, tuple(edited), tuple(followed))


def apply(experiment: Experiment, edit: Mapping[str, Any], catalog: Catalog | None = None) -> Experiment:
    """Apply an edit and the rules that it triggers, without the list of what followed. Raises: as `apply_edit`."""
    return _apply(experiment, edit, catalog or load_catalog())[0]
