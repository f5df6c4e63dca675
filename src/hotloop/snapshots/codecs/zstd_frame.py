"""The outside of zstd frames: where they end, what size they claim, and frames of nothing but zeros.

Owns: walking a payload's frames and blocks without decompressing, writing the frame of an unchanged tensor by hand,
and the compression parameters of each level.

Promises: `walk_frames` accepts exactly the payloads whose frames are all there, with nothing after the last one; a
decoder that runs on such a payload cannot stop early without saying so. Its work is bounded by the tensor's size, not
by what the payload claims.

Does not do: entropy decoding. Whether a block's content is sound is for the zstd library to find out.

Source: RFC 8878, sections 3.1.1 (frame and block headers) and 3.1.2 (skippable frames).
"""

from __future__ import annotations

from dataclasses import dataclass

import zstandard

MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC = 0x184D2A50
MAX_BLOCK_BYTES = 128 << 10
MAX_WINDOW_BYTES = 128 << 20
"""Frames that need a larger window are refused; it is also the zstd library's own limit."""
_RAW, _RLE, _RESERVED = 0, 1, 3
_SMALLEST_USUAL_BLOCK_BYTES = 64
_FEW_BLOCKS = 1024
_MOST_QUICK_LEVEL = 4
_SPARSE_FRAC = 1 / 256
# Window descriptor of RFC 8878 3.1.1.1.2 for 128 KiB: exponent 17 - 10, mantissa 0.
_WINDOW_128_KIB = (17 - 10) << 3


class FrameError(ValueError):
    """A payload is not a sequence of complete zstd frames. The codec turns it into `decode_failed`."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a walk over one tensor's payload found."""

    frames: int
    """Frames with content; skippable ones are not counted."""
    content_bytes: int | None
    """The sum of the sizes that the frames state; None when one does not state it."""
    is_zero: bool
    """Whether every block is a run of zeros and no frame has a checksum, so that decoding can be left out."""
    zero_bytes: int
    """How many bytes the runs of zeros expand to."""


def render_zero_frame(nbytes: int) -> bytes:
    """Return one complete frame that expands to `nbytes` zero bytes: 4 bytes for each 128 KiB."""
    header = bytearray(MAGIC.to_bytes(4, "little"))
    is_single_segment = nbytes <= MAX_BLOCK_BYTES
    if nbytes < 256 and is_single_segment:
        flag, size = 0, nbytes.to_bytes(1, "little")
    elif 256 <= nbytes < 256 + (1 << 16):
        flag, size = 1, (nbytes - 256).to_bytes(2, "little")
    elif nbytes < 1 << 32:
        flag, size = 2, nbytes.to_bytes(4, "little")
    else:
        flag, size = 3, nbytes.to_bytes(8, "little")
    header.append(flag << 6 | is_single_segment << 5)
    if not is_single_segment:
        header.append(_WINDOW_128_KIB)
    header += size
    if nbytes == 0:
        return bytes(header) + b"\x01\x00\x00"  # one last raw block of no bytes
    whole_blocks, rest = divmod(nbytes - 1, MAX_BLOCK_BYTES)
    return (
        bytes(header) + _render_zero_block(MAX_BLOCK_BYTES, False) * whole_blocks + _render_zero_block(rest + 1, True)
    )


def _render_zero_block(nbytes: int, is_last: bool) -> bytes:
    return (nbytes << 3 | _RLE << 1 | is_last).to_bytes(3, "little") + b"\x00"


def walk_frames(payload: memoryview, tensor_bytes: int) -> Payload:
    """Follow the frame and block headers of a payload to its last byte.

    Args:
        payload: the bytes of one delta entry.
        tensor_bytes: the most bytes that the payload may expand to; bounds the walk.
    Raises:
        FrameError: when a frame is cut off, has no magic, is followed by other bytes, names a dictionary, or is split
            into absurdly many blocks.
    """
    position, frames, zero_bytes = 0, 0, 0
    content_bytes: int | None = 0
    is_zero = True
    blocks_left = _FEW_BLOCKS + tensor_bytes // _SMALLEST_USUAL_BLOCK_BYTES
    while position < len(payload):
        magic = int.from_bytes(_take(payload, position, 4), "little")
        if magic & 0xFFFFFFF0 == SKIPPABLE_MAGIC:
            blocks_left -= 1
            position += 8 + int.from_bytes(_take(payload, position + 4, 4), "little")
            if position > len(payload):
                raise FrameError("a skippable frame is cut off")
            if blocks_left < 0:
                raise FrameError("too many frames for the tensor's size")
            continue
        if magic != MAGIC:
            raise FrameError(f"{'bytes after the last frame' if frames else 'no zstd magic number'} at byte {position}")
        position, stated, has_checksum = _walk_frame_header(payload, position + 4)
        content_bytes = None if content_bytes is None or stated is None else content_bytes + stated
        position, blocks_left, frame_zeros, frame_is_zero = _walk_blocks(payload, position, blocks_left)
        zero_bytes += frame_zeros
        is_zero = is_zero and frame_is_zero and not has_checksum
        if has_checksum:
            _take(payload, position, 4)
            position += 4
        frames += 1
    return Payload(frames, content_bytes, is_zero, zero_bytes)


def _take(payload: memoryview, position: int, count: int) -> memoryview:
    if position + count > len(payload):
        raise FrameError(f"cut off at byte {len(payload)}")
    return payload[position : position + count]


def _walk_frame_header(payload: memoryview, position: int) -> tuple[int, int | None, bool]:
    """Return the position after the header, the content size it states, and whether a checksum will follow."""
    descriptor = _take(payload, position, 1)[0]
    position += 1
    if descriptor & 0x03:
        raise FrameError("the frame names a dictionary")
    if descriptor & 0x08:
        raise FrameError("the frame header has its reserved bit set")
    is_single_segment = bool(descriptor & 0x20)
    if not is_single_segment:
        window = _take(payload, position, 1)[0]
        base = 1 << (10 + (window >> 3))
        if base + (base >> 3) * (window & 7) > MAX_WINDOW_BYTES:
            raise FrameError(f"the frame needs a window above {MAX_WINDOW_BYTES} bytes")
        position += 1
    flag = descriptor >> 6
    width = (1 if is_single_segment else 0, 2, 4, 8)[flag]
    stated: int | None = None
    if width:
        stated = int.from_bytes(_take(payload, position, width), "little") + (256 if width == 2 else 0)
    if is_single_segment and (stated or 0) > MAX_WINDOW_BYTES:
        raise FrameError(f"the frame needs a window above {MAX_WINDOW_BYTES} bytes")
    return position + width, stated, bool(descriptor & 0x04)


def _walk_blocks(payload: memoryview, position: int, blocks_left: int) -> tuple[int, int, int, bool]:
    """Return the position after the last block, the blocks still allowed, zero bytes, and whether all were zero."""
    end = len(payload)
    zero_bytes, is_zero, is_last = 0, True, False
    while not is_last:
        if position + 3 > end:
            raise FrameError("the last block is missing")
        head = payload[position] | payload[position + 1] << 8 | payload[position + 2] << 16
        is_last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        position += 3
        if size > MAX_BLOCK_BYTES or kind == _RESERVED:
            raise FrameError(f"a block header before byte {position} is not valid")
        stored = 1 if kind == _RLE else size
        if position + stored > end:
            raise FrameError("the last block is cut off")
        if kind == _RLE and payload[position] == 0:
            zero_bytes += size
        elif size or kind != _RAW:
            is_zero = False
        position += stored
        blocks_left -= 1
        if blocks_left < 0:
            raise FrameError("too many blocks for the tensor's size")
    return position, blocks_left, zero_bytes, is_zero


def choose_parameters(level: int, changed_frac: float | None) -> tuple[int, int | None]:
    """Return zstd's level and window (as a power of two; None means the level's own) for a tensor.

    A sparse difference repeats nothing but zeros, which lie just before. A short window keeps the tables in cache, and
    makes level 1 refer to the byte before, which costs the fewest bits: where 1 % of bf16 values moved by one step,
    level 1 with 64 KiB is 20 % smaller than level 3 and compresses 1.5 times as fast. Half of it compresses slower and
    decodes slower; 128 KiB decodes 3 % faster, encodes 8 % slower and is 5 % larger, but a fifth smaller at 0.1 %
    of values. Level 3 refers further back and so decodes faster, most of all where the runs of zeros are long: each is
    copied from one byte before itself otherwise. So levels 3 and 4 become level 1 unless very little changed.

    Args:
        level: what the user asked for.
        changed_frac: share of changed bytes, 0..1, at the first change; None for payloads that are not differences.
    """
    if changed_frac is None or level > _MOST_QUICK_LEVEL or level < 1:
        return level, None
    if changed_frac > _SPARSE_FRAC:
        return 1, 16
    return (1, 17) if level <= 2 else (3, 19)


def make_compressor(level: int, content_bytes: int, changed_frac: float | None = None) -> zstandard.ZstdCompressionObj:
    """Return a compressor of one frame that states its content size and has no checksum.

    Args:
        level: zstd level, negative ones included; see `choose_parameters`.
        content_bytes: exactly how many bytes will be fed.
        changed_frac: see `choose_parameters`.
    """
    chosen, window_log = choose_parameters(level, changed_frac)
    options = {"window_log": window_log} if window_log is not None and content_bytes > 1 << window_log else {}
    parameters = zstandard.ZstdCompressionParameters.from_level(
        chosen, source_size=content_bytes, write_content_size=1, write_checksum=0, write_dict_id=0, **options
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=content_bytes)


class PayloadReader:
    """Expand a walked payload piece by piece, never further than asked."""

    def __init__(self, payload: memoryview) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(payload, read_across_frames=True)

    def fill(self, target: memoryview) -> int:
        """Fill a buffer; return fewer bytes only at the end of the content.

        Raises:
            FrameError: when the library finds a block that is not sound, or a checksum that differs.
        """
        count = 0
        try:
            while count < len(target):
                more = self._stream.readinto(target[count:])
                if not more:
                    break
                count += more
        except zstandard.ZstdError as error:
            raise FrameError(str(error)) from error
        return count

    def is_at_end(self) -> bool:
        """Whether no content is left; reads one byte to find out.

        Raises:
            FrameError: as `fill`.
        """
        return self.fill(memoryview(bytearray(1))) == 0
