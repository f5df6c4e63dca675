"""Errors of choices that contradict each other, whatever the sizes.

Owns: colocate_async, colocate_transport, delta_colocate, r3_dense, deterministic_async, mask_partial, eagle_no_mtp,
eagle_path, external_pd, gpu_precision, not_in_target, rollout_only, sc_conflict, eval.
Source: experiment.md 3 and 4.1; algorithms.md 7 for score centering.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.experiment.rules import Facts, Say, error_rule


@error_rule("colocate_async", "layout", "schedule")
def check_colocate_async(facts: Facts) -> Iterator[Say]:
    """Async needs GPUs that sample while others train."""
    if facts.experiment.layout == "colocate" and facts.experiment.schedule == "async":
        yield Say(
            "schedule = async",
            "trainer and engines take turns on the same GPUs under colocate, so nothing can be sampled while training",
            'Set layout to "separate", or schedule to "sync".',
        )


@error_rule("colocate_transport", "layout", "transport")
def check_colocate_transport(facts: Facts) -> Iterator[Say]:
    """Colocated weights are handed over in GPU memory."""
    if facts.experiment.layout == "colocate" and facts.experiment.transport != "nccl":
        yield Say(
            f"transport = {facts.experiment.transport}",
            "colocated engines take weights in GPU memory, and no other transport is read",
            'Set transport to "nccl", or layout to "separate".',
        )


@error_rule("delta_colocate", "layout", "transport")
def check_delta_colocate(facts: Facts) -> Iterator[Say]:
    """slime stops on delta with colocate."""
    if facts.experiment.layout == "colocate" and facts.experiment.transport == "delta":
        yield Say(
            "transport = delta",
            "slime refuses delta weight updates while colocated",
            'Set layout to "separate", or transport to "nccl".',
        )


@error_rule("r3_dense", "r3", "model")
def check_r3_dense(facts: Facts) -> Iterator[Say]:
    """Routing replay needs routing."""
    if facts.experiment.r3 and not facts.model.arch.moe:
        yield Say("r3 = on", f"{facts.model.label} has no routed experts to replay", "Turn r3 off, or choose a MoE.")


@error_rule("deterministic_async", "deterministic", "schedule")
def check_deterministic_async(facts: Facts) -> Iterator[Say]:
    """The order of finished groups is not reproducible in async."""
    if facts.experiment.deterministic and facts.experiment.schedule == "async":
        yield Say(
            "deterministic = on",
            "an async schedule takes groups in the order in which they finish, which no kernel setting makes "
            "repeatable",
            'Set schedule to "sync", or turn deterministic off.',
        )


@error_rule("mask_partial", "mask_prefix", "partial")
def check_mask_partial(facts: Facts) -> Iterator[Say]:
    """A prefix exists only in partial rollouts."""
    if facts.experiment.mask_prefix and not facts.experiment.partial:
        yield Say(
            "mask_prefix = on",
            "only a partial rollout has a prefix of an older version, and partial is off",
            "Turn partial on, or mask_prefix off.",
        )


@error_rule("eagle_no_mtp", "eagle", "model")
def check_eagle_no_mtp(facts: Facts) -> Iterator[Say]:
    """The built-in draft is the model's own MTP head."""
    if facts.experiment.eagle == "builtin" and not facts.model.has_mtp:
        yield Say(
            "eagle = builtin",
            f"{facts.model.label} has no multi-token prediction head to draft with",
            'Set eagle to "off", or to "external" with a draft_path.',
        )


@error_rule("eagle_path", "draft_path", "eagle")
def check_eagle_path(facts: Facts) -> Iterator[Say]:
    """An external draft lies somewhere."""
    if facts.experiment.eagle == "external" and not facts.experiment.draft_path.strip():
        yield Say('draft_path = ""', "an external draft model needs its directory", "Set draft_path.")


@error_rule("external_pd", "layout", "pd")
def check_external_pd(facts: Facts) -> Iterator[Say]:
    """Engines that somebody else started cannot be split into groups here."""
    if facts.experiment.layout == "external" and facts.experiment.pd:
        yield Say(
            "pd = on",
            "slime does not take a group file with external engines: their roles were fixed when they were started",
            'Turn pd off, or set layout to "separate".',
        )


@error_rule("gpu_precision", "precision", "gpu", "kv_dtype")
def check_gpu_precision(facts: Facts) -> Iterator[Say]:
    """FP8 needs FP8 units."""
    if facts.gpu.has_fp8:
        return
    if facts.experiment.precision in ("fp8", "fp8train"):
        yield Say(
            f"precision = {facts.experiment.precision}",
            f"{facts.gpu.label} has no FP8 units",
            'Set precision to "bf16" or "int4", or choose another gpu.',
        )
    if facts.experiment.kv_dtype == "fp8":
        yield Say(
            "kv_dtype = fp8",
            f"{facts.gpu.label} has no FP8 units",
            'Set kv_dtype to "auto", or choose another gpu.',
            ("kv_dtype", "gpu"),
        )


@error_rule("not_in_target", "slime_target", "sc", "straw")
def check_not_in_target(facts: Facts) -> Iterator[Say]:
    """Some choices exist only in the later slime."""
    if facts.experiment.slime_target != "624b824a":
        return
    if facts.experiment.sc:
        yield Say(
            "sc = on",
            "slime 624b824a does not know the score-centering flags and drops them without a word, so the run would "
            "train another objective",
            'Set slime_target to "v0.4.0", or turn sc off.',
            ("slime_target", "sc"),
        )
    if facts.experiment.straw:
        yield Say(
            "straw = on",
            "slime 624b824a has no persistent queue: its rollout data transport takes object-store or nixl only",
            'Set slime_target to "v0.4.0", or turn straw off.',
            ("slime_target", "straw"),
        )


@error_rule("rollout_only", "model")
def check_rollout_only(facts: Facts) -> Iterator[Say]:
    """A model without a slime script can be served, not trained."""
    if facts.model.rollout_only:
        yield Say(
            f"model = {facts.model.id}",
            f"slime has no model script for {facts.model.label}: it can be deployed and rehearsed, not exported for "
            "training; the parallel sizes shown are proposed",
            "Choose a model with a recipe (hotloop catalog).",
        )


@error_rule("sc_conflict", "sc", "algorithm", "sampling")
def check_sc_conflict(facts: Facts) -> Iterator[Say]:
    """Score centering needs the sampler's plain distribution and its own loss."""
    if not facts.experiment.sc:
        return
    algorithm, sampling = facts.experiment.algorithm, facts.experiment.sampling
    if algorithm.kind in ("gspo", "cispo"):
        yield Say(
            f"algorithm.kind = {algorithm.kind}",
            "score centering replaces the policy loss, and this kind is another policy loss",
            'Set algorithm.kind to "grpo", or turn sc off.',
            ("sc", "algorithm"),
        )
    if sampling.top_k != -1:
        yield Say(
            f"sampling.top_k = {sampling.top_k}",
            "score centering sums over the whole vocabulary that the sampler drew from",
            "Set top_k to -1, or turn sc off.",
            ("sc", "sampling.top_k"),
        )
    if sampling.temperature == 0:
        yield Say(
            "sampling.temperature = 0",
            "a greedy sampler has no distribution to centre",
            "Set temperature to 1, or turn sc off.",
            ("sc", "sampling.temperature"),
        )


@error_rule("eval", "eval_mode", "schedule", "eval_data")
def check_eval(facts: Facts) -> Iterator[Say]:
    """Inline evaluation stops the loop, which an async schedule does not do (E10, X05)."""
    experiment = facts.experiment
    if experiment.eval_mode == "inline" and experiment.schedule == "async":
        yield Say(
            "eval_mode = inline",
            "an async run has no moment at which one version serves alone, and slime raises when it is asked to "
            "evaluate",
            'Set eval_mode to "side": a second job measures a pinned version while training goes on.',
            ("eval_mode", "schedule"),
        )
    if experiment.eval_mode != "off" and not experiment.eval_data.strip():
        yield Say(
            'eval_data = ""',
            "a custom task has no held-out file of its own",
            'Set eval_data to a JSONL file, or eval_mode to "off".',
            ("eval_data", "eval_mode"),
        )
