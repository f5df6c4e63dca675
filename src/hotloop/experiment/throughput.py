"""How fast a round is predicted to be: prefill, decode, speculation, disaggregation, host cache, training, weight sync.

Owns: `Timings` and `compute_timings`, and `list_estimates`, which puts every figure beside its formula and assumptions.

Promises: pure; every figure is marked as an estimate; a rate that the vendor does not publish is left out and named.
Does not do: what follows for the age of samples (staleness.py).

Source: algorithms.md 9 and 12; EAGLE's expected tokens: Leviathan et al. 2023, arXiv:2211.17192, equation 1. The
efficiencies and link speeds below are our decision.
"""

from __future__ import annotations

from typing import NamedTuple

from hotloop.experiment.catalog.records import Arch, Gpu, Model, Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import Layout
from hotloop.experiment.memory import PROMPT_TOKENS, count_microbatches
from hotloop.experiment.records import MemoryPlan
from hotloop.experiment.resolve import read_slime_arg
from hotloop.experiment.serving_memory import (
    WEIGHT_BITS,
    compute_kv_bytes_per_token,
    compute_state_bytes,
)

PREFILL_MFU = 0.5
TRAIN_MFU = 0.35
NETWORK_BYTES_PER_S = 50e9
"""One 400 Gbit/s card for each node."""
DISK_BYTES_PER_S = 2e9
"""A shared file system, all clients together."""
HOST_LINK_BYTES_PER_S = 25e9
SYNC_OVERHEAD_S = 2.0
"""Pause, flush and restart of the engines (t_0)."""
COLOCATED_PASSES = 4
"""Times that colocated weights cross GPU memory: read and written by the gather, and again by the copy."""
CACHE_BOOKKEEPING_S = 0.001
ACCEPTANCE = 0.8
"""Assumed share of accepted draft tokens."""
DELTA_DENSITY = 0.1
"""Assumed size of a delta as a share of the full weights."""
EAGLE_RUNNING_LIMIT = 48
"""SGLang's limit of running requests under speculation unless one is given."""


class Timings(NamedTuple):
    """Predicted times of one round, in seconds, and the rates behind them."""

    batch_per_engine: int
    prefill_s: float
    """One prompt."""
    decode_step_s: float
    tokens_per_step: float
    """1, or what speculation is expected to commit in one verify step."""
    response_latency_s: float
    rollout_s: float
    """t_R: all rollouts of a round."""
    train_s: float
    """t_T."""
    sync_s: float
    """t_W."""
    round_s: float
    engine_tokens_per_s: float
    pool_tokens_per_s: float
    prefill_rate: float
    """Prompts per second of the prefill side (all engines without PD)."""
    decode_rate: float
    """Responses per second of the decode side."""
    transfer_rate: float
    """Prompts per second whose KV fits through the network; 0 without PD."""
    speculation_speedup: float
    has_rates: bool
    """Whether the GPU's FLOP/s are known."""


def compute_accepted_tokens(acceptance: float, steps: int) -> float:
    """Expected tokens per verify step of a chain of draft tokens.

    Formula: (1 - a^(k+1)) / (1 - a); k + 1 when every draft is accepted.
    """
    if acceptance >= 1:
        return steps + 1.0
    return float((1 - acceptance ** (steps + 1)) / (1 - acceptance))


def count_experts_touched(experts: int, per_token: int, batch: int) -> float:
    """Expected number of distinct experts that a batch uses: E (1 - (1 - k/E)^batch)."""
    return float(experts * (1 - (1 - per_token / experts) ** batch)) if experts else 0.0


def compute_attention_flops(arch: Arch, tokens: int) -> float:
    """Forward FLOPs of attention over one sequence: 2 L n^2 d_q (causal: both products, half of the pairs)."""
    head = arch.qk_nope_head_dim + arch.qk_rope_head_dim if arch.is_mla else arch.head_dim
    layers = arch.kv_layers if arch.is_hybrid else arch.layers
    return 2.0 * layers * tokens**2 * arch.attention_heads * head


def compute_forward_flops(arch: Arch, tokens: int) -> float:
    """Forward FLOPs of one sequence: 2 P_active n + attention."""
    return 2.0 * arch.params_active * tokens + compute_attention_flops(arch, tokens)


def compute_bubble_frac(pp: int, microbatches: int) -> float:
    """Share of a pipeline step that a stage idles: (p - 1) / (m + p - 1)."""
    return (pp - 1) / (microbatches + pp - 1)


def count_group_slots(concurrency: int, engines: int, group_size: int) -> int:
    """Groups whose rollouts can all be in flight: floor(C E / G)."""
    return concurrency * engines // group_size


def _weight_bytes_read(arch: Arch, precision: str | None, batch: int) -> float:
    """Weights that one decode step of an engine reads: everything dense, and the experts touched."""
    bits = WEIGHT_BITS[precision or "bf16"]
    touched = count_experts_touched(arch.experts, arch.experts_per_token, batch)
    experts = arch.params_expert * touched / arch.experts if arch.experts else 0.0
    return (arch.params_total - arch.params_expert + experts) * bits / 8


def count_running_limit(experiment: Experiment) -> int:
    """Requests that one engine runs at a time: its concurrency, and SGLang's limit under speculation."""
    limit = experiment.concurrency
    text = read_slime_arg(experiment, "--sglang-max-running-requests")
    if text is not None and text.isdecimal():
        return max(1, min(limit, int(text)))
    return min(limit, EAGLE_RUNNING_LIMIT) if experiment.eagle != "off" else limit


def _choose_batch(experiment: Experiment, layout: Layout, memory: MemoryPlan, decode_engines: int) -> int:
    limit = min(count_running_limit(experiment), max(1, memory.requests_capacity))
    if experiment.schedule == "async":
        return max(1, limit)
    groups = experiment.sampling.over_sampling or experiment.sampling.num_groups
    share = -(-groups * experiment.sampling.group_size // max(1, decode_engines))
    return max(1, min(limit, share))


def _compute_train_s(experiment: Experiment, model: Model, recipe: Recipe, gpu: Gpu, layout: Layout) -> float:
    if not gpu.bf16_dense_flops:
        return 0.0
    rollouts = experiment.sampling.num_groups * experiment.sampling.group_size
    forward = compute_forward_flops(model.arch, PROMPT_TOKENS + experiment.response_tokens) * rollouts
    passes = 4 + (1 if experiment.recompute else 0)
    microbatches = count_microbatches(experiment, recipe, max(1, layout.dp))
    work = passes * forward / (layout.train_gpus * gpu.bf16_dense_flops * TRAIN_MFU)
    return work / (1 - compute_bubble_frac(recipe.pp, microbatches))


def _compute_sync_s(experiment: Experiment, model: Model, gpu: Gpu, layout: Layout) -> float:
    size = 2.0 * model.arch.params_total
    if experiment.transport == "delta":
        return size * DELTA_DENSITY / DISK_BYTES_PER_S + SYNC_OVERHEAD_S
    if experiment.transport == "disk":
        return 2 * size / DISK_BYTES_PER_S + SYNC_OVERHEAD_S
    if experiment.layout == "colocate":
        return COLOCATED_PASSES * size / (gpu.hbm_bytes_per_s * layout.train_gpus) + SYNC_OVERHEAD_S
    return size / NETWORK_BYTES_PER_S + SYNC_OVERHEAD_S


def compute_timings(
    experiment: Experiment, model: Model, recipe: Recipe, gpu: Gpu, layout: Layout, memory: MemoryPlan
) -> Timings:
    """Predict the times of a round.

    Args: experiment: resolved.
    """
    arch = model.arch
    prefill_engines = sum(g.num_engines for g in layout.groups if g.role != "decode")
    decode_engines = max(1, sum(g.num_engines for g in layout.groups if g.role != "prefill"))
    batch = _choose_batch(experiment, layout, memory, decode_engines)
    is_fp8 = experiment.precision in ("fp8", "fp8train") and gpu.fp8_dense_flops > 0
    flops = (gpu.fp8_dense_flops if is_fp8 else gpu.bf16_dense_flops) * recipe.engine_gpus
    prefill_s = compute_forward_flops(arch, PROMPT_TOKENS) / (flops * PREFILL_MFU) if flops else 0.0
    context = PROMPT_TOKENS + experiment.response_tokens // 2
    cache = context * compute_kv_bytes_per_token(arch, experiment.kv_dtype)
    cache += compute_state_bytes(arch, experiment.ssm_dtype)
    read = _weight_bytes_read(arch, experiment.precision, batch) + batch * cache
    compute_s = 2.0 * arch.params_active * batch / flops if flops else 0.0
    step_s = max(read / (gpu.hbm_bytes_per_s * recipe.engine_gpus), compute_s)
    accepted, speedup = 1.0, 1.0
    if experiment.eagle != "off":
        steps = experiment.eagle_steps or model.default_eagle_steps
        accepted = compute_accepted_tokens(ACCEPTANCE, steps)
        speedup = accepted / (1 + steps / arch.layers)
    latency = prefill_s + experiment.response_tokens * step_s / speedup
    rollouts = experiment.sampling.num_groups * experiment.sampling.group_size
    decode_rate = decode_engines * batch / (experiment.response_tokens * step_s / speedup)
    prefill_rate = max(1, prefill_engines) / prefill_s if prefill_s else 0.0
    transfer = 0.0
    rate = decode_engines * batch / latency
    if experiment.pd:
        nodes = max(1, layout.rollout_gpus // layout.gpus_per_node)
        transfer = nodes * NETWORK_BYTES_PER_S / (PROMPT_TOKENS * compute_kv_bytes_per_token(arch, experiment.kv_dtype))
        rate = min(decode_rate, transfer, prefill_rate or decode_rate)
    if experiment.schedule == "async":
        rollout_s = rollouts / rate
    else:
        waves = -(-rollouts // (decode_engines * batch))
        rollout_s = max(waves * latency, rollouts / rate if experiment.pd else 0.0)
    train_s = _compute_train_s(experiment, model, recipe, gpu, layout)
    sync_s = _compute_sync_s(experiment, model, gpu, layout)
    is_async = experiment.schedule == "async"
    round_s = max(rollout_s, train_s) + sync_s if is_async else rollout_s + train_s + sync_s
    return Timings(
        batch_per_engine=batch,
        prefill_s=prefill_s,
        decode_step_s=step_s,
        tokens_per_step=accepted,
        response_latency_s=latency,
        rollout_s=rollout_s,
        train_s=train_s,
        sync_s=sync_s,
        round_s=round_s,
        engine_tokens_per_s=batch / step_s * speedup,
        pool_tokens_per_s=batch / step_s * speedup * decode_engines,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        transfer_rate=transfer,
        speculation_speedup=speedup,
        has_rates=flops > 0,
    )
