"""The inner loops: XOR, checksum and compression of one tensor, and the way back, in pieces that stay in cache.

Owns: encoding one tensor against its base and decoding it again, for the `xor` payload.

Promises: each byte of base and new tensor is read from memory once; every later pass works on a piece that is still
in the core's cache. An unchanged tensor costs no compression and no decompression. Memory per tensor in flight
is a few pieces plus one bounded spool.

Does not do: files, headers, names, threads, or the `overwrite` payload.

    base piece --+                                      payload -> zstd -> difference piece --+
                 +- xor -> difference piece -> zstd                                          +- xor -> new piece
    new piece ---+                                      base piece ---------------------------+      |     |
        +-> Adler-32                                                                          checksum    changed words
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs.base import WORD_BYTES
from hotloop.snapshots.codecs.spool import Spool
from hotloop.snapshots.codecs.zstd_frame import PayloadReader, make_compressor, render_zero_frame

PIECE_BYTES = 512 << 10
"""Small enough for the caches, large enough that threads seldom wait for the interpreter lock: with 128 KiB two threads
were no faster than one, with 2 MiB each was slower."""
_ZEROS = bytes(PIECE_BYTES)
# A changed word costs 16 bytes for its range and 8 for itself, so above this share one range over all is smaller.
_DENSE_SHARE = 1 / 3
_HASH_BYTES = 64 << 20
"""Some Adler-32 implementations count their input in 32 bits."""
_LINE_BYTES = 64
"""Buffers are padded to this, so that eight word flags can be looked at as one."""

Bytes = npt.NDArray[np.uint8]


def view_bytes(data: memoryview) -> Bytes:
    """Return a buffer as an array of bytes, without a copy."""
    return np.frombuffer(data, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor's payload."""

    payload: memoryview
    adler32: int
    """Of the new tensor."""
    digest: str
    """Of the new tensor, in the delta's checksum format."""
    changed_bytes: int


def iter_differences(old: Bytes, new: Bytes, hashers: Sequence[checksum.Hasher]) -> Iterator[tuple[int, Bytes, int]]:
    """Yield position, difference and its number of non-zero bytes for each piece, while hashing the new bytes.

    The difference array is used again for the next piece.
    """
    difference = np.empty(min(PIECE_BYTES, new.nbytes), np.uint8)
    for position in range(0, new.nbytes, PIECE_BYTES):
        new_piece = new[position : position + PIECE_BYTES]
        piece = difference[: new_piece.nbytes]
        np.bitwise_xor(old[position : position + PIECE_BYTES], new_piece, out=piece)
        for hasher in hashers:
            hasher.update(new_piece.data)
        yield position, piece, int(np.count_nonzero(piece))


def make_hashers(checksum_format: str, *, with_adler32: bool) -> tuple[checksum.Hasher, checksum.AdlerHasher | None]:
    """Return the hasher of a format, and an Adler-32 one: the same if the format is one, another if it is wanted."""
    hasher = checksum.make_hasher(checksum_format)
    if isinstance(hasher, checksum.AdlerHasher):
        return hasher, hasher
    return hasher, checksum.AdlerHasher(decimal=False) if with_adler32 else None


def encode_xor(
    old: memoryview, new: memoryview, *, checksum_format: str, level: int, scratch: Path | None = None
) -> Encoded:
    """Encode a tensor as one zstd frame of `old XOR new`.

    Args:
        old: the base's bytes.
        new: as many bytes.
        checksum_format: see `checksum.FORMATS`.
        level: zstd level.
        scratch: directory for payloads too large for memory.
    """
    hasher, adler = make_hashers(checksum_format, with_adler32=True)
    assert adler is not None
    hashers = [hasher] if hasher is adler else [hasher, adler]
    payload, changed_bytes, compressor = Spool(scratch), 0, None
    for position, piece, count in iter_differences(view_bytes(old), view_bytes(new), hashers):
        if count and compressor is None:
            compressor = make_compressor(level, new.nbytes, count / piece.nbytes)
            for _ in range(0, position, PIECE_BYTES):
                payload.append(compressor.compress(_ZEROS))
        if compressor is not None:
            payload.append(compressor.compress(piece.data))
        changed_bytes += count
    payload.append(render_zero_frame(new.nbytes) if compressor is None else compressor.flush())
    return Encoded(payload.view(), adler.value, hasher.hexdigest(), changed_bytes)


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


class ChangeCollector:
    """Gather the changed words of a tensor, piece by piece, as ranges and new bytes."""

    def __init__(self, nbytes: int, scratch: Path | None = None) -> None:
        self._nbytes = nbytes
        self._ranges, self._data = Spool(scratch), Spool(scratch)

    def add(self, position: int, indexes: npt.NDArray[np.int64], new: Bytes) -> None:
        """Take a piece.

        Args:
            position: bytes from the tensor's start; a multiple of 8.
            indexes: which 8-byte words of the piece changed; rising, at least one.
            new: the new bytes, padded to whole words.
        """
        words = new.view(np.uint64)
        if indexes.size > words.size * _DENSE_SHARE:
            first, end = int(indexes[0]), int(indexes[-1]) + 1
            ranges = np.array([[first, end]], np.int64)
            ranges *= WORD_BYTES
            ranges += position
            data = words[first:end].copy()
        else:
            # One range for each word: joining neighbours takes longer than it saves where few words changed.
            ranges = np.empty((indexes.size, 2), np.int64)
            np.multiply(indexes, WORD_BYTES, out=ranges[:, 0])
            ranges[:, 0] += position
            np.add(ranges[:, 0], WORD_BYTES, out=ranges[:, 1])
            data = words[indexes]
        ranges[-1, 1] = min(int(ranges[-1, 1]), self._nbytes)
        self._ranges.append(ranges.data.cast("B"))
        self._data.append(data.data.cast("B"))

    def finish(self) -> tuple[npt.NDArray[np.int64], memoryview]:
        """Return ranges [R, 2] and their new bytes."""
        ranges = np.frombuffer(self._ranges.view(), dtype=np.int64).reshape(-1, 2)
        # The last word of a tensor may be padded; its range is cut at the tensor's end, so its data is, too.
        padding = -self._nbytes % WORD_BYTES if len(ranges) and int(ranges[-1, 1]) == self._nbytes else 0
        data = self._data.view()
        return ranges, data[: len(data) - padding]


def make_buffer(tensor_bytes: int) -> Bytes:
    """Return zeros for one piece of a tensor, padded to whole lines."""
    return np.zeros(-(-min(PIECE_BYTES, tensor_bytes) // _LINE_BYTES) * _LINE_BYTES, np.uint8)


def decode_xor(
    old: memoryview, payload: memoryview, hashers: Sequence[checksum.Hasher], collector: ChangeCollector
) -> int | None:
    """Expand a payload, combine it with the base, feed the new bytes to hashers and collector.

    Args:
        old: the base's bytes.
        payload: walked before.
    Returns:
        None, or how many bytes the payload expands to when that is not the tensor's size (one more than the size
        stands for all larger ones).
    Raises:
        FrameError: when the payload is not sound.
    """
    base = view_bytes(old)
    reader = PayloadReader(payload)
    difference, new = make_buffer(base.nbytes), make_buffer(base.nbytes)
    flags = np.empty(difference.nbytes // WORD_BYTES, np.bool_)
    for position in range(0, base.nbytes, PIECE_BYTES):
        piece = base[position : position + PIECE_BYTES]
        size = piece.nbytes
        filled = reader.fill(difference[:size].data)
        if filled < size:
            return position + filled
        difference[size:] = 0
        np.not_equal(difference.view(np.uint64), 0, out=flags)
        changed = find_changed_words(flags)
        if changed.size:
            np.bitwise_xor(piece, difference[:size], out=new[:size])
            collector.add(position, changed, new)
            piece = new[:size]
        for hasher in hashers:
            hasher.update(piece.data)
    return None if reader.is_at_end() else base.nbytes + 1


def hash_unchanged(old: memoryview, hashers: Sequence[checksum.Hasher]) -> None:
    """Feed a tensor that did not change to its hashers."""
    for begin in range(0, len(old), _HASH_BYTES):
        for hasher in hashers:
            hasher.update(old[begin : begin + _HASH_BYTES])


def refuse_size(name: str, expected: int, found: int, where: str) -> SnapshotError:
    """Return the error of a payload that expands to the wrong number of bytes."""
    amount = f"more than {expected}" if found > expected else str(found)
    return SnapshotError(
        "size_mismatch",
        f"the payload of tensor {name!r} expands to {amount} bytes; the base has {expected}",
        where=where,
        do="The delta was made against another base. Fetch it again, or publish an anchor.",
        details={"tensor": name, "expected": expected, "found": found},
    )
