"""What one GPU of an engine holds: weights, KV cache, recurrent state, and how many responses fit.

Owns: `ServingMemory`, `compute_serving_memory`, and the per-token and per-request sizes behind it.

Promises: pure; exact for weights, KV and state, from the shapes; the pool is what the static fraction leaves. Does not
do: host memory or the trainer (memory.py).

Source: algorithms.md 11.
"""

from __future__ import annotations

from typing import NamedTuple

from hotloop.experiment.backends import MEGATRON, Backend
from hotloop.experiment.catalog.records import Arch, Gpu, Model, Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.parameters import count_engine_params, count_layer_params
from hotloop.units import GIB

RESERVE_BYTES = 3 * GIB
"""Kept back inside the static fraction for graphs and workspaces (our decision)."""
DEFAULT_STATE_RATIO = 0.9
"""SGLang's share of recurrent state to KV cache."""
STATE_COPIES = 5
"""States that a request holds under the extra_buffer strategy, the one that the export writes."""
CONV_BYTES = 2
FP8_BLOCK = 128
"""Side of the block that shares one FP32 scale."""
INT4_GROUP = 128
"""Values that share one 16-bit scale; 32 for Kimi-K2-Thinking."""

_FP8_BITS = 8 + 32 / FP8_BLOCK**2
WEIGHT_BITS = {"bf16": 16.0, "fp8": _FP8_BITS, "fp8train": _FP8_BITS, "int4": 4 + 16 / INT4_GROUP}
"""Bits of a served weight with its share of the scale."""


class ServingMemory(NamedTuple):
    """Memory of one engine GPU and what the engine can hold with it."""

    items: tuple[tuple[str, int, str], ...]
    """(item, bytes, formula) of one GPU."""
    weight_bytes: int
    kv_pool_bytes: int
    state_pool_bytes: int
    kv_bytes_per_token: int
    """On one GPU, for a token that this GPU keeps."""
    state_bytes_per_request: int
    """On one GPU, one copy."""
    tokens_per_engine: int
    requests_per_engine: int
    """Whole sequences of the longest length."""
    balanced_state_ratio: float
    """Ratio at which state and KV run out together; 0 for a model without recurrent layers."""
    assumptions: tuple[str, ...]


def compute_kv_bytes_per_token(arch: Arch, kv_dtype: str | None = "auto", value_bytes: int = 2) -> int:
    """Bytes of KV that a whole copy of the model keeps for one token, before TP; an FP8 cache has 1 a value."""
    size = 1 if kv_dtype == "fp8" else value_bytes
    return arch.kv_values_per_token_per_layer * arch.kv_layers * size


def compute_kv_bytes_on_gpu(
    arch: Arch, tp: int, dp: int = 1, kv_dtype: str | None = "auto", value_bytes: int = 2
) -> int:
    """Bytes of KV that one engine GPU keeps for a token of its own rank.

    Formula: GQA / min(TP / d, KV heads) with DP attention d; MLA whole on each rank.
    """
    whole = compute_kv_bytes_per_token(arch, kv_dtype, value_bytes)
    if arch.is_mla:
        return whole
    return -(-whole // min(max(1, tp // dp), max(1, arch.kv_heads)))


def compute_mean_kv_bytes_on_gpu(arch: Arch, tp: int, dp: int = 1, kv_dtype: str | None = "auto") -> float:
    """Bytes of KV per GPU and token of the engine, averaged over its GPUs: DP attention spreads tokens over d ranks."""
    return compute_kv_bytes_on_gpu(arch, tp, dp, kv_dtype) / dp


def compute_state_bytes(arch: Arch, ssm_dtype: str, tp: int = 1) -> int:
    """Bytes of one request's recurrent state and convolution window on one GPU; 0 without recurrent layers."""
    size = 2 if ssm_dtype == "bfloat16" else 4
    if arch.gdn_value_heads:
        state = arch.gdn_value_heads * arch.gdn_key_dim * arch.gdn_value_dim * size
        conv = (arch.gdn_conv_kernel - 1) * arch.gdn_conv_channels * CONV_BYTES
    elif arch.linear_heads:
        width = arch.linear_heads * arch.linear_head_dim
        state = width * arch.linear_head_dim * size
        conv = (arch.linear_conv_kernel - 1) * 3 * width * CONV_BYTES
    else:
        return 0
    return -(-arch.linear_layers * (state + conv) // tp)


def compute_engine_weight_bytes(
    arch: Arch, recipe: Recipe, precision: str | None, backend: Backend = MEGATRON
) -> tuple[int, str]:
    """Bytes of the weights on one engine GPU, and the formula."""
    params = count_engine_params(arch, recipe, with_norms=backend.counts_norms)
    if (precision or "bf16") == "bf16":
        total = params.quantised + params.kept
        return backend.serving_value_bytes * total, f"{backend.serving_value_bytes} x {total:,} parameters"
    bits = WEIGHT_BITS[precision or "bf16"]
    size = int(-(-params.quantised * bits // 8)) + 2 * params.kept
    return size, f"{bits / 8:.5g} x {params.quantised:,} + 2 x {params.kept:,} kept in BF16"


def _count_draft_params(arch: Arch, recipe: Recipe) -> int:
    """Parameters of the built-in draft head on one GPU: one layer and its 2h x h input projection."""
    part = count_layer_params(arch)
    attention_tp = max(1, recipe.engine_gpus // recipe.engine_dp)
    ffn = part.experts + part.shared_expert + part.router if arch.moe else part.dense_ffn
    return -(-part.attention // attention_tp) + -(-ffn // recipe.engine_gpus) + 2 * arch.hidden_size**2


def compute_serving_memory(
    experiment: Experiment,
    model: Model,
    recipe: Recipe,
    gpu: Gpu,
    sequence_tokens: int,
    backend: Backend = MEGATRON,
) -> ServingMemory:
    """Account for one engine GPU.

    Args: experiment: resolved. sequence_tokens: longest prompt and response together.
    """
    arch = model.arch
    tp, dp = recipe.engine_gpus, max(1, recipe.engine_dp)
    weights, formula = compute_engine_weight_bytes(arch, recipe, experiment.precision, backend)
    items = [("weights", weights, formula)]
    per_token = compute_kv_bytes_on_gpu(arch, tp, dp, experiment.kv_dtype, backend.serving_value_bytes)
    draft = 0
    if experiment.eagle == "builtin" and model.has_mtp:
        params = _count_draft_params(arch, recipe)
        draft = 2 * params
        items.append(("draft head", draft, f"2 x {params:,} parameters of the built-in head"))
        per_token += -(-per_token // max(1, arch.kv_layers))
    items.append(("reserve", RESERVE_BYTES, "3 GiB kept back for graphs and workspaces"))
    static = int(recipe.mem_fraction_static * gpu.memory_bytes)
    pool = max(0, static - weights - draft - RESERVE_BYTES)
    split = f"{recipe.mem_fraction_static:g} x {gpu.memory_bytes:,} - weights - reserve"
    kv_pool, state_pool = pool, 0
    state = compute_state_bytes(arch, experiment.ssm_dtype, max(1, tp // dp))
    balanced = 0.0
    requests_by_state = None
    if arch.is_hybrid:
        has_ratio = experiment.ssm_ratio is not None and experiment.ssm_ratio > 0
        ratio = float(experiment.ssm_ratio or 0) if has_ratio else DEFAULT_STATE_RATIO
        kv_pool = int(pool / (1 + ratio))
        state_pool = pool - kv_pool
        copies = STATE_COPIES + (experiment.eagle_steps or 0) + 1 if experiment.eagle != "off" else STATE_COPIES
        balanced = copies * state / per_token / sequence_tokens
        requests_by_state = state_pool // (copies * state) * dp
        items.append(("recurrent state", state_pool, f"({split}) x {ratio:g} / (1 + {ratio:g})"))
        split = f"({split}) / (1 + {ratio:g})"
    items.append(("KV cache", kv_pool, split))
    tokens = kv_pool // per_token * dp
    requests = kv_pool // per_token // sequence_tokens * dp
    if requests_by_state is not None:
        requests = min(requests, requests_by_state)
    assumptions = ["estimate: the engine keeps 3 GiB of its static share for graphs and workspaces"]
    if experiment.precision in ("fp8", "fp8train", "int4"):
        assumptions.append("estimate: embedding, head and router are served in BF16, all other weights quantised")
    return ServingMemory(
        items=tuple(items),
        weight_bytes=weights + draft,
        kv_pool_bytes=kv_pool,
        state_pool_bytes=state_pool,
        kv_bytes_per_token=per_token,
        state_bytes_per_request=state,
        tokens_per_engine=tokens,
        requests_per_engine=requests,
        balanced_state_ratio=balanced,
        assumptions=tuple(assumptions),
    )
