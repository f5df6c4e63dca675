"""Keys and values of every row, preallocated in slots.

Owns: one allocation of [L, slots, S, 2 K, d] (keys first), windows on it, and copies between rows.

Promises: a slot that is never used costs no memory on a CPU; windows are views.

Does not do: which row belongs to whom (core.py), what goes into a column (runner.py, small.py, foreign.py).

Shapes: L layers, S cache columns, K key heads, d head size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotloop.models.config import DecoderConfig
from hotloop.models.weights import check_fits
from hotloop.units import format_count

Ints = npt.NDArray[np.int64]


class KVCache:
    """Keys and values in slots: [L, slots, S, 2 K, d], keys first."""

    def __init__(
        self, config: DecoderConfig, num_slots: int, max_context: int, dtype: torch.dtype, device: str
    ) -> None:
        self.num_kv = config.num_kv_heads
        shape = (config.num_layers, num_slots, max_context, 2 * config.num_kv_heads, config.head_dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        check_fits(
            num_bytes, where=f"KV cache of {num_slots} slots x {format_count(max_context)} tokens", device=device
        )
        if device == "cpu":
            # calloc hands out pages on first touch, so slots that are never used cost no memory.
            self.all = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
        else:
            self.all = torch.zeros(shape, dtype=dtype, device=device)
        self.flat = [
            layer.view(num_slots * max_context, 2 * config.num_kv_heads, config.head_dim) for layer in self.all
        ]
        """Per layer [slots x S, 2 K, d]: token `slot * S + position`."""
        self._strides = self.all.stride()

    def window(self, layer: int, first: int, stop: int, columns: int) -> tuple[Tensor, Tensor]:
        """Give keys and values of rows first .. stop-1, columns 0 .. columns-1, as [rows, K, columns, d]."""
        part = self.all[layer, first:stop, :columns].transpose(1, 2)
        return part[:, : self.num_kv], part[:, self.num_kv :]

    def windows(self, n: int, begin: int, end: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Give keys and values of rows 0 .. n-1, columns begin .. end-1, of every layer, as [n, K, columns, d]."""
        # Four operators for all layers; slicing and transposing would be four for each.
        size = (self.all.shape[0], n, self.num_kv, end - begin, self.all.shape[4])
        layer, row, column, head, _ = self._strides
        strides = (layer, row, head, column, 1)
        start = begin * column
        keys = self.all.as_strided(size, strides, start)
        values = self.all.as_strided(size, strides, start + self.num_kv * head)
        return keys.unbind(0), values.unbind(0)

    def copy_rows(self, source: Ints, target: Ints, length: int) -> None:
        """Copy the first `length` columns of some rows onto others; no target is a source."""
        src = torch.from_numpy(source).to(self.all.device)
        dst = torch.from_numpy(target).to(self.all.device)
        self.all[:, dst, :length] = self.all[:, src, :length]
