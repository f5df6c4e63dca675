"""Bytes per item of a trainer: what one parameter, one gradient, one optimizer state and one layer's activations cost.

Owns: `Backend` and its two records. `MEGATRON` is the cluster's trainer; `TORCH` is our own single-process trainer, so
that the accounting can be measured on a CPU against a real one.

Promises: pure arithmetic in bytes. Does not do: know how many parameters or tokens a GPU has (memory.py).

Source: algorithms.md 10; activations per layer 34 s b h: Korthikanti et al. 2022, arXiv:2205.05198, equation 2
with selective attention (flash) and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotloop.experiment.catalog.records import Arch

LAYER_BYTES_PER_VALUE = 34
"""Bytes that one layer keeps for one hidden value of one token (16-bit activations, attention not stored)."""
CHECKPOINT_BYTES_PER_VALUE = 2
"""Bytes of a layer's input, all that full recompute keeps."""


@dataclass(frozen=True, slots=True)
class ActivationShape:
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


@dataclass(frozen=True, slots=True)
class Backend:
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
    count_activations=_count_megatron_activations,
)
"""BF16 weights, FP32 gradients, FP32 master and Adam moments sharded by the distributed optimizer."""
