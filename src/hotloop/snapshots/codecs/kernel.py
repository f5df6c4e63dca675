"""The inner loops over one piece of a tensor: an optional C library, and numpy where it is absent.

Owns: choosing one of the two when the package is imported, and the checks that keep the C loops inside their buffers.

Promises: both give equal results for equal input (one contract suite runs over both). The C library `_kernel.so` lies
beside this file if the package was built where a C compiler was; without it, or when it was built for another version
of this file, numpy does the work.

Does not do: zstd, files, threads. An instance holds scratch arrays, so each tensor at work has its own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hotloop.snapshots.checksum import AdlerHasher, Hasher

ABI = 1
"""Raised together with `hotloop_kernel_abi` in kernel.c whenever a function there changes."""
LIBRARY = Path(__file__).with_name("_kernel.so")
WORD_BYTES = 8
"""Changed ranges start and end at multiples of this within a tensor, its end excepted."""
LINE_BYTES = 64
"""Difference buffers are padded to this, so that eight word flags can be looked at as one."""
DENSE_DIVISOR = 3
"""A changed word costs 16 bytes for its range and 8 for itself, so above one word in three one range is smaller."""

Bytes = npt.NDArray[np.uint8]
Ranges = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceChanges:
    """The changed words of one piece; the arrays may be used again by the next call."""

    ranges: Ranges
    """[R, 2] begin and end, bytes from the tensor's start; the last one ends at the piece's end at the latest."""
    data: Bytes
    """The new bytes of all ranges, one after the other."""


class Kernel(Protocol):
    """Three loops over one piece of whole tensors: `size` bytes from `position` on, a multiple of 8.

    A difference is `old XOR new` of the piece, at the start of a buffer; `merge` wants it padded to `LINE_BYTES`.
    """

    def compare(self, old: Bytes, new: Bytes, position: int, size: int, difference: Bytes) -> int:
        """Write a difference, and return how many of its bytes are not zero."""

    def patch(self, base: Bytes, position: int, size: int, difference: Bytes) -> int:
        """Turn a difference into the new bytes, in place, and return how many of its bytes were not zero."""

    def merge(
        self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]
    ) -> PieceChanges | None:
        """Feed the new bytes to hashers, and return the changed words, None if there are none.

        Args:
            difference: spent afterwards.
        """


def pad_to_lines(nbytes: int) -> int:
    """Return the next multiple of `LINE_BYTES`."""
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


def _check_piece(position: int, size: int, difference: Bytes, *tensors: Bytes, needed: int | None = None) -> None:
    """Keep the loops inside their buffers; what fails here is our own mistake, never a file's."""
    room = min(tensor.nbytes for tensor in tensors)
    needed = size if needed is None else needed
    if not (0 <= position <= position + size <= room) or needed > difference.nbytes:
        raise ValueError(f"{size} bytes at {position} of {room}, in a buffer of {difference.nbytes}")


class NumpyKernel:
    """The loops in numpy: several passes over a piece that stays in the core's cache."""

    def __init__(self) -> None:
        self._flags = np.empty(0, np.bool_)
        self._new = np.empty(0, np.uint8)

    def compare(self, old: Bytes, new: Bytes, position: int, size: int, difference: Bytes) -> int:
        """See `Kernel`."""
        _check_piece(position, size, difference, old, new)
        piece = slice(position, position + size)
        np.bitwise_xor(old[piece], new[piece], out=difference[:size])
        return int(np.count_nonzero(difference[:size]))

    def patch(self, base: Bytes, position: int, size: int, difference: Bytes) -> int:
        """See `Kernel`."""
        _check_piece(position, size, difference, base)
        count = int(np.count_nonzero(difference[:size]))
        np.bitwise_xor(base[position : position + size], difference[:size], out=difference[:size])
        return count

    def merge(
        self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]
    ) -> PieceChanges | None:
        """See `Kernel`."""
        _check_piece(position, size, difference, base, needed=pad_to_lines(size))
        padded = difference[: pad_to_lines(size)]
        padded[size:] = 0
        if self._new.nbytes < padded.nbytes:
            self._new = np.zeros(padded.nbytes, np.uint8)
            self._flags = np.empty(padded.nbytes // WORD_BYTES, np.bool_)
        flags = self._flags[: padded.nbytes // WORD_BYTES]
        np.not_equal(padded.view(np.uint64), 0, out=flags)
        found = find_changed_words(flags)
        new = base[position : position + size]
        if found.size:
            new = self._new[:size]
            np.bitwise_xor(base[position : position + size], padded[:size], out=new)
        for hasher in hashers:
            hasher.update(new.data)
        return self._gather(found, size, position) if found.size else None

    def _gather(self, found: npt.NDArray[np.int64], size: int, position: int) -> PieceChanges:
        words = self._new.view(np.uint64)
        if found.size > -(-size // WORD_BYTES) // DENSE_DIVISOR:
            first, end = int(found[0]), int(found[-1]) + 1
            ranges = np.array([[first, end]], np.int64)
            ranges *= WORD_BYTES
            ranges += position
            data = words[first:end].copy()
        else:
            # One range for each word: joining neighbours takes longer than it saves where few words changed.
            ranges = np.empty((found.size, 2), np.int64)
            np.multiply(found, WORD_BYTES, out=ranges[:, 0])
            ranges[:, 0] += position
            np.add(ranges[:, 0], WORD_BYTES, out=ranges[:, 1])
            data = words[found]
        padding = max(0, int(ranges[-1, 1]) - position - size)
        ranges[-1, 1] -= padding
        return PieceChanges(ranges, data.view(np.uint8)[: data.nbytes - padding])


def find_changed_words(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return where flags are set; looks at eight at a time first, which pays while few are set.

    Args:
        flags: as many as a multiple of 8.
    """
    lines = flags.view(np.uint64)
    found = np.flatnonzero(lines != 0)
    if 2 * found.size > lines.size:
        return np.flatnonzero(flags)
    within = np.flatnonzero(lines[found].view(np.bool_))
    indexes: npt.NDArray[np.int64] = found[within >> 3] * 8 + (within & 7)
    return indexes


class NativeKernel:
    """The loops of kernel.c: one pass each, and Adler-32 of the new bytes from the base's and what changed."""

    _library: ctypes.CDLL | None = None

    def __init__(self) -> None:
        assert self._library is not None, "load_library comes first"
        self._calls = self._library
        self._ranges = np.empty((0, 2), np.int64)
        self._data = np.empty(0, np.uint8)
        self._facts = np.zeros(3, np.int64)
        self._addresses: dict[int, tuple[npt.NDArray[Any], int]] = {}

    @classmethod
    def load_library(cls, path: Path = LIBRARY) -> bool:
        """Load the C library; return False where it is absent, does not load, or is of another version."""
        try:
            library = ctypes.CDLL(str(path))
            library.hotloop_kernel_abi.restype = ctypes.c_uint32
            is_ours: bool = library.hotloop_kernel_abi() == ABI
        except (OSError, AttributeError):  # no such file, another system's file, another library
            return False
        if not is_ours or sys.byteorder != "little":
            return False
        address, size = ctypes.c_void_p, ctypes.c_size_t
        library.hotloop_compare.argtypes = (address, address, address, size)
        library.hotloop_compare.restype = ctypes.c_uint64
        library.hotloop_patch.argtypes = (address, address, size)
        library.hotloop_patch.restype = ctypes.c_uint64
        library.hotloop_merge.argtypes = (address, address, size, ctypes.c_int64, address, address, address)
        library.hotloop_merge.restype = ctypes.c_int64
        cls._library = library
        return True

    def compare(self, old: Bytes, new: Bytes, position: int, size: int, difference: Bytes) -> int:
        """See `Kernel`."""
        _check_piece(position, size, difference, old, new)
        count: int = self._calls.hotloop_compare(
            self._address(old) + position, self._address(new) + position, self._address(difference, writes=True), size
        )
        return count

    def patch(self, base: Bytes, position: int, size: int, difference: Bytes) -> int:
        """See `Kernel`."""
        _check_piece(position, size, difference, base)
        count: int = self._calls.hotloop_patch(
            self._address(base) + position, self._address(difference, writes=True), size
        )
        return count

    def merge(
        self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]
    ) -> PieceChanges | None:
        """See `Kernel`."""
        _check_piece(position, size, difference, base, needed=pad_to_lines(size))
        if self._data.nbytes < size:
            self._data = np.empty(size, np.uint8)
            self._ranges = np.empty((size // (WORD_BYTES * DENSE_DIVISOR) + 1, 2), np.int64)
        # Before the loop, which then finds the base's piece in the cache.
        others = []
        for hasher in hashers:
            if isinstance(hasher, AdlerHasher):
                hasher.update(base[position : position + size].data)
            else:
                others.append(hasher)
        count = self._calls.hotloop_merge(
            self._address(base) + position,
            self._address(difference),
            size,
            position,
            self._address(self._ranges, writes=True),
            self._address(self._data, writes=True),
            self._address(self._facts, writes=True),
        )
        filled, low, high = self._facts.tolist()
        for hasher in hashers:
            if isinstance(hasher, AdlerHasher):
                hasher.shift(low, high)
        if others:
            self.patch(base, position, size, difference)
            for hasher in others:
                hasher.update(difference[:size].data)
        return PieceChanges(self._ranges[:count], self._data[:filled]) if count else None

    def _address(self, array: npt.NDArray[Any], *, writes: bool = False) -> int:
        """Return where an array lies. numpy takes microseconds to say so, hence once for each array; all are kept."""
        known = self._addresses.get(id(array))
        if known is None:
            if not array.flags.c_contiguous or (writes and not array.flags.writeable):
                raise ValueError("the array must be contiguous, and writable where it is written to")
            known = self._addresses[id(array)] = (array, array.ctypes.data)
        return known[1]


NATIVE, NUMPY = "native", "numpy"
_kernels: dict[str, type[NumpyKernel] | type[NativeKernel]] = {NUMPY: NumpyKernel}
if NativeKernel.load_library():
    _kernels[NATIVE] = NativeKernel
_chosen = NATIVE if NATIVE in _kernels else NUMPY


def name_kernel() -> str:
    """Return which loops are in use: `native` (C) or `numpy`."""
    return _chosen


def list_kernels() -> list[str]:
    """Return the loops that work here."""
    return list(_kernels)


def use_kernel(name: str) -> None:
    """Change which loops tensors use from now on; for tests and benchmarks. Results do not depend on it.

    Raises:
        KeyError: when it does not work here.
    """
    global _chosen
    _chosen = {each: each for each in _kernels}[name]


def make_kernel() -> Kernel:
    """Return the loops in use, with scratch arrays of their own."""
    return _kernels[_chosen]()
