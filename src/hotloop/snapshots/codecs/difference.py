"""The inner loops: XOR, checksum and compression of one tensor, and the way back, in pieces that stay in cache.

Owns: encoding one tensor against its base and decoding it again, for the `xor` payload.

Promises: each byte of base and new tensor is read from memory once; every later pass works on a 128 KiB piece that is
still in the core's cache. An unchanged tensor costs no compression and no decompression. Memory per tensor in flight
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

PIECE_BYTES = 128 << 10
"""Base, new and difference pieces together (384 KiB) fit the 512 KiB second-level cache of current server cores."""
_ZEROS = bytes(PIECE_BYTES)
# A run of changed words costs 16 bytes for its ends, so above this share one run over the whole piece is smaller.
_DENSE_SHARE = 1 / 3
_FLUSH_WORDS = 1 << 18

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
            compressor = make_compressor(level, new.nbytes)
            for _ in range(0, position, PIECE_BYTES):
                payload.append(compressor.compress(_ZEROS))
        if compressor is not None:
            payload.append(compressor.compress(piece.data))
        changed_bytes += count
    payload.append(render_zero_frame(new.nbytes) if compressor is None else compressor.flush())
    return Encoded(payload.view(), adler.value, hasher.hexdigest(), changed_bytes)


class ChangeCollector:
    """Gather the changed words of a tensor, piece by piece, as ranges and new bytes."""

    def __init__(self, nbytes: int, scratch: Path | None = None) -> None:
        self._nbytes = nbytes
        self._ranges, self._data = Spool(scratch), Spool(scratch)
        self._positions: list[npt.NDArray[np.int64]] = []
        self._words: list[npt.NDArray[np.uint64]] = []
        self._waiting = 0

    def add(self, position: int, changed: npt.NDArray[np.bool_], new: Bytes) -> None:
        """Take a piece.

        Args:
            position: bytes from the tensor's start; a multiple of 8.
            changed: one flag per 8-byte word of the piece.
            new: the new bytes, padded to whole words.
        """
        words = new.view(np.uint64)
        indexes = np.flatnonzero(changed)
        if indexes.size > words.size * _DENSE_SHARE:
            indexes = np.arange(int(indexes[0]), int(indexes[-1]) + 1)
        elif not indexes.size:
            return
        self._words.append(words[indexes])
        self._positions.append(indexes + position // WORD_BYTES)
        self._waiting += indexes.size
        if self._waiting >= _FLUSH_WORDS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        positions = np.concatenate(self._positions)
        is_first = np.empty(positions.size, np.bool_)
        is_first[0] = True
        np.not_equal(positions[1:], positions[:-1] + 1, out=is_first[1:])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], positions.size) - 1
        ranges = np.stack([positions[first], positions[last] + 1], axis=1) * WORD_BYTES
        self._ranges.append(np.minimum(ranges, self._nbytes).data.cast("B"))
        self._data.append(np.concatenate(self._words).data.cast("B"))
        self._positions, self._words, self._waiting = [], [], 0

    def finish(self) -> tuple[npt.NDArray[np.int64], memoryview]:
        """Return ranges [R, 2] and their new bytes."""
        self._flush()
        ranges = np.frombuffer(self._ranges.view(), dtype=np.int64).reshape(-1, 2)
        # The last word of a tensor may be padded; its range is cut at the tensor's end, so its data is, too.
        padding = -self._nbytes % WORD_BYTES if len(ranges) and int(ranges[-1, 1]) == self._nbytes else 0
        data = self._data.view()
        return ranges, data[: len(data) - padding]


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
    capacity = min(PIECE_BYTES, -(-base.nbytes // WORD_BYTES) * WORD_BYTES)
    difference, new = np.zeros(capacity, np.uint8), np.zeros(capacity, np.uint8)
    changed = np.empty(capacity // WORD_BYTES, np.bool_)
    for position in range(0, base.nbytes, PIECE_BYTES):
        base_piece = base[position : position + PIECE_BYTES]
        size = base_piece.nbytes
        filled = reader.fill(difference[:size].data)
        if filled < size:
            return position + filled
        whole = -(-size // WORD_BYTES) * WORD_BYTES
        difference[size:whole] = 0
        flags = changed[: whole // WORD_BYTES]
        np.not_equal(difference[:whole].view(np.uint64), 0, out=flags)
        if flags.any():
            np.bitwise_xor(base_piece, difference[:size], out=new[:size])
            new[size:whole] = 0
            collector.add(position, flags, new[:whole])
            hashed = new[:size].data
        else:
            hashed = base_piece.data
        for hasher in hashers:
            hasher.update(hashed)
    return None if reader.is_at_end() else base.nbytes + 1


def hash_unchanged(old: memoryview, hashers: Sequence[checksum.Hasher]) -> None:
    """Feed a tensor that did not change to its hashers."""
    for hasher in hashers:
        hasher.update(old)


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
