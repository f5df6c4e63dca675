"""The directory that an engine server reloads its weights from, kept current by patching it in place.

Owns: `LocalCheckpoint`, one `model.safetensors` with its header's names, dtypes and offsets.
Promises: an update that does not fit changes nothing; `write` returns the bytes that it replaced and `restore` puts
them back; new bytes go to absolute positions, so that writing them twice does no harm.
Does not do: adding, removing or renaming tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engines.base import TensorRange
from hotloop.errors import HotloopError, InputError

Patch = tuple[int, memoryview]
"""Position in the file, and bytes."""
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class _Slot:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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

    def write(self, ranges: Sequence[TensorRange], tensors: Mapping[str, Any]) -> list[Patch]:
        """Write new bytes in place.

        Returns: what was there before, for `restore`.

        Raises:
            HotloopError: `install_failed` for a tensor or a range that the checkpoint does not have; nothing changed.
        """
        patches = [patch for each in ranges for patch in self._cut(each)]
        for name, values in tensors.items():
            slot = self._find(name)
            patches.append((slot.begin, memoryview(encode_tensor(name, values, slot.dtype, slot.shape)).cast("B")))
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            before = [(at, memoryview(os.pread(descriptor, data.nbytes, at))) for at, data in patches]
            _write_all(descriptor, patches)
        finally:
            os.close(descriptor)
        return before

    def restore(self, patches: Sequence[Patch]) -> None:
        """Put back what `write` returned; the last patch first, since patches may overlap."""
        if not patches:
            return
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            _write_all(descriptor, patches[::-1])
        finally:
            os.close(descriptor)

    def _cut(self, each: TensorRange) -> list[Patch]:
        slot = self._find(each.name)
        data, at, patches = memoryview(each.data).cast("B"), 0, []
        for offset, length in zip(np.asarray(each.offsets).tolist(), np.asarray(each.lengths).tolist(), strict=True):
            if offset < 0 or length < 0 or slot.begin + offset + length > slot.end:
                raise _failed(each.name, f"a range lies outside the tensor's {slot.end - slot.begin} bytes")
            patches.append((slot.begin + offset, data[at : at + length]))
            at += length
        if at != data.nbytes:
            raise _failed(each.name, f"the ranges cover {at} bytes and {data.nbytes} came")
        return patches

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


def _write_all(descriptor: int, patches: Sequence[Patch]) -> None:
    for at, data in patches:
        left, position = data, at
        while left.nbytes:
            written = os.pwrite(descriptor, left, position)
            left, position = left[written:], position + written
    os.fsync(descriptor)
