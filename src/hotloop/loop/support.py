"""Which choices of an experiment this loop carries out, and how it refuses the rest.

Owns: `SUPPORT`, one entry for every key of the schema (a test walks them), `check_support`, and the rules across fields
that a run, unlike an export, cannot do without.

Promises: a choice is carried out, or belongs to the cluster alone (hardware, paths and memory that have no laptop
counterpart and no effect on the algorithm), or is the error `not_yet_supported`. None is ignored.
Does not do: the planner's checks of a cluster experiment (experiment/checks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hotloop.errors import InputError, Problem
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.loop.hooks import check_hooks


@dataclass(frozen=True, slots=True)
class Support:
    """How the loop treats one key."""

    role: Literal["honoured", "cluster"] = "honoured"
    allowed: tuple[Any, ...] | None = None
    """Values the loop can carry out; None: all that the schema allows."""
    do: str = ""
    """What to do about a value that is not allowed."""


HONOURED = Support()
CLUSTER = Support("cluster")


def _only(*values: Any, do: str = "") -> Support:
    return Support("honoured", values, do)


SUPPORT: Mapping[str, Support] = {
    "slime_target": CLUSTER,
    "model": CLUSTER,
    "task": _only("math", do="Set data_path and reward.kind = python, or a built-in laptop.task."),
    "generate_hook": _only("", do="Leave it empty."),
    "reward_hook": _only("", do="Use reward.kind = python."),
    "layout": HONOURED,
    "external_addrs": CLUSTER,
    "schedule": _only("sync", do="Set schedule to sync."),
    "nodes": CLUSTER,
    "rollout_gpus": CLUSTER,
    "precision": Support("cluster", (None, "bf16"), "Leave it empty; laptop.dtype is the laptop's precision."),
    "kv_dtype": Support("cluster", (None, "auto"), "Leave it empty."),
    "ssm_dtype": Support("cluster", ("auto",), "Leave it at auto."),
    "ssm_ratio": CLUSTER,
    "correction": HONOURED,
    "r3": HONOURED,
    "sc": _only(False, do="Turn sc off."),
    "deterministic": HONOURED,
    "pd": _only(False, do="Turn pd off."),
    "prefill_gpus": CLUSTER,
    "rdma_device": CLUSTER,
    "hicache": _only(False, do="Turn hicache off."),
    "eagle": _only("off", do="Set eagle to off."),
    "eagle_steps": CLUSTER,
    "draft_path": CLUSTER,
    "transport": HONOURED,
    "weight_dir": CLUSTER,
    "local_weight_dir": CLUSTER,
    "straw": _only(False, do="Turn straw off."),
    "straw_dir": CLUSTER,
    "straw_run_id": CLUSTER,
    "straw_declaration": CLUSTER,
    "partial": _only(False, do="Turn partial off."),
    "mask_prefix": _only(False, do="Turn mask_prefix off."),
    "cpu_adam": CLUSTER,
    "recompute": CLUSTER,
    "concurrency": CLUSTER,
    "response_tokens": HONOURED,
    "rounds": HONOURED,
    "hf_path": CLUSTER,
    "train_path": CLUSTER,
    "data_path": HONOURED,
    "save_path": CLUSTER,
    "megatron_path": CLUSTER,
    "image": CLUSTER,
    "gpu": CLUSTER,
    "max_staleness": HONOURED,
    "eval_mode": _only("off", "inline", do="Set eval_mode to inline."),
    "eval_data": _only("", do="Name the held-out file in data.held_out_path."),
    "eval_interval": HONOURED,
    "eval_samples": HONOURED,
    "resume_from": _only("", do="Continue a run with hotloop run --resume DIR."),
    "rounds_more": _only(None, do="Raise rounds with --set and continue with hotloop run --resume DIR."),
    "sampling.num_groups": HONOURED,
    "sampling.group_size": HONOURED,
    "sampling.over_sampling": HONOURED,
    "sampling.temperature": HONOURED,
    "sampling.top_p": HONOURED,
    "sampling.top_k": HONOURED,
    "sampling.stop": HONOURED,
    "sampling.drop_zero_std": HONOURED,
    "algorithm.kind": _only("grpo", "gspo", "cispo", do="Set algorithm.kind to grpo, gspo or cispo."),
    "algorithm.eps_clip": HONOURED,
    "algorithm.eps_clip_high": HONOURED,
    "algorithm.dual_clip": HONOURED,
    "algorithm.kl_coef": _only(0.0, do="Put the KL term into the loss with algorithm.kl_loss_coef."),
    "algorithm.kl_loss_coef": HONOURED,
    "algorithm.kl_loss_type": HONOURED,
    "algorithm.entropy_coef": HONOURED,
    "algorithm.normalize_std": HONOURED,
    "algorithm.aggregation": HONOURED,
    "algorithm.normalize_advantages": _only(do="Set algorithm.kind to grpo, gspo or cispo."),
    "algorithm.gamma": _only(do="Set algorithm.kind to grpo, gspo or cispo."),
    "optimizer.lr": HONOURED,
    "optimizer.lr_decay_style": HONOURED,
    "optimizer.lr_min_frac": HONOURED,
    "optimizer.lr_warmup_steps": HONOURED,
    "optimizer.weight_decay": HONOURED,
    "optimizer.beta1": HONOURED,
    "optimizer.beta2": HONOURED,
    "optimizer.eps": HONOURED,
    "optimizer.clip_grad": HONOURED,
    "optimizer.steps_per_round": HONOURED,
    "optimizer.max_tokens_per_microbatch": HONOURED,
    "data.prompt_key": HONOURED,
    "data.label_key": HONOURED,
    "data.apply_chat_template": HONOURED,
    "data.shuffle": HONOURED,
    "data.slice": HONOURED,
    "data.held_out_path": HONOURED,
    "data.held_out_rows": HONOURED,
    "reward.kind": HONOURED,
    "reward.pattern": HONOURED,
    "reward.function": HONOURED,
    "reward.url": HONOURED,
    "export.slime_args": CLUSTER,
    "export.publish": CLUSTER,
    "laptop.policy": HONOURED,
    "laptop.task": HONOURED,
    "laptop.seed": HONOURED,
    "laptop.threads": HONOURED,
    "laptop.device": HONOURED,
    "laptop.dtype": HONOURED,
    "laptop.warmup_accuracy": HONOURED,
    "laptop.warmup_max_steps": HONOURED,
    "laptop.max_slots": HONOURED,
    "laptop.exact_savings": HONOURED,
    "laptop.checkpoint_interval": HONOURED,
    "laptop.keep_checkpoints": HONOURED,
    "laptop.eval_rows": HONOURED,
    "laptop.publish": HONOURED,
    "laptop.publish_full_every": HONOURED,
    "laptop.service_url": HONOURED,
    "laptop.replicas": HONOURED,
    "laptop.hooks": _only({}, do="Remove the hooks, or use reward.kind = python for a reward."),
}


def find_support(path: str) -> Support:
    """Return the entry of a leaf; the names inside `laptop.hooks` belong to it."""
    return SUPPORT["laptop.hooks"] if path.startswith("laptop.hooks") else SUPPORT[path]


def is_supported(path: str, value: Any) -> bool:
    """Tell whether the loop carries out a value of a leaf."""
    allowed = find_support(path).allowed
    return allowed is None or value in allowed


def check_support(experiment: Experiment) -> None:
    """Refuse what the loop cannot carry out.

    Raises:
        InputError: every `not_yet_supported`, and every rule of a run that is broken, together.
    """
    problems = [
        Problem("not_yet_supported", "hotloop run does not carry this out yet", f"{path} = {value!r}", support.do)
        for path, value in flatten(experiment.model_dump(mode="python"))
        for support in [find_support(path)]
        if not is_supported(path, value) and not path.startswith("laptop.hooks")
    ]
    problems += check_hooks(experiment.laptop.hooks)
    problems += _check_rules(experiment)
    if problems:
        raise InputError.of(problems)


def _check_rules(experiment: Experiment) -> list[Problem]:
    sampling, laptop, data = experiment.sampling, experiment.laptop, experiment.data
    problems: list[Problem] = []
    if not laptop.policy:
        do = "Set laptop.policy to dense, moe or a Hugging Face directory."
        problems.append(Problem("no_policy", "there is nothing to train", "laptop.policy = ''", do))
    problems += _check_layout(experiment)
    if sampling.group_size < 2:
        kind = experiment.algorithm.kind
        why = f'must be at least 2 for "{kind}", because an advantage is the reward minus the group\'s mean'
        problems.append(Problem("group_size", why, f"sampling.group_size = {sampling.group_size}", "Set it to 8."))
    largest = max(sampling.group_size, experiment.eval_samples if experiment.eval_mode == "inline" else 1)
    if largest > laptop.max_slots:
        why = f"the engine decodes a whole group of {largest} at a time"
        where = f"laptop.max_slots = {laptop.max_slots}"
        problems.append(Problem("max_slots", why, where, f"Set it to {largest} or more."))
    if sampling.top_k == 0:
        do = "Set it to -1 for all tokens, or to 1 or more."
        problems.append(Problem("out_of_range", "no token could be drawn", "sampling.top_k = 0", do))
    if "" in sampling.stop:
        do = "Remove the empty text."
        problems.append(
            Problem("out_of_range", "an empty stop text ends nothing", f"sampling.stop = {sampling.stop!r}", do)
        )
    steps, rollouts = experiment.optimizer.steps_per_round, sampling.num_groups * sampling.group_size
    if steps > rollouts:
        why = (
            f"a round of {sampling.num_groups} x {sampling.group_size} rollouts has too few for so many optimizer steps"
        )
        do = f"Set it to {rollouts} or less, or raise sampling.num_groups."
        problems.append(Problem("empty_step", why, f"optimizer.steps_per_round = {steps}", do))
    if sampling.temperature == 0:
        why = "must be above 0, because greedy rollouts of one prompt are all equal"
        problems.append(Problem("temperature_zero", why, "sampling.temperature = 0", "Set it to 1."))
    if sampling.over_sampling is not None and sampling.over_sampling < sampling.num_groups:
        why = f"must be at least num_groups = {sampling.num_groups}"
        problems.append(Problem("over_sampling", why, f"sampling.over_sampling = {sampling.over_sampling}"))
    if not laptop.task and not experiment.data_path:
        do = "Set data_path to a JSONL file, or laptop.task to sort5, addition or countdown."
        problems.append(Problem("no_prompts", "the experiment names no prompts", "data_path, laptop.task", do))
    if laptop.task and experiment.data_path:
        why = "two sources of prompts are named"
        where = f"laptop.task = {laptop.task!r}, data_path = {experiment.data_path!r}"
        problems.append(Problem("two_prompt_sources", why, where, "Leave one of them empty."))
    has_held_out = laptop.task or data.held_out_path or data.held_out_rows
    if experiment.eval_mode == "inline" and not has_held_out:
        do = "Set data.held_out_path or data.held_out_rows, or eval_mode to off."
        problems.append(Problem("no_held_out", "evaluation needs held-out items", "eval_mode = 'inline'", do))
    if experiment.r3 and laptop.policy == "dense":
        problems.append(Problem("r3_dense", "a dense policy has no expert routes", "r3 = True", "Turn r3 off."))
    return problems


def _check_layout(experiment: Experiment) -> list[Problem]:
    """What the layouts of a run need, and settings that the chosen one would not read."""
    layout, laptop, problems = experiment.layout, experiment.laptop, []
    if layout == "colocate" and experiment.transport != "nccl":
        why = "trainer and engine share one process, so weights are copied in memory"
        do = "Set transport to nccl, or layout to separate."
        problems.append(Problem("colocate_transport", why, f"transport = {experiment.transport!r}", do))
    if layout == "external" and not laptop.service_url:
        do = "Set laptop.service_url to the deployment's address."
        problems.append(Problem("external_address", "no deployment is named", "laptop.service_url = ''", do))
    if layout == "external" and not laptop.publish:
        do = "Set laptop.publish to the bucket that the deployment reads."
        problems.append(Problem("external_address", "no shared bucket is named", "laptop.publish = ''", do))
    if layout != "external" and laptop.service_url:
        do = "Set layout to external, or leave it empty."
        problems.append(Problem("setting_unused", f"layout {layout} asks no deployment", "laptop.service_url", do))
    if layout != "separate" and laptop.replicas != 1:
        do = "Set layout to separate, or leave it at 1."
        problems.append(Problem("setting_unused", f"layout {layout} starts no replicas", "laptop.replicas", do))
    return problems
