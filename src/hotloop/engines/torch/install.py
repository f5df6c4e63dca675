"""Writes new weights into the arena in place: whole tensors, or changed byte ranges.

Owns: the check of a whole update before its first byte is written, and the mapping from a checkpoint tensor's bytes to
arena elements.

Promises: an update that names an unknown tensor, a wrong shape or a range outside its tensor changes nothing. Ranges
are absolute values, so writing them twice is harmless. Ranges may cut through an element when the arena keeps the
checkpoint's own numbers (same dtype, or a narrower one widened); a lossy cast needs whole elements.

Does not do: pausing, versions (core.py), fetching or decoding deltas (snapshots/).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotloop.engines.base import TensorRange, WeightUpdate
from hotloop.errors import HotloopError
from hotloop.models.weights import Arena

Ints = npt.NDArray[np.int64]
_WIDENS = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)}
"""Checkpoint dtype -> arena dtype casts that lose nothing and can be undone."""


def install(arena: Arena, update: WeightUpdate, checkpoint_dtypes: Mapping[str, torch.dtype]) -> None:
    """Write an update.

    Args:
        checkpoint_dtypes: dtype of each tensor in the checkpoint that the engine was opened from.

    Raises:
        HotloopError: code `install_failed`; nothing was written.
    """
    tensors = {
        name: _check_tensor(arena, name, value) for name, value in update.tensors.items() if _belongs(arena, name)
    }
    plans = [(one, *_check_range(arena, one, checkpoint_dtypes)) for one in update.ranges if _belongs(arena, one.name)]
    with torch.inference_mode():
        for name, value in tensors.items():
            arena.view(name).copy_(value)
        for one, dtype, data in plans:
            _write_range(arena, one, dtype, data)


def _belongs(arena: Arena, name: str) -> bool:
    """Say whether to write a tensor: a tied head that some checkpoints repeat is the embedding already."""
    if name in arena.slots:
        return True
    if name == "lm_head.weight" and arena.config.tied_embeddings:
        return False
    raise _failed(name, "the policy has no such tensor")


def _failed(where: str, why: str) -> HotloopError:
    return HotloopError("install_failed", why, where=where, do="Publish an anchor of this policy and load that.")


def _check_tensor(arena: Arena, name: str, value: object) -> Tensor:
    if isinstance(value, np.ndarray):
        if value.dtype.name == "bfloat16":  # ml_dtypes; torch reads its bits
            value = torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        else:
            value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        raise _failed(name, f"a {type(value).__name__} is not an array")
    shape = arena.slots[name].shape
    if tuple(value.shape) != shape:
        raise _failed(name, f"shape {list(value.shape)} where the policy has {list(shape)}")
    if not value.dtype.is_floating_point:
        raise _failed(name, f"dtype {value.dtype} is not a float")
    return value


def _check_range(
    arena: Arena, one: TensorRange, checkpoint_dtypes: Mapping[str, torch.dtype]
) -> tuple[torch.dtype, npt.NDArray[np.uint8]]:
    dtype = checkpoint_dtypes[one.name]
    offsets, lengths = np.asarray(one.offsets, dtype=np.int64), np.asarray(one.lengths, dtype=np.int64)
    data = np.frombuffer(one.data, dtype=np.uint8)
    size = arena.slots[one.name].size * dtype.itemsize
    if offsets.shape != lengths.shape or offsets.ndim != 1:
        raise _failed(one.name, "offsets and lengths differ in number")
    if len(offsets) and (offsets.min() < 0 or lengths.min() < 0 or int((offsets + lengths).max()) > size):
        raise _failed(one.name, f"a range lies outside the tensor's {size} bytes")
    if int(lengths.sum()) != len(data):
        raise _failed(one.name, f"the ranges cover {int(lengths.sum())} bytes and {len(data)} came")
    is_exact = dtype == arena.flat.dtype or (dtype, arena.flat.dtype) in _WIDENS
    if not is_exact and bool(((offsets % dtype.itemsize) | (lengths % dtype.itemsize)).any()):
        raise _failed(
            one.name,
            f"a range cuts through a {dtype} element, and the engine keeps only its {arena.flat.dtype} rounding",
        )
    return dtype, data


def expand_ranges(offsets: Ints, lengths: Ints) -> Ints:
    """List every position that ranges cover, in order."""
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    positions: Ints = np.arange(total, dtype=np.int64) + np.repeat(offsets - starts, lengths)
    return positions


def _write_range(arena: Arena, one: TensorRange, dtype: torch.dtype, data: npt.NDArray[np.uint8]) -> None:
    slot = arena.slots[one.name]
    offsets, lengths = np.asarray(one.offsets, dtype=np.int64), np.asarray(one.lengths, dtype=np.int64)
    if len(data) == 0:
        return
    flat = arena.flat[slot.offset : slot.offset + slot.size]
    width = dtype.itemsize
    if dtype == arena.flat.dtype and flat.device.type == "cpu" and len(offsets) * 64 < len(data):
        # Long runs: one copy each beats an index per element.
        target = flat.view(torch.uint8).numpy()
        at = 0
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            target[offset : offset + length] = data[at : at + length]
            at += length
        return
    if bool(((offsets % width) | (lengths % width)).any()):
        positions = expand_ranges(offsets, lengths)
        elements = np.unique(positions // width)
        current = flat[torch.from_numpy(elements).to(flat.device)].to("cpu", dtype)
        patched = current.view(torch.uint8).numpy().copy()
        patched[np.searchsorted(elements, positions // width) * width + positions % width] = data
        values = torch.from_numpy(patched).view(dtype)
    else:
        elements = expand_ranges(offsets // width, lengths // width)
        values = torch.from_numpy(data.copy()).view(dtype)
    index = torch.from_numpy(elements).to(flat.device)
    flat.index_copy_(0, index, values.to(flat.device, flat.dtype))
