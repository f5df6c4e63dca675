"""What a decode step reads and writes: weights as the matmul wants them, buffers, and every view of them.

Owns: the record of one layer's weights; one allocation per buffer for the largest row count, and cached views for each
smaller one.

Promises: making a view costs about as much as a small operator, so none is made inside a step; row counts share memory.

Shapes: n rows, D hidden, Q query heads, K key heads, d head size, I width of a dense MLP, S cache columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.models.config import DecoderConfig
from hotloop.models.decoder import LayerParams


@dataclass(slots=True)
class LayerStep:
    """What one layer of a decode step reads: weights as the matmul wants them, scaled norm weights, its cache."""

    index: int
    layer: LayerParams
    input_norm: Tensor
    post_norm: Tensor
    qk_norm: Tensor | None
    """[Q + K, d]"""
    qkv_t: Tensor
    """[D, (Q + 2 K) d]; holds the input norm when the runner folds."""
    qkv_bias: Tensor | None
    o_t: Tensor
    o_bias: Tensor | None
    gate_up_t: Tensor | None
    """[D, 2 I]; holds the post norm when the runner folds."""
    down_t: Tensor | None
    kv_flat: Tensor
    """[slots x S, 2 K, d]"""


@dataclass(slots=True)
class Views:
    """Buffers cut to n rows."""

    x: Tensor
    """[n, D] residual stream."""
    x_and_floor: Tensor
    """[n, D + 1] the same and sqrt(eps D), so that one norm gives sqrt(|x|^2 + eps D)."""
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
    upper: Tensor
    """[n, Q + K, d / 2] first half of each head of `normed`."""
    lower: Tensor
    product: Tensor
    """[n, Q + K, d]"""
    product_upper: Tensor
    product_lower: Tensor
    rotated_upper: Tensor
    rotated_lower: Tensor
    gate_up: Tensor
    """[n, 2 I]"""
    gate: Tensor
    up: Tensor


class Workspace:
    """The buffers of one runner."""

    def __init__(
        self, config: DecoderConfig, num_rows: int, dtype: torch.dtype, device: torch.device, norm_floor: float
    ) -> None:
        self._config = config
        self._cache: dict[int, Views] = {}
        rotated = config.num_heads + config.num_kv_heads
        heads = (rotated + config.num_kv_heads) * config.head_dim
        hidden, width = config.hidden_size, config.intermediate_size

        def make(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device=device)

        self._x, self._h = make(num_rows, hidden + 1), make(num_rows, hidden)
        self._x[:, hidden] = norm_floor
        self._size = make(num_rows, 1, of=torch.float32)
        self._heads = make(num_rows, heads)
        self._head_size = make(num_rows, rotated, 1, of=torch.float32)
        self._normed, self._product = (make(num_rows, rotated, config.head_dim) for _ in range(2))
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
        normed, product = self._normed[:n], self._product[:n]
        half = d // 2
        gate_up = self._gate_up[:n]
        return Views(
            x=self._x[:n, : config.hidden_size],
            x_and_floor=self._x[:n],
            h=self._h[:n],
            size=self._size[:n],
            heads_flat=self._heads[:n],
            rotated=heads[:, :rotated],
            queries=heads[:, : config.num_heads].view(n, config.num_kv_heads, -1, d),
            new_kv=heads[:, config.num_heads :],
            head_size=self._head_size[:n],
            normed=normed,
            upper=normed[..., :half],
            lower=normed[..., half:],
            product=product,
            product_upper=product[..., :half],
            product_lower=product[..., half:],
            rotated_upper=heads[:, :rotated, :half],
            rotated_lower=heads[:, :rotated, half:],
            gate_up=gate_up,
            gate=gate_up[:, : config.intermediate_size],
            up=gate_up[:, config.intermediate_size :],
        )
