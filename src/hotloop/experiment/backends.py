"""Bytes per item of a trainer: what one parameter, one gradient, one optimizer state and one layer's activations cost.

Owns: `Backend` and its two records. `MEGATRON` is the cluster's trainer; `TORCH` is our own single-process trainer, so
that the accounting can be measured on a CPU against a real one.

Promises: pure arithmetic in bytes. Does not do: know how many parameters or tokens a GPU has (memory.py).

Source: algorithms.md 10; activations per layer 34 s b h: Korthikanti et al. 2022, arXiv:2205.05198, equation 2
with selective attention (flash) and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hotloop.experiment.catalog.records import Arch

LAYER_BYTES_PER_VALUE = 34
"""Bytes that one layer keeps for one hidden value of one token (16-bit activations, attention not stored)."""
CHECKPOINT_BYTES_PER_VALUE = 2
"""Bytes of a layer's input, all that full recompute keeps."""


class ActivationShape(NamedTuple):
    """What the activations of one GPU depend on."""

    arch: Arch
    tokens: int
    """Tokens of a microbatch on this GPU, after CP."""
    tp: int
    layers: int
    """Layers of the stage."""
    in_flight: int
    """Microbatches whose activations are alive at a time."""
    recompute: bool
    sequence: int = 1
    """Tokens of one row; only a trainer that stores attention weights depends on it."""
    has_head: bool = True
    """Whether the stage ends with the final norm."""


class Backend(NamedTuple):
    """Bytes per item of one trainer."""

    name: str
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Master copy (if apart from the weights), first and second moment."""
    shards_optimizer: bool
    """Whether optimizer state is divided over data-parallel ranks."""
    logit_bytes: int
    logit_copies: int
    """Copies alive at a time without chunking: logits, softmax, gradient."""
    counts_norms: bool
    """Whether norms and biases count as parameters; the cluster's account leaves them out."""
    logits_of_responses_only: bool
    """Whether logits are computed on response tokens only."""
    serving_value_bytes: int
    """Bytes of a weight and of a KV value of the engine beside it, before quantisation."""
    count_activations: Callable[[ActivationShape], tuple[int, str]]
    """Bytes, and the formula with its numbers."""


def _count_megatron_activations(shape: ActivationShape) -> tuple[int, str]:
    values = -(-shape.tokens * shape.arch.hidden_size // shape.tp)
    whole = LAYER_BYTES_PER_VALUE * values * shape.layers * shape.in_flight
    size = f"{shape.tokens:,} tokens x {shape.arch.hidden_size:,} / TP {shape.tp}"
    plain = f"34 x {size} x {shape.layers} layers x {shape.in_flight} in flight"
    if not shape.recompute:
        return whole, plain
    kept = CHECKPOINT_BYTES_PER_VALUE * values * shape.layers * shape.in_flight
    live = LAYER_BYTES_PER_VALUE * values
    if kept + live >= whole:
        return whole, plain
    return kept + live, f"{size} x (2 x {shape.layers} layers x {shape.in_flight} in flight + 34 of one live layer)"


MEGATRON = Backend(
    name="megatron",
    weight_bytes=2,
    gradient_bytes=4,
    optimizer_bytes=12,
    shards_optimizer=True,
    logit_bytes=4,
    logit_copies=3,
    counts_norms=False,
    logits_of_responses_only=False,
    serving_value_bytes=2,
    count_activations=_count_megatron_activations,
)
"""BF16 weights, FP32 gradients, FP32 master and Adam moments sharded by the distributed optimizer."""


def count_decoder_values(arch: Arch, sequence: int) -> int:
    """Count the values that one layer of `models/decoder.py` keeps for the backward pass, per token.

    Formula, H query and K key heads of size d, sequence S, D hidden, I width:
        norms and their inputs: 4 D + 2; normalised heads: (H + K)(d + 1) where there are any; queries, keys, values and
        mixed heads: 2 H d + 2 K d; attention weights: H S; the mask: a quarter value for each key of S, for all rows;
        dense feed-forward: 4 I;
        experts, k of E per token: E + 8 k + 1 + 3 k D + 4 k I (ids are 8 bytes, two values).
    """
    heads, kv_heads, size, hidden = arch.attention_heads, arch.kv_heads, arch.head_dim, arch.hidden_size
    values = 4 * hidden + 2 + 2 * (heads + kv_heads) * size + heads * sequence
    if arch.qk_layernorm:
        values += (heads + kv_heads) * (size + 1)
    if not arch.moe:
        return values + 4 * arch.ffn_hidden_size
    used = arch.experts_per_token
    return values + arch.experts + 8 * used + 1 + 3 * used * hidden + 4 * used * arch.moe_ffn_hidden_size


def _count_torch_activations(shape: ActivationShape) -> tuple[int, str]:
    per_layer = count_decoder_values(shape.arch, shape.sequence)
    rows = max(1, shape.tokens // max(1, shape.sequence))
    mask = shape.layers * shape.sequence**2
    values = shape.tokens * per_layer * shape.layers
    if shape.has_head:
        values += shape.tokens * (shape.arch.hidden_size + 1)
    size = f"4 x {shape.tokens:,} tokens x {per_layer:,} values x {shape.layers} layers"
    return 4 * values + mask, f"{size}, and a mask of {shape.sequence:,}^2 each ({rows} rows; nothing is recomputed)"


TORCH = Backend(
    name="torch",
    weight_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,
    shards_optimizer=False,
    logit_bytes=4,
    logit_copies=3,
    counts_norms=True,
    logits_of_responses_only=True,
    serving_value_bytes=4,
    count_activations=_count_torch_activations,
)
"""Our own trainer and engine in FP32: the weights are the master copy, Adam keeps two moments."""
