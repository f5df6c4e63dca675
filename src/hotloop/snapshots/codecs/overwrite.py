"""The `overwrite` payload: positions and new values in place of a difference.

Owns: encoding a tensor as changed byte positions and values, and decoding it against its base.

Promises: a payload is read as a stream, with positions checked to lie in the tensor and to rise; memory stays bounded
whatever the payload claims. Decoding it a second time on its own result gives the same result.

Layout after expansion, little-endian: count as u32, then `count` byte positions as u32, then `count` byte values.
Tensors above 4 GiB have no position for their last bytes, so they are refused when encoding.

Source: hot_load.md section 3.2 (slime 624b824a).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs.difference import (
    PIECE_BYTES,
    Encoded,
    iter_differences,
    make_buffer,
    make_hashers,
    refuse_size,
    view_bytes,
)
from hotloop.snapshots.codecs.kernel import Bytes
from hotloop.snapshots.codecs.sink import Sink
from hotloop.snapshots.codecs.spool import Spool
from hotloop.snapshots.codecs.zstd_frame import FrameError, PayloadReader, make_compressor

COUNT_BYTES = 4
POSITION_BYTES = 4
_POSITION = np.dtype("<u4")
MAX_TENSOR_BYTES = 1 << 32


def compute_most_bytes(tensor_bytes: int) -> int:
    """Return how many bytes the payload of a tensor may expand to at most: every byte changed."""
    return COUNT_BYTES + tensor_bytes * (POSITION_BYTES + 1)


def encode_overwrite(
    old: memoryview, new: memoryview, *, checksum_format: str, level: int, scratch: Path | None = None
) -> Encoded:
    """Encode a tensor as one zstd frame of positions and values. Arguments as `difference.encode_xor`.

    Raises:
        SnapshotError: `unsupported_format` for a tensor above 4 GiB.
    """
    if new.nbytes > MAX_TENSOR_BYTES:
        raise SnapshotError(
            "unsupported_format",
            f"overwrite cannot address a tensor of {new.nbytes} bytes; its positions have 32 bits",
            do="Use delta_encoding xor.",
            details={"delta_encoding": "overwrite", "nbytes": new.nbytes},
        )
    hasher, adler = make_hashers(checksum_format, with_adler32=True)
    assert adler is not None
    new_bytes = view_bytes(new)
    positions, values = Spool(scratch), Spool(scratch)
    hashers = [hasher] if hasher is adler else [hasher, adler]
    for position, piece, count in iter_differences(view_bytes(old), new_bytes, hashers):
        if count:
            found = np.flatnonzero(piece) + position
            positions.append(found.astype(_POSITION).data.cast("B"))
            values.append(new_bytes[found].data)
    count = values.nbytes
    compressor = make_compressor(level, COUNT_BYTES + count * (POSITION_BYTES + 1))
    payload = Spool(scratch)
    for part in (memoryview(count.to_bytes(COUNT_BYTES, "little")), positions.view(), values.view()):
        for begin in range(0, len(part), PIECE_BYTES):
            payload.append(compressor.compress(part[begin : begin + PIECE_BYTES]))
    payload.append(compressor.flush())
    return Encoded(payload.view(), adler.value, hasher.hexdigest(), count)


def decode_overwrite(
    old: memoryview,
    payload: memoryview,
    hashers: Sequence[checksum.Hasher],
    sink: Sink,
    name: str,
    where: str,
    scratch: Path | None,
) -> None:
    """Expand a payload, write its values over the base, give the pieces to a sink.

    Raises:
        FrameError: when the payload is not sound, or a position does not rise or lies outside.
        SnapshotError: `size_mismatch` when the payload's size does not fit its count.
    """
    base = view_bytes(old)
    reader = PayloadReader(payload)
    head = bytearray(COUNT_BYTES)
    if reader.fill(memoryview(head)) < COUNT_BYTES:
        raise FrameError("the count of changed bytes is missing")
    count = int.from_bytes(head, "little")
    if count > base.nbytes:
        raise FrameError(f"{count} changed bytes in a tensor of {base.nbytes}")
    positions = _read_positions(reader, count, base.nbytes, scratch)
    _patch(base, positions, reader, hashers, sink)
    if not reader.is_at_end():
        raise refuse_size(name, compute_most_bytes(count), compute_most_bytes(count) + 1, where)


def _read_positions(
    reader: PayloadReader, count: int, tensor_bytes: int, scratch: Path | None
) -> npt.NDArray[np.uint32]:
    spool = Spool(scratch)
    last = -1
    for begin in range(0, count, PIECE_BYTES):
        piece = np.empty(min(PIECE_BYTES, count - begin), _POSITION)
        if reader.fill(piece.data.cast("B")) < piece.nbytes:
            raise FrameError("positions are missing")
        if int(piece[0]) <= last or (piece[1:] <= piece[:-1]).any():
            raise FrameError("positions do not rise")
        last = int(piece[-1])
        spool.append(piece.data.cast("B"))
    if last >= tensor_bytes:
        raise FrameError(f"position {last} lies outside a tensor of {tensor_bytes} bytes")
    return np.frombuffer(spool.view(), dtype=_POSITION)


def _patch(
    base: Bytes,
    positions: npt.NDArray[np.uint32],
    reader: PayloadReader,
    hashers: Sequence[checksum.Hasher],
    sink: Sink,
) -> None:
    buffer = make_buffer(base.nbytes)
    done = 0
    for position in range(0, base.nbytes, PIECE_BYTES):
        size = min(PIECE_BYTES, base.nbytes - position)
        until = int(np.searchsorted(positions, position + size))
        if until == done:
            sink.keep(base, position, size, hashers)
            continue
        values = np.empty(until - done, np.uint8)
        if reader.fill(values.data) < values.nbytes:
            raise FrameError("values are missing")
        places = positions[done:until].astype(np.int64)
        place = sink.place(position, size)
        difference = buffer if place is None else place
        difference[:] = 0
        difference[places - position] = base[places] ^ values
        sink.take(base, position, size, difference, hashers)
        done = until
