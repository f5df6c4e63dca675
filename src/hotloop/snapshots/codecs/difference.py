"""The inner loops: XOR, checksum and compression of one tensor, and the way back, in pieces that stay in cache.

Owns: encoding one tensor against its base and decoding it again, for the `xor` payload.

Promises: each byte of base and new tensor is read from memory once; every later pass works on a piece that is still
in the core's cache. An unchanged tensor costs no compression and no decompression. Memory per tensor in flight
is a few pieces plus one bounded spool.

Does not do: files, headers, names, threads, the `overwrite` payload, or what becomes of decoded pieces (`sink`).

    base piece --+                                      payload -> zstd -> difference piece --+
                 +- xor -> difference piece -> zstd                                          +- xor -> new piece
    new piece ---+                                      base piece ---------------------------+      |     |
        +-> Adler-32                                                                          checksum    sink
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs.kernel import Bytes, make_kernel, pad_to_lines
from hotloop.snapshots.codecs.sink import Sink
from hotloop.snapshots.codecs.spool import Spool
from hotloop.snapshots.codecs.zstd_frame import PayloadReader, make_compressor, render_zero_frame

PIECE_BYTES = 512 << 10
"""Small enough for the caches, large enough that threads seldom wait for the interpreter lock: with 128 KiB two threads
were no faster than one, with 2 MiB each was slower."""
_ZEROS = bytes(PIECE_BYTES)
_HASH_BYTES = 64 << 20
"""Some Adler-32 implementations count their input in 32 bits."""


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
    kernel = make_kernel()
    difference = make_buffer(new.nbytes)
    for position in range(0, new.nbytes, PIECE_BYTES):
        size = min(PIECE_BYTES, new.nbytes - position)
        count = kernel.compare(old, new, position, size, difference)
        for hasher in hashers:
            hasher.update(new[position : position + size].data)
        yield position, difference[:size], count


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


def make_buffer(tensor_bytes: int) -> Bytes:
    """Return zeros for one piece of a tensor, padded to whole lines."""
    return np.zeros(pad_to_lines(min(PIECE_BYTES, tensor_bytes)), np.uint8)


def decode_xor(old: memoryview, payload: memoryview, hashers: Sequence[checksum.Hasher], sink: Sink) -> int | None:
    """Expand a payload and give it to a sink, piece by piece, together with the base.

    Args:
        old: the base's bytes.
        payload: walked before.
        hashers: the sink feeds the new bytes to them.
    Returns:
        None, or how many bytes the payload expands to when that is not the tensor's size (one more than the size
        stands for all larger ones).
    Raises:
        FrameError: when the payload is not sound.
    """
    base = view_bytes(old)
    reader = PayloadReader(payload)
    buffer = make_buffer(base.nbytes)
    for position in range(0, base.nbytes, PIECE_BYTES):
        size = min(PIECE_BYTES, base.nbytes - position)
        place = sink.place(position, size)
        difference = buffer if place is None else place
        filled = reader.fill(difference[:size].data)
        if filled < size:
            return position + filled
        sink.take(base, position, size, difference, hashers)
    return None if reader.is_at_end() else base.nbytes + 1


def keep_all(old: memoryview, hashers: Sequence[checksum.Hasher], sink: Sink) -> None:
    """Give a tensor that did not change to a sink."""
    base = view_bytes(old)
    for position in range(0, base.nbytes, _HASH_BYTES):
        sink.keep(base, position, min(_HASH_BYTES, base.nbytes - position), hashers)


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
