"""The decode step of a small fp32 policy on a CPU: matrix products by torch, everything around them by numpy.

A small policy is bound by the cost of calling operators, not by arithmetic: a numpy call on a few hundred numbers takes
a fifth of a torch call. Both sides see the same memory, so a layer is a chain of calls on buffers that exist already:

    numpy   norm                 torch   q/k/v product
    numpy   norms and rotation of q and k, keys and values into the cache, scores
    torch   softmax              numpy   mix          torch   output product, added to the residual
    numpy   norm                 torch   gate/up product, SiLU
    numpy   gate x up            torch   down product, added to the residual

Owns: this order, its buffers, and the choice between numpy and torch attention.

Promises: equals `NativeRunner`'s torch step up to rounding; starts no thread (numpy's products stay below the sizes at
which its BLAS would).

Does not do: prefill, weights that are not folded (runner.py decides who runs).

Shapes: n rows, D hidden, Q query heads, K key heads, F = Q / K, d head size, I width of a dense MLP, L layers, S cache
columns, V vocabulary, E experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hotloop.engines.torch.kv_cache import KVCache
from hotloop.engines.torch.trunk import TrunkLayout
from hotloop.engines.torch.workspace import LayerStep
from hotloop.models.config import DecoderConfig
from hotloop.models.decoder import compute_moe

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_silu: Callable[..., Tensor] = torch._C._nn.silu
"""What F.silu calls; it takes `out`, which its stub does not say."""

FEW_CELLS = 1024
"""Rows x columns, or columns x head size, up to which one numpy product per row and key head costs less than torch's
fused attention: measured for 1 to 450 rows, 12 to 96 columns, head sizes 16 and 32."""
BLAS_VECTOR_THREADS_AT = 9216
"""Elements of a matrix above which OpenBLAS may split a matrix-vector product among threads (interface/gemv.c)."""
BLAS_MATRIX_THREADS_AT = 262_144
"""Multiplications above which OpenBLAS may split a matrix product among threads (interface/gemm.c)."""


def choose_numpy_attention(num_rows: int, columns: int, fold: int, head_dim: int) -> bool:
    """Say whether attention of one step goes through numpy's products.

    Args:
        fold: query heads per key head; with one, numpy's product is a matrix-vector product.
    """
    cells = columns * head_dim
    starts_threads = cells > BLAS_VECTOR_THREADS_AT if fold == 1 else cells * fold > BLAS_MATRIX_THREADS_AT
    return min(num_rows * columns, cells) <= FEW_CELLS and not starts_threads


@dataclass(slots=True)
class _Rows:
    """Buffers cut to n rows; a name with `_t` is the torch view of the same memory."""

    x: Floats
    """[n, D] residual stream."""
    x_t: Tensor
    h_t: Tensor
    """[n, D] normed input of a block."""
    normalise: Callable[[], None]
    """Write x / rms(x) / sqrt(D) into `h`."""
    heads_t: Tensor
    """[n, (Q + 2 K) d] output of the q/k/v projection."""
    rotated: Floats
    """[n, Q + K, d] the q and k part of it."""
    queries: Floats
    """[n, K, F, d]"""
    queries_t: Tensor
    new_kv: Floats
    """[n, 2 K, d]"""
    head_size: Floats
    """[n, Q + K]"""
    head_size_column: Floats
    """[n, Q + K, 1]"""
    normed: Floats
    """[n, Q + K, d]"""
    turned: Floats
    """[n, Q + K, 2, d / 2] `normed` with the halves of each head swapped."""
    product: Floats
    """[n, Q + K, d]"""
    turned_product: Floats
    """[n, Q + K, d]"""
    turned_product_halves: Floats
    """[n, Q + K, 2, d / 2]"""
    mixed: Floats
    """[n, K, F, d]"""
    mixed_t: Tensor
    """[n, Q d]"""
    gate_up_t: Tensor
    gate_t: Tensor
    up: Floats
    act: Floats
    """[n, I]"""
    act_t: Tensor


class SmallDecoder:
    """Decode steps over the rows of one runner."""

    def __init__(self, config: DecoderConfig, kv: KVCache, rope: Tensor, num_rows: int) -> None:
        """Make the buffers.

        Args:
            rope: [S, 2, d] cosines and signed sines of every position.
        """
        self._config = config
        self._kv = kv
        self._columns = kv.all.numpy()
        slots, length = self._columns.shape[1:3]
        self._flat = self._columns.reshape(config.num_layers, slots * length, *self._columns.shape[3:])
        self._max_context = length
        self._cos, self._sin = rope[:, 0].numpy(), rope[:, 1].numpy()
        # Squared norms are compared with these; the arrays have no dimension, which numpy reads faster than a float.
        self._floor = np.array(config.rms_norm_eps * config.hidden_size, dtype=np.float32)
        self._head_floor = np.array(config.rms_norm_eps * config.head_dim, dtype=np.float32)
        rotated = config.num_heads + config.num_kv_heads
        heads = (rotated + config.num_kv_heads) * config.head_dim
        self._x, self._h = (np.empty((num_rows, config.hidden_size), np.float32) for _ in range(2))
        self._size = np.empty((num_rows, 1), np.float32)
        self._heads = np.empty((num_rows, heads), np.float32)
        self._head_size = np.empty((num_rows, rotated), np.float32)
        self._normed, self._product, self._turned_product = (
            np.empty((num_rows, rotated, config.head_dim), np.float32) for _ in range(3)
        )
        self._mixed = np.empty((num_rows, config.num_heads * config.head_dim), np.float32)
        self._gate_up = np.empty((num_rows, 2 * config.intermediate_size), np.float32)
        self._act = np.empty((num_rows, config.intermediate_size), np.float32)
        self._cache: dict[int, _Rows] = {}
        self._order = np.arange(num_rows) * length
        self._every_column = np.arange(length)
        self._steps: Sequence[LayerStep] = ()
        self._embed = self._cos_weights = self._sin_weights = np.empty(0, np.float32)
        self._head_t = torch.empty(0)

    def load(self, steps: Sequence[LayerStep], embed: Tensor, head_t: Tensor) -> None:
        """Take over weights after every write.

        Args:
            steps: folded.
            head_t: [D, V] with the final norm folded in.
        """
        config = self._config
        self._steps, self._head_t = steps, head_t
        self._embed = embed.detach().numpy()
        ones = np.ones((config.num_heads + config.num_kv_heads, config.head_dim), np.float32)
        weights = np.stack([ones if step.qk_norm is None else step.qk_norm.numpy() for step in steps])
        # Scores are q k / sqrt(d): the root sits in the rotation of q.
        weights[:, : config.num_heads] *= 1.0 / math.sqrt(config.head_dim)
        # x w rotated is x (w cos) + turned(x) (turned(w) sin).
        self._cos_weights = weights[:, None]
        self._sin_weights = np.roll(weights, config.head_dim // 2, -1)[:, None]

    @np.errstate(over="ignore", invalid="ignore")  # weights that are no numbers are told when a token is drawn
    def decode(self, tokens: Ints, lengths: Ints, trunks: TrunkLayout | None) -> tuple[Tensor, list[Tensor]]:
        """Feed one token per row at position `lengths`; return logits [n, V] and per layer routes [n, E]."""
        config, n = self._config, len(tokens)
        columns = int(lengths.max()) + 1
        begin = 0 if trunks is None else trunks.begin
        rows = self._cache.get(n) or self._cut(n)
        cos = self._cos_weights * self._cos[lengths][:, None]
        sin = (self._sin_weights * self._sin[lengths][:, None]).reshape(*cos.shape[:3], 2, -1)
        mask = None
        if int(lengths.min()) + 1 != columns or (trunks is not None and not trunks.is_even):
            mask = self._hide(lengths, begin, columns, trunks)
        where = self._order[:n] + lengths
        attend = self._attention(rows, n, begin, columns, mask, trunks)
        normalise, normed = rows.normalise, rows.normed
        multiply, divide, add = np.multiply, np.divide, np.add
        rows.x[:] = self._embed[tokens]
        routes: list[Tensor] = []
        for step in self._steps:
            index = step.index
            normalise()
            if step.qkv_bias is None:
                torch.mm(rows.h_t, step.qkv_t, out=rows.heads_t)
            else:
                torch.addmm(step.qkv_bias, rows.h_t, step.qkv_t, out=rows.heads_t)
            if step.qk_norm is None:
                normed[:] = rows.rotated
            else:
                np.vecdot(rows.rotated, rows.rotated, out=rows.head_size)
                add(rows.head_size, self._head_floor, rows.head_size)
                np.sqrt(rows.head_size, rows.head_size)
                divide(rows.rotated, rows.head_size_column, normed)
            multiply(normed, cos[index], rows.product)
            multiply(rows.turned, sin[index], rows.turned_product_halves)
            add(rows.product, rows.turned_product, rows.rotated)
            self._flat[index][where] = rows.new_kv
            rows.x_t.addmm_(attend(index), step.o_t)
            if step.o_bias is not None:
                rows.x_t.add_(step.o_bias)
            normalise()
            if step.gate_up_t is not None and step.down_t is not None:
                torch.mm(rows.h_t, step.gate_up_t, out=rows.gate_up_t)
                _silu(rows.gate_t, out=rows.act_t)
                multiply(rows.act, rows.up, rows.act)
                rows.x_t.addmm_(rows.act_t, step.down_t)
                if config.num_experts:
                    routes.append(torch.zeros(n, config.experts_per_token, dtype=torch.int64))
            else:
                out, used, _ = compute_moe(config, step.layer, rows.h_t.mul_(step.post_norm), None)
                rows.x_t.add_(out)
                routes.append(used)
        normalise()
        return torch.mm(rows.h_t, self._head_t), routes

    def _hide(self, lengths: Ints, begin: int, columns: int, trunks: TrunkLayout | None) -> Floats:
        """Give -inf at columns that are not a row's own, 0 elsewhere, [n, 1, 1, columns - begin]."""
        every = self._every_column[begin:columns]
        is_hidden = every > lengths[:, None]
        if trunks is not None:
            is_hidden |= every < trunks.own_from.numpy()[:, None]
        return np.where(is_hidden, np.float32(-np.inf), np.float32(0.0))[:, None, None]

    def _attention(
        self, rows: _Rows, n: int, begin: int, columns: int, mask: Floats | None, trunks: TrunkLayout | None
    ) -> Callable[[int], Tensor]:
        """Choose how this step attends; the result takes a layer and gives [n, Q d]."""
        config = self._config
        fold = config.num_heads // config.num_kv_heads
        if trunks is None and choose_numpy_attention(n, columns, fold, config.head_dim):
            scores = np.empty((n, config.num_kv_heads, fold, columns), np.float32)
            scores_t = torch.from_numpy(scores)
            window = self._columns[:, :n, :columns]
            keys = window[:, :, :, : config.num_kv_heads].transpose(0, 1, 3, 4, 2)
            values = window[:, :, :, config.num_kv_heads :].transpose(0, 1, 3, 2, 4)
            matmul, softmax = np.matmul, torch.softmax

            def multiply_out(index: int) -> Tensor:
                matmul(rows.queries, keys[index], scores)
                if mask is not None:
                    np.add(scores, mask, scores)
                softmax(scores_t, -1, out=scores_t)
                matmul(scores, values[index], rows.mixed)
                return rows.mixed_t

            return multiply_out
        keys_t, values_t = self._kv.windows(n, begin, columns)
        mask_t = None if mask is None else torch.from_numpy(mask)
        if trunks is not None:
            return lambda index: trunks.attend(
                index, rows.queries_t, keys_t[index], values_t[index], mask_t, scale=1.0
            ).reshape(n, -1)
        return lambda index: F.scaled_dot_product_attention(
            rows.queries_t, keys_t[index], values_t[index], attn_mask=mask_t, scale=1.0
        ).reshape(n, -1)

    def _cut(self, n: int) -> _Rows:
        """Make the views for n rows, once."""
        config = self._config
        rotated, d, kv = config.num_heads + config.num_kv_heads, config.head_dim, config.num_kv_heads
        as_tensor = torch.from_numpy
        heads = self._heads[:n].reshape(n, rotated + kv, d)
        queries = heads[:, : config.num_heads].reshape(n, kv, -1, d)
        gate_up, act = self._gate_up[:n], self._act[:n]
        width = config.intermediate_size
        found = self._cache[n] = _Rows(
            x=self._x[:n],
            x_t=as_tensor(self._x[:n]),
            h_t=as_tensor(self._h[:n]),
            normalise=self._make_norm(n),
            heads_t=as_tensor(self._heads[:n]),
            rotated=heads[:, :rotated],
            queries=queries,
            queries_t=as_tensor(queries),
            new_kv=heads[:, config.num_heads :],
            head_size=self._head_size[:n],
            head_size_column=self._head_size[:n, :, None],
            normed=self._normed[:n],
            turned=self._normed[:n].reshape(n, rotated, 2, d // 2)[:, :, ::-1],
            product=self._product[:n],
            turned_product=self._turned_product[:n],
            turned_product_halves=self._turned_product[:n].reshape(n, rotated, 2, d // 2),
            mixed=self._mixed[:n].reshape(n, kv, -1, d),
            mixed_t=as_tensor(self._mixed[:n]),
            gate_up_t=as_tensor(gate_up),
            gate_t=as_tensor(gate_up[:, :width]),
            up=gate_up[:, width:],
            act=act,
            act_t=as_tensor(act),
        )
        return found

    def _make_norm(self, n: int) -> Callable[[], None]:
        """Make the function that norms n rows; one row needs no array for its size."""
        x, h, size, floor = self._x[:n], self._h[:n], self._size[:n], self._floor
        if n == 1:
            row, target, plain_floor = x[0], h[0], float(floor)

            def norm_one() -> None:
                np.multiply(row, 1.0 / math.sqrt(float(row.dot(row)) + plain_floor), target)

            return norm_one
        flat_size = size[:, 0]

        def norm_rows() -> None:
            np.vecdot(x, x, out=flat_size)
            np.add(flat_size, floor, flat_size)
            np.sqrt(flat_size, flat_size)
            np.divide(x, size, h)

        return norm_rows
