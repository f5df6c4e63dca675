"""The laptop form of any experiment: same algorithm, toy sizes, and an account of every choice (X02).

    cluster experiment --laptop_form--> Rehearsal
                                        .experiment      what `hotloop run` runs
                                        .kept            rehearsed as chosen
                                        .replaced        rehearsed with another value: before, after, why
                                        .not_rehearsed   not exercised here at all: value, why

Promises: pure. Every choice that says something (is not off or empty) is in exactly one list, so nothing is dropped
silently. An experiment with `laptop.policy` is its own laptop form. What the loop cannot carry out is asked of the
caller (`is_supported`); such a choice goes to its default and into `not_rehearsed`.

Does not do: run anything, look at files (`has_file` is the caller's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog, Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.resolve import resolve

ROUNDS = 30
"""Rounds of a rehearsal: enough for the reward of the built-in task to rise by 0.15 to 0.25."""

LEARNING = {
    "optimizer.lr": 7e-4,
    "optimizer.lr_decay_style": "linear",
    "optimizer.lr_min_frac": 0.05,
    "optimizer.lr_warmup_steps": 3,
    "sampling.num_groups": 32,
    "sampling.group_size": 16,
    "response_tokens": 128,
    "rounds": ROUNDS,
}
"""Sizes and rates that learn on the built-in task within `ROUNDS`; chosen by measurement (dense and moe, seed 0)."""

MIN_STEPS_PER_ROUND = 2
"""Two updates a round learn faster than one, and make the clip and the correction act."""

BUILTIN_TASK = "sort5"

_HARDWARE = {
    "nodes": "one process on this machine",
    "rollout_gpus": "the same process samples",
    "prefill_gpus": "the same process samples",
    "concurrency": "the engine decodes laptop.max_slots sequences at a time",
    "cpu_adam": "the optimizer's state is small",
    "recompute": "activations are small",
    "gpu": "a CPU",
    "image": "this Python environment",
    "slime_target": "the loop of this package",
    "hf_path": "a built-in policy",
    "train_path": "a built-in policy",
    "save_path": "checkpoints of the run folder",
    "megatron_path": "the trainer of this package",
    "rdma_device": "one machine",
    "external_addrs": "the engine of this package",
    "draft_path": "speculation is off",
    "eagle_steps": "speculation is off",
    "weight_dir": "a bucket in the run folder",
    "local_weight_dir": "a bucket in the run folder",
    "straw_dir": "a queue in the run folder",
    "straw_run_id": "the run's own id",
    "straw_declaration": "a queue in the run folder",
    "resume_from": "a rehearsal starts anew",
    "rounds_more": "a rehearsal starts anew",
    "eval_data": "held-out items of the task",
    "eval_samples": "held-out items are scored greedy and sampled",
    "export.slime_args": "flags of the cluster's programs",
    "export.publish": "the cluster's bucket",
}
"""Choices that only the cluster has, and what stands in for them here."""

_SERVING_OFF: dict[str, tuple[Any, str]] = {
    "pd": (False, "prefill and decode share one engine"),
    "hicache": (False, "the engine has no host cache"),
    "eagle": ("off", "the engine does not speculate"),
    "precision": (None, "weights are FP32 here, so quantisation is not exercised"),
    "kv_dtype": (None, "KV is FP32 here"),
    "ssm_dtype": ("auto", "the built-in policies have no recurrent state"),
    "ssm_ratio": (None, "the built-in policies have no recurrent state"),
}
"""Serving choices that a CPU engine does not have: value in the laptop form, and why."""

_QUIET: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16",),
    "kv_dtype": ("auto",),
    "ssm_dtype": ("auto",),
    "eagle": ("off",),
    "eval_mode": ("off",),
    "correction": ("none",),
}
"""Values that ask for nothing, beside None, False, 0 and empty."""


_FOLLOWS = {"eagle_steps": "eagle", "prefill_gpus": "pd"}
"""Choices that a recipe fills in although what they belong to is off."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A choice that is rehearsed as it is."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Replaced:
    """A choice that is rehearsed with another value."""

    name: str
    before: Any
    after: Any
    why: str


@dataclass(frozen=True, slots=True)
class NotRehearsed:
    """A choice that this rehearsal says nothing about."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """An experiment's laptop form and the account of it."""

    experiment: Experiment
    kept: tuple[Kept, ...]
    replaced: tuple[Replaced, ...]
    not_rehearsed: tuple[NotRehearsed, ...]


IsSupported = Callable[[str, Any], bool]
HasFile = Callable[[str], bool]


def _support_all(path: str, value: Any) -> bool:
    return True


def _has_no_file(path: str) -> bool:
    return False


def laptop_form(
    experiment: Experiment,
    *,
    is_supported: IsSupported = _support_all,
    has_file: HasFile = _has_no_file,
    catalog: Catalog | None = None,
) -> Rehearsal:
    """Turn an experiment into what `hotloop run` can run here, and say what became of every choice.

    Args:
        is_supported: whether the loop carries out a value of a dotted path.
        has_file: whether a data file is on this machine.

    Raises: InputError `unknown_model`.
    """
    if experiment.laptop.policy:
        kept = tuple(Kept(name, value) for name, value in flatten(experiment.model_dump(mode="json")) if value)
        return Rehearsal(experiment, kept, (), ())
    catalog = catalog or load_catalog()
    model = find_model(catalog, experiment.model)
    resolved = resolve(experiment, catalog)
    before = dict(flatten(resolved.model_dump(mode="json")))
    edits, reasons = _choose_edits(experiment, model, has_file)
    unsupported = _find_unsupported(experiment, edits, is_supported)
    edits |= {path: value for path, (value, _) in unsupported.items()}
    form = _apply_edits(experiment, edits)
    return _account(before, form, edits, reasons, unsupported, model)


rehearse = laptop_form
"""The page's name of the same call."""


def _choose_edits(experiment: Experiment, model: Model, has_file: HasFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Return dotted path -> value of the laptop form, and why, for everything that the laptop changes."""
    edits: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def put(path: str, value: Any, why: str) -> None:
        edits[path] = value
        reasons[path] = why

    policy = "moe" if model.arch.moe else "dense"
    put("laptop.policy", policy, f"a toy policy of the {policy} family in place of {model.label}")
    for path, value in LEARNING.items():
        put(path, value, "a value that learns at this size")
    if experiment.optimizer.steps_per_round < MIN_STEPS_PER_ROUND:
        put("optimizer.steps_per_round", MIN_STEPS_PER_ROUND, "a value that learns at this size")
    if experiment.sampling.over_sampling is not None:
        share = experiment.sampling.over_sampling / experiment.sampling.num_groups
        groups = int(LEARNING["sampling.num_groups"])  # type: ignore[call-overload]  # an integer of the table
        put("sampling.over_sampling", max(groups, round(groups * share)), "the same share of a smaller round")
    if experiment.data_path is None or not has_file(experiment.data_path):
        _use_builtin_task(experiment, put)
    if experiment.layout == "external":
        put("layout", "separate", "this machine has no deployment of somebody else's")
    if experiment.layout != "colocate" and experiment.transport == "nccl":
        put("transport", "delta", "weights reach the replicas through a bucket folder of this machine")
    for path, (value, why) in _SERVING_OFF.items():
        put(path, value, why)
    put("eval_mode", "side" if experiment.schedule == "async" else "inline", "held-out accuracy before and after")
    put("eval_interval", 10, "a rehearsal is short")
    for path in ("eval_data", "external_addrs", "draft_path", "resume_from", "weight_dir", "local_weight_dir"):
        put(path, "", _HARDWARE[path])
    for path in ("nodes", "rollout_gpus", "prefill_gpus", "rounds_more", "hf_path", "train_path", "save_path"):
        put(path, None, _HARDWARE[path])
    put("optimizer.max_tokens_per_microbatch", None, "sequences are short")
    return edits, reasons


def _use_builtin_task(experiment: Experiment, put: Callable[[str, Any, str], None]) -> None:
    """Take the built-in task for data that is not here, and its own reward for rewards that only fit that data."""
    put("data_path", None, "the file is not on this machine")
    put("laptop.task", BUILTIN_TASK, "the prompts are not on this machine")
    put("data.apply_chat_template", False, "the built-in task has no chat")
    put("data.slice", "", "the built-in task has its own items")
    put("data.held_out_path", "", "the built-in task has its own held-out items")
    put("data.held_out_rows", 0, "the built-in task has its own held-out items")
    if experiment.reward.kind in ("deepscaler", "math"):
        put("reward", {"kind": "exact"}, "a reward for mathematics says nothing about the built-in task")


def _find_unsupported(
    experiment: Experiment, edits: Mapping[str, Any], is_supported: IsSupported
) -> dict[str, tuple[Any, str]]:
    """Return path -> (value of the laptop form, why) for what the loop cannot carry out even after the edits."""
    form = _apply_edits(experiment, edits)
    defaults = dict(flatten(Experiment().model_dump(mode="python")))
    found: dict[str, tuple[Any, str]] = {}
    why = "the loop does not carry this out yet"
    for path, value in flatten(form.model_dump(mode="python")):
        if is_supported(path, value):
            continue
        if path == "eval_mode" and is_supported(path, "inline"):
            found[path] = ("inline", why)
        elif path.startswith("algorithm."):
            found["algorithm"] = (
                ({"kind": "grpo"}, why)
                if path == "algorithm.kind"
                else found.get("algorithm", (_with_defaults(form, path, defaults), why))
            )
        elif path.startswith("laptop.hooks"):
            found["laptop.hooks"] = ({}, why)
        else:
            found[path] = (defaults.get(path), why)
    if "task" in found:
        found |= dict.fromkeys(("generate_hook", "reward_hook"), ("", why))
        if form.reward.kind in ("deepscaler", "math"):
            found["reward"] = ({"kind": "exact"}, why)
    return found


def _with_defaults(form: Experiment, path: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm section with one key at its default, or without it where GRPO has no such key."""
    section = form.algorithm.model_dump(mode="python")
    name = path.removeprefix("algorithm.")
    if path in defaults:
        return section | {name: defaults[path]}
    del section[name]
    return section


def _apply_edits(experiment: Experiment, edits: Mapping[str, Any]) -> Experiment:
    values: dict[str, Any] = experiment.model_dump(mode="python")
    for path, value in edits.items():
        section, dot, name = path.partition(".")
        if dot:
            values[section] = {**values[section], name: value}
        else:
            values[section] = value
    return Experiment.model_validate(values)


def _says_something(path: str, value: Any) -> bool:
    return value not in (None, False, 0, "", [], {}) and value not in _QUIET.get(path, ())


def _account(
    before: Mapping[str, Any],
    form: Experiment,
    edits: Mapping[str, Any],
    reasons: Mapping[str, str],
    unsupported: Mapping[str, tuple[Any, str]],
    model: Model,
) -> Rehearsal:
    """Put every choice that says something into exactly one list."""
    after = dict(flatten(form.model_dump(mode="json")))
    kept: list[Kept] = []
    replaced: list[Replaced] = []
    missing: list[NotRehearsed] = []
    for path, value in before.items():
        if path.startswith("laptop.") or before.get(_FOLLOWS.get(path, ""), True) in (False, "off"):
            continue
        section = path.partition(".")[0]
        if path == "model":
            replaced.append(Replaced(path, value, f"laptop.policy = {form.laptop.policy}", reasons["laptop.policy"]))
        elif path == "data_path" and after.get(path) is None:
            replaced.append(Replaced(path, value, f"laptop.task = {form.laptop.task}", reasons["data_path"]))
        elif path in unsupported or (section in unsupported and after.get(path) != value):
            if _says_something(path, value):
                missing.append(
                    NotRehearsed(path, value, unsupported.get(path, unsupported.get(section, (None, "")))[1])
                )
        elif path in _SERVING_OFF:
            if _says_something(path, value):
                missing.append(NotRehearsed(path, value, _SERVING_OFF[path][1]))
        elif path in _HARDWARE:
            if _says_something(path, value):
                missing.append(NotRehearsed(path, value, _HARDWARE[path]))
        elif after.get(path) == value:
            if _says_something(path, value):
                kept.append(Kept(path, value))
        else:
            why = reasons.get(path) or reasons.get(section) or "the laptop form"
            replaced.append(Replaced(path, value, after.get(path), why))
    if model.arch.attention != "gqa":
        missing.append(
            NotRehearsed("attention", model.arch.attention, "the built-in policies have grouped-query attention")
        )
    return Rehearsal(form, tuple(kept), tuple(replaced), tuple(missing))
