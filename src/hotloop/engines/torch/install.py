"""Writes new weights into the arena in place: whole tensors, or changed byte ranges; and all that comes before it.

    update --plan_install--> InstallPlan ..(pause).. write --> arena
             check, decode, cast, locate,                memory writes only: runs, and one scatter
             drop what is there already

Owns: the check of a whole update before its first byte is written, and the mapping from a checkpoint tensor's bytes to
arena elements.

Promises: an update that names an unknown tensor, a wrong shape or a range outside its tensor changes nothing. Ranges
are absolute values, so writing them twice is harmless. Ranges may cut through an element when the arena keeps the
checkpoint's own numbers (same dtype, or a narrower one widened); a lossy cast needs whole elements. A plan is complete:
its write reads no file, decodes nothing, and allocates nothing.

Does not do: pausing, versions (core.py), fetching or decoding deltas (snapshots/). A plan is of the arena as it was:
who keeps one must not use it after another write (engine.py counts them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotloop.engines.base import TensorRange, WeightUpdate
from hotloop.engines.byte_ranges import expand_ranges
from hotloop.errors import HotloopError
from hotloop.models.weights import Arena

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_WIDENS = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)}
"""Checkpoint dtype -> arena dtype casts that lose nothing and can be undone."""
_BITS: dict[int, tuple[torch.dtype, type[np.generic]]] = {
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}
"""Element size -> integers of that size: values are compared and moved as bits."""
_PIECE_BYTES = 4 << 20
"""Ranges are decoded so many bytes at a time: an index costs 8 bytes per element."""
DENSE_SHARE = 1 / 32
"""A tensor with a larger share of changed elements is written whole: on the CPU a scattered element takes about as long
as 30 in a row (135M elements: 1 % scattered 20 ms, all of them copied 65 ms)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Values for consecutive elements of the arena."""

    begin: int
    values: Tensor
    """[elements] or of the tensor's shape; any float dtype, cast when written."""


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """A checked update as positions and values of the arena."""

    policy_version: int
    snapshot_identity: str
    runs: tuple[Run, ...]
    index: Tensor
    """[changed] int64, rising: elements of the arena outside the runs."""
    values: Tensor
    """[changed] their new values, in the arena's dtype and on its device."""

    @property
    def num_elements(self) -> int:
        """Elements that a write touches."""
        return self.index.numel() + sum(run.values.numel() for run in self.runs)

    def write(self, arena: Arena) -> None:
        """Write everything; memory writes only."""
        with torch.inference_mode():
            for run in self.runs:
                arena.flat[run.begin : run.begin + run.values.numel()].view(run.values.shape).copy_(run.values)
            if not self.index.numel():
                return
            if arena.flat.device.type == "cpu":  # numpy's scatter is the fastest there
                _numpy_bits(arena.flat)[self.index.numpy()] = _numpy_bits(self.values)
            else:
                arena.flat.index_copy_(0, self.index, self.values)


@dataclass(frozen=True, slots=True)
class _Part:
    """One checked `TensorRange`."""

    offsets: Ints
    lengths: Ints
    data: Bytes
    dtype: torch.dtype

    @property
    def has_distinct_elements(self) -> bool:
        """Whether the ranges rise and no two of them share an element, nor two pieces of one."""
        width = self.dtype.itemsize
        are_whole = not bool(((self.offsets % width) | (self.lengths % width)).any())
        return are_whole and bool((self.offsets[1:] >= (self.offsets + self.lengths)[:-1]).all())


@dataclass(slots=True)
class _Wanted:
    """What an update says of one tensor, in its order: the whole, then ranges."""

    whole: Tensor | None = None
    parts: list[_Part] = field(default_factory=list)


def install(arena: Arena, update: WeightUpdate, checkpoint_dtypes: Mapping[str, torch.dtype]) -> None:
    """Write an update at once.

    Args:
        checkpoint_dtypes: dtype of each tensor in the checkpoint that the engine was opened from.

    Raises:
        HotloopError: code `install_failed`; nothing was written.
    """
    plan_install(arena, update, checkpoint_dtypes, casts=False).write(arena)


def plan_install(
    arena: Arena, update: WeightUpdate, checkpoint_dtypes: Mapping[str, torch.dtype], *, casts: bool = True
) -> InstallPlan:
    """Do all of an install but its writes. The arena is only read, so its owner may go on drawing tokens.

    Args:
        checkpoint_dtypes: dtype of each tensor in the checkpoint that the engine was opened from.
        casts: cast whole tensors to the arena's dtype now, on its device; False leaves it to the write and saves the
            memory of a copy.

    Raises:
        HotloopError: code `install_failed`.
    """
    wanted: dict[str, _Wanted] = {}
    for name, value in update.tensors.items():
        if _belongs(arena, name):
            wanted[name] = _Wanted(_check_tensor(arena, name, value))
    for one in update.ranges:
        if _belongs(arena, one.name):
            wanted.setdefault(one.name, _Wanted()).parts.append(_check_range(arena, one, checkpoint_dtypes))
    runs: list[Run] = []
    scattered: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for name in sorted(wanted, key=lambda name: arena.slots[name].offset):
            slot, one_wanted = arena.slots[name], wanted[name]
            flat = arena.flat[slot.offset : slot.offset + slot.size]
            planned = _plan_tensor(flat, one_wanted, casts)
            if isinstance(planned, Tensor):
                runs.append(Run(slot.offset, planned))
            elif planned is not None:
                scattered.append((planned[0] + slot.offset, planned[1]))
        none = (arena.flat.new_zeros(0, dtype=torch.int64), arena.flat.new_zeros(0))
        index, values = (torch.cat(parts) for parts in zip(none, *scattered, strict=True))
    return InstallPlan(update.policy_version, update.snapshot_identity, tuple(runs), index, values)


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


def _check_range(arena: Arena, one: TensorRange, checkpoint_dtypes: Mapping[str, torch.dtype]) -> _Part:
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
    return _Part(offsets, lengths, data, dtype)


# ---- one tensor


def _plan_tensor(flat: Tensor, wanted: _Wanted, casts: bool) -> Tensor | tuple[Tensor, Tensor] | None:
    """Decide how one tensor is written.

    Args:
        flat: [elements] what the arena holds now; only read.

    Returns: all its values; or the changed elements, rising, and their values; or None when nothing changes.
    """
    if wanted.whole is not None and not wanted.parts:
        return wanted.whole.to(flat.device, flat.dtype) if casts else wanted.whole
    if wanted.whole is None and len(wanted.parts) == 1 and wanted.parts[0].has_distinct_elements:
        return _plan_part(flat, wanted.parts[0])
    # Elements that are named twice or in part: in the order of the update, on a copy.
    whole = flat.clone() if wanted.whole is None else wanted.whole.reshape(-1).to(flat.device, flat.dtype, copy=True)
    for part in wanted.parts:
        _apply(whole, part)
    return whole


def _plan_part(flat: Tensor, part: _Part) -> Tensor | tuple[Tensor, Tensor] | None:
    if len(part.offsets) == 1 and int(part.lengths[0]) == flat.numel() * part.dtype.itemsize:
        return _as_values(part.data, part.dtype).to(flat.device, flat.dtype)
    bits = _BITS[flat.dtype.itemsize][0]
    most = int(flat.numel() * DENSE_SHARE)
    found: list[tuple[Tensor, Tensor]] = []
    count = 0
    for elements, values in _iter_elements(flat, part):
        # The bytes around a changed element come with it: only what differs is written.
        differs = flat[elements].view(bits) != values.view(bits)
        found.append((elements[differs], values[differs]))
        count += found[-1][0].numel()
        if count > most:
            whole = flat.clone()
            _apply(whole, part)
            return whole
    if not count:
        return None
    return torch.cat([elements for elements, _ in found]), torch.cat([values for _, values in found])


def _apply(whole: Tensor, part: _Part) -> None:
    for elements, values in _iter_elements(whole, part):
        whole[elements] = values


def _iter_elements(flat: Tensor, part: _Part) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield elements of a tensor and their new values, in the arena's dtype and on its device, piece by piece.

    Args:
        flat: gives the bytes of an element that a range covers in part; read when the piece is asked for.
    """
    width = part.dtype.itemsize
    for offsets, lengths, data in _iter_pieces(part):
        if bool(((offsets % width) | (lengths % width)).any()):
            positions = expand_ranges(offsets, lengths)
            elements = np.unique(positions // width)
            current = flat[torch.from_numpy(elements).to(flat.device)].to("cpu", part.dtype)
            patched = current.view(torch.uint8).numpy().copy()
            patched[np.searchsorted(elements, positions // width) * width + positions % width] = data
            values = torch.from_numpy(patched).view(part.dtype)
        else:
            elements = expand_ranges(offsets // width, lengths // width)
            values = _as_values(data, part.dtype)
        yield torch.from_numpy(elements).to(flat.device), values.to(flat.device, flat.dtype)


def _iter_pieces(part: _Part) -> Iterator[tuple[Ints, Ints, Bytes]]:
    """Cut ranges into pieces of at most `_PIECE_BYTES`; yield their offsets, lengths and bytes."""
    ends = np.cumsum(part.lengths)
    begin = 0
    while begin < len(ends):
        at = int(ends[begin] - part.lengths[begin])
        end = int(np.searchsorted(ends, at + _PIECE_BYTES, side="right"))
        if end > begin:
            yield part.offsets[begin:end], part.lengths[begin:end], part.data[at : int(ends[end - 1])]
            begin = end
            continue
        offset, length = int(part.offsets[begin]), int(part.lengths[begin])
        for skip in range(0, length, _PIECE_BYTES):
            size = min(_PIECE_BYTES, length - skip)
            yield np.array([offset + skip]), np.array([size]), part.data[at + skip : at + skip + size]
        begin += 1


def _as_values(data: Bytes, dtype: torch.dtype) -> Tensor:
    """Read bytes as elements. They are copied where they must be: torch wants writable, aligned memory."""
    if not data.flags.writeable or data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype)


def _numpy_bits(values: Tensor) -> npt.NDArray[np.generic]:
    """View a CPU tensor as integers of its element size."""
    bits, numpy_bits = _BITS[values.dtype.itemsize]
    found: npt.NDArray[np.generic] = values.view(bits).numpy().view(numpy_bits)
    return found
