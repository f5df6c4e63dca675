"""Every predicted figure of a plan, each beside its formula and what it assumes.

Owns: `list_estimates`. The figures come from throughput.py and staleness.py; this file says how they are to be read.

Promises: pure; nothing here is a measurement, and each record says so. Does not do: arithmetic beyond ratios.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.experiment import throughput as cost
from hotloop.experiment.memory import HICACHE_RATIO, PROMPT_TOKENS, count_microbatches
from hotloop.experiment.records import Estimate
from hotloop.experiment.rules import Facts
from hotloop.experiment.serving_memory import compute_kv_bytes_per_token


def _common(facts: Facts) -> tuple[str, ...]:
    lines = [
        f"prompts of {PROMPT_TOKENS} tokens and responses of {facts.experiment.response_tokens}, all of full length",
        f"peak rates of {facts.gpu.id} as its vendor prints them",
    ]
    if not facts.timings.has_rates:
        lines.append("the GPU's FLOP/s are not published: compute time is left out")
    return tuple(lines)


def _list_serving(facts: Facts) -> Iterator[Estimate]:
    timings, common = facts.timings, _common(facts)
    engine = facts.layout.engine_gpus
    yield Estimate(
        "prefill_s",
        timings.prefill_s,
        "s per prompt",
        "(2 P_active n + 2 L n^2 d_q) / (GPUs x FLOP/s x MFU)",
        (*common, f"an MFU of {cost.PREFILL_MFU:g}", "nothing of the prompt is cached"),
    )
    yield Estimate(
        "decode_step_s",
        timings.decode_step_s,
        "s per step",
        "max((weights read + batch x (context x KV + state)) / bandwidth, 2 P_active batch / FLOP/s)",
        (*common, f"a batch of {timings.batch_per_engine} on an engine of {engine} GPUs", "no time for communication"),
    )
    yield Estimate(
        "decode_tokens_per_s", timings.engine_tokens_per_s, "tokens/s per engine", "batch / step x speed-up", common
    )
    yield Estimate(
        "pool_tokens_per_s", timings.pool_tokens_per_s, "tokens/s", "decode engines x tokens/s per engine", common
    )
    yield Estimate(
        "response_latency_s",
        timings.response_latency_s,
        "s",
        "prefill + response tokens x step / speed-up",
        (*common, "no time in a queue"),
    )
    if facts.experiment.eagle != "off":
        steps = facts.experiment.eagle_steps
        accept = f"each draft token is accepted with probability {cost.ACCEPTANCE:g}"
        yield Estimate(
            "eagle_tokens_per_verify",
            timings.tokens_per_step,
            "tokens",
            "(1 - a^(k+1)) / (1 - a)",
            (accept, f"k = {steps}"),
        )
        yield Estimate(
            "eagle_speedup",
            timings.speculation_speedup,
            "x",
            "tokens per verify / (1 + k c)",
            (accept, f"a draft step costs one layer of {facts.model.arch.layers}"),
        )
    if facts.experiment.pd:
        network = f"{cost.NETWORK_BYTES_PER_S / 1e9:g} GB/s of network for each node"
        yield Estimate(
            "pd_requests_per_s",
            min(timings.decode_rate, timings.transfer_rate, timings.prefill_rate or timings.decode_rate),
            "requests/s",
            "min(prefill engines x rate, decode engines x rate, network / KV of a prompt)",
            (*common, network),
        )
    if facts.experiment.hicache:
        size = PROMPT_TOKENS * compute_kv_bytes_per_token(facts.model.arch, facts.experiment.kv_dtype)
        io = size / (cost.HOST_LINK_BYTES_PER_S * engine)
        yield Estimate(
            "hicache_gain_s",
            timings.prefill_s - io - cost.CACHE_BOOKKEEPING_S,
            "s per hit",
            "hit share x prefill - transfer - bookkeeping",
            (
                *common,
                "a hit covers the whole prompt",
                f"{cost.HOST_LINK_BYTES_PER_S / 1e9:g} GB/s from host to each GPU",
                f"a host cache of {HICACHE_RATIO} x the device pool",
            ),
        )
    if facts.model.arch.is_hybrid:
        yield Estimate(
            "balanced_ssm_ratio",
            facts.memory.balanced_state_ratio,
            "state : KV",
            "(S + D) x state / KV per token / context",
            (*common, "S = 5 states per request (extra_buffer)"),
        )


def _list_round(facts: Facts) -> Iterator[Estimate]:
    timings, common, experiment = facts.timings, _common(facts), facts.experiment
    microbatches = count_microbatches(experiment, facts.recipe, max(1, facts.layout.dp))
    yield Estimate(
        "rollout_s",
        timings.rollout_s,
        "s per round",
        "waves x latency; async: rollouts / rate",
        (*common, "no stragglers"),
    )
    yield Estimate(
        "train_s",
        timings.train_s,
        "s per round",
        "(3 + 1 + recompute) x forward FLOPs / (GPUs x FLOP/s x MFU) / (1 - bubble)",
        (
            *common,
            f"an MFU of {cost.TRAIN_MFU:g}",
            "one pass for old logprobs",
            f"{microbatches} microbatches per rank",
        ),
    )
    yield Estimate(
        "pipeline_bubble_frac",
        cost.compute_bubble_frac(facts.recipe.pp, microbatches),
        "share",
        "(p - 1) / (m + p - 1)",
        (f"p = {facts.recipe.pp}, m = {microbatches}",),
    )
    yield Estimate(
        "sync_s",
        timings.sync_s,
        "s per round",
        "bytes / bandwidth + t_0",
        (
            f"t_0 = {cost.SYNC_OVERHEAD_S:g} s",
            f"network {cost.NETWORK_BYTES_PER_S / 1e9:g} GB/s, shared disk {cost.DISK_BYTES_PER_S / 1e9:g} GB/s",
            f"a delta has {cost.DELTA_DENSITY:.0%} of the weights' bytes",
        ),
    )
    formula = "max(t_R, t_T) + t_W" if experiment.schedule == "async" else "t_R + t_T + t_W"
    yield Estimate("round_s", timings.round_s, "s", formula, common)
    engines = max(1, facts.layout.num_engines)
    yield Estimate(
        "group_slots",
        float(cost.count_group_slots(experiment.concurrency, engines, experiment.sampling.group_size)),
        "groups",
        "floor(C E / G)",
        (f"C = {experiment.concurrency}, E = {engines}, G = {experiment.sampling.group_size}",),
    )
    yield Estimate(
        "requests_in_flight",
        timings.pool_tokens_per_s / experiment.response_tokens * timings.response_latency_s,
        "requests",
        "rate x latency",
        common,
    )
    yield Estimate(
        "staleness_versions",
        float(facts.staleness.predicted),
        "versions",
        "ceil(latency / round time) + queued rounds",
        (*common, "finished groups pile up to concurrency x engines when the trainer is slower"),
    )
    yield Estimate(
        "mixed_version_frac",
        facts.staleness.mixed_version_frac,
        "share of responses",
        "min(1, latency / round time); partial: surplus groups / submitted groups",
        (*common, "responses start evenly over a round"),
    )


def list_estimates(facts: Facts) -> tuple[Estimate, ...]:
    """List every estimate of an experiment."""
    return (*_list_serving(facts), *_list_round(facts))
