"""Buffers of a decode step, and every view of them that a step needs, made once per row count.

Owns: one allocation per buffer for the largest row count, and cached views for each smaller one.

Promises: making a view costs about as much as a small operator, so none is made inside a step; row counts share memory.

Shapes: n rows, D hidden, Q query heads, K key heads, d head size, I width of a dense MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.models.config import DecoderConfig


@dataclass(slots=True)
class Views:
    """Buffers cut to n rows."""

    x: Tensor
    """[n, D] residual stream."""
    h: Tensor
    """[n, D] normed input of a block."""
    size: Tensor
    """[n, 1] fp32 norms."""
    heads_flat: Tensor
    """[n, (Q + 2 K) d] output of the q/k/v projection."""
    rotated: Tensor
    """[n, Q + K, d] the q and k part of it."""
    queries: Tensor
    """[n, K, Q / K, d]: query heads that share a key head are queries of that head."""
    new_kv: Tensor
    """[n, 2 K, d] the k and v part of it."""
    head_size: Tensor
    """[n, Q + K, 1] fp32 norms."""
    normed: Tensor
    """[n, Q + K, d]"""
    second_half: Tensor
    """[n, Q + K, d / 2] of `normed`."""
    first_half: Tensor
    turned: Tensor
    """[n, Q + K, d] halves swapped."""
    product: Tensor
    """[n, Q + K, d]"""
    gate_up: Tensor
    """[n, 2 I]"""
    gate: Tensor
    up: Tensor


class Workspace:
    """The buffers of one runner."""

    def __init__(self, config: DecoderConfig, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._cache: dict[int, Views] = {}
        rotated = config.num_heads + config.num_kv_heads
        heads = (rotated + config.num_kv_heads) * config.head_dim
        hidden, width = config.hidden_size, config.intermediate_size

        def make(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device=device)

        self._x, self._h = make(num_rows, hidden), make(num_rows, hidden)
        self._size = make(num_rows, 1, of=torch.float32)
        self._heads = make(num_rows, heads)
        self._head_size = make(num_rows, rotated, 1, of=torch.float32)
        self._normed, self._turned, self._product = (make(num_rows, rotated, config.head_dim) for _ in range(3))
        self._gate_up = make(num_rows, 2 * width)

    def views(self, n: int) -> Views:
        """Give the buffers cut to n rows."""
        found = self._cache.get(n)
        if found is None:
            found = self._cache[n] = self._cut(n)
        return found

    def _cut(self, n: int) -> Views:
        config = self._config
        rotated, d = config.num_heads + config.num_kv_heads, config.head_dim
        heads = self._heads[:n].view(n, rotated + config.num_kv_heads, d)
        normed = self._normed[:n]
        gate_up = self._gate_up[:n]
        return Views(
            x=self._x[:n],
            h=self._h[:n],
            size=self._size[:n],
            heads_flat=self._heads[:n],
            rotated=heads[:, :rotated],
            queries=heads[:, : config.num_heads].view(n, config.num_kv_heads, -1, d),
            new_kv=heads[:, config.num_heads :],
            head_size=self._head_size[:n],
            normed=normed,
            second_half=normed[..., d // 2 :],
            first_half=normed[..., : d // 2],
            turned=self._turned[:n],
            product=self._product[:n],
            gate_up=gate_up,
            gate=gate_up[:, : config.intermediate_size],
            up=gate_up[:, config.intermediate_size :],
        )
