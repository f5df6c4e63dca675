"""The directory that an engine server reloads its weights from, kept current by patching it in place.

Owns: `LocalCheckpoint`, one `model.safetensors` with its header's names, dtypes and offsets.
Promises: an update that does not fit changes nothing; `write` returns the bytes that it replaced and `restore` puts
them back; new bytes go to absolute positions, so that writing them twice does no harm. Scattered ranges cost a read and
a write for each window of the file that they lie in, not for each range: generation is paused meanwhile.
Does not do: adding, removing or renaming tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.engines.base import TensorRange
from hotloop.engines.byte_ranges import Ints, expand_ranges, iter_windows
from hotloop.errors import HotloopError, InputError

Bytes = npt.NDArray[np.uint8]
_WINDOW_BYTES = 4 << 20
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class _Slot:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes for some ranges of the file."""

    offsets: Ints
    """[R] in the file."""
    lengths: Ints
    """[R]"""
    data: Bytes
    """The ranges' bytes one after the other."""


class LocalCheckpoint:
    """A directory with one `model.safetensors`."""

    def __init__(self, directory: Path) -> None:
        """Read the header.

        Raises:
            InputError: `checkpoint_unreadable`.
        """
        self.directory = directory
        self._path = directory / "model.safetensors"
        try:
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise InputError("checkpoint_unreadable", f"cannot be read ({error})", where=str(self._path)) from None
        start = 8 + length
        self._slots = {
            name: _Slot(
                entry["dtype"],
                tuple(entry["shape"]),
                start + entry["data_offsets"][0],
                start + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def has(self, name: str) -> bool:
        """Say whether there is a tensor of this name."""
        return name in self._slots

    def write(self, ranges: Sequence[TensorRange], tensors: Mapping[str, Any]) -> list[Patch]:
        """Write new bytes in place.

        Returns: what was there before, for `restore`.

        Raises:
            HotloopError: `install_failed` for a tensor or a range that the checkpoint does not have; nothing changed.
        """
        patches = [self._place(each) for each in ranges]
        for name, values in tensors.items():
            slot = self._find(name)
            data = np.frombuffer(encode_tensor(name, values, slot.dtype, slot.shape), np.uint8)
            patches.append(Patch(np.array([slot.begin]), np.array([data.nbytes]), data))
        return self._exchange(patches)

    def restore(self, patches: Sequence[Patch]) -> None:
        """Put back what `write` returned; the last patch first, since patches may overlap."""
        if patches:
            self._exchange(patches[::-1])

    def _exchange(self, patches: Sequence[Patch]) -> list[Patch]:
        """Write patches in their order; return what was there before each."""
        before: list[Patch] = []
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            for patch in patches:
                before.extend(_exchange_window(descriptor, part) for part in _cut(patch))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return before

    def _place(self, each: TensorRange) -> Patch:
        slot = self._find(each.name)
        offsets, lengths = np.asarray(each.offsets, dtype=np.int64), np.asarray(each.lengths, dtype=np.int64)
        data = np.frombuffer(each.data, dtype=np.uint8)
        if offsets.shape != lengths.shape or offsets.ndim != 1:
            raise _failed(each.name, "offsets and lengths differ in number")
        size = slot.end - slot.begin
        if len(offsets) and (offsets.min() < 0 or lengths.min() < 0 or int((offsets + lengths).max()) > size):
            raise _failed(each.name, f"a range lies outside the tensor's {size} bytes")
        if int(lengths.sum()) != len(data):
            raise _failed(each.name, f"the ranges cover {int(lengths.sum())} bytes and {len(data)} came")
        return Patch(offsets + slot.begin, lengths, data)

    def _find(self, name: str) -> _Slot:
        if name not in self._slots:
            raise _failed(name, "the policy has no such tensor")
        return self._slots[name]


def encode_tensor(name: str, values: Any, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Turn an array into a checkpoint's little-endian bytes; floats are rounded to the nearest even.

    Raises:
        HotloopError: `install_failed` for another shape, or a dtype that is not a float's.
    """
    array = np.asarray(values)
    if array.shape != shape:
        raise _failed(name, f"has shape {list(shape)}, the new one {list(array.shape)}")
    if dtype == "BF16":
        if array.dtype.name == "bfloat16":
            return array.tobytes()
        bits = np.ascontiguousarray(array, dtype="<f4").view("<u4").astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        quiet = np.where(np.isnan(np.asarray(array, np.float32)), np.uint64(0x7FC0), rounded)
        return quiet.astype("<u2").tobytes()
    if dtype not in _NUMPY:
        raise _failed(name, f"is stored as {dtype}, which whole tensors cannot be cast to; send ranges")
    return np.ascontiguousarray(array, dtype=_NUMPY[dtype]).tobytes()


def _failed(name: str, why: str) -> HotloopError:
    do = "Publish an anchor of this policy and load that."
    return HotloopError("install_failed", why, where=f"tensor {name}", do=do)


def _cut(patch: Patch) -> Iterator[Patch]:
    """Cut a patch into parts that lie in one window each."""
    ends = np.cumsum(patch.lengths)
    for begin, end in iter_windows(patch.offsets, patch.lengths, _WINDOW_BYTES):
        offsets, lengths = patch.offsets[begin:end], patch.lengths[begin:end]
        data = patch.data[int(ends[begin] - patch.lengths[begin]) : int(ends[end - 1])]
        if len(data) <= _WINDOW_BYTES:
            yield Patch(offsets, lengths, data)
            continue
        for at in range(0, len(data), _WINDOW_BYTES):  # one long range
            piece = data[at : at + _WINDOW_BYTES]
            yield Patch(offsets + at, np.array([len(piece)]), piece)


def _exchange_window(descriptor: int, patch: Patch) -> Patch:
    """Write one window's ranges; return what was there."""
    start = int(patch.offsets[0])
    size = int((patch.offsets + patch.lengths).max()) - start
    old = os.pread(descriptor, size, start)
    if len(old) != size:
        raise _failed(f"byte {start}", f"the file ends {size - len(old)} bytes early")
    if len(patch.offsets) == 1:
        before, new = np.frombuffer(old, np.uint8), patch.data.data
    else:
        positions = expand_ranges(patch.offsets - start, patch.lengths)
        window = np.frombuffer(bytearray(old), np.uint8)
        before = window[positions]
        window[positions] = patch.data
        new = window.data
    while new.nbytes:
        written = os.pwrite(descriptor, new, start)
        new, start = new[written:], start + written
    return Patch(patch.offsets, patch.lengths, before)
