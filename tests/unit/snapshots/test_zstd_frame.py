"""Frames: zeros written by hand, and walks that find every end."""

from __future__ import annotations

import pytest
import zstandard

from hotloop.snapshots.codecs.zstd_frame import (
    FrameError,
    PayloadReader,
    choose_parameters,
    make_compressor,
    render_zero_frame,
    walk_frames,
)

SIZES = [0, 1, 255, 256, 65_791, 65_792, 131_071, 131_072, 131_073, 262_144, 1_000_001]


def walk(payload: bytes, tensor_bytes: int = 1 << 20) -> object:
    return walk_frames(memoryview(payload), tensor_bytes)


@pytest.mark.parametrize("size", SIZES)
def test_the_library_expands_a_handmade_zero_frame_to_as_many_zeros(size: int) -> None:
    frame = render_zero_frame(size)
    assert zstandard.get_frame_parameters(frame).content_size == size
    assert not zstandard.get_frame_parameters(frame).has_checksum
    assert zstandard.ZstdDecompressor().decompress(frame) == bytes(size)
    assert len(frame) <= 18 + 4 * -(-size // 131_072)
    found = walk_frames(memoryview(frame), size)
    assert (found.frames, found.content_bytes, found.zero_bytes) == (1, size, size)
    assert found.is_zero


def test_a_zero_frame_above_4_gib_states_its_size_in_eight_bytes() -> None:
    size = (5 << 30) + 3
    frame = render_zero_frame(size)
    assert zstandard.get_frame_parameters(frame).content_size == size
    assert walk_frames(memoryview(frame), size).zero_bytes == size
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        assert reader.read(1000) == bytes(1000)


def test_every_level_gives_one_frame_with_its_size_and_no_checksum() -> None:
    data = bytes(range(256)) * 4096
    for level in (-7, -1, 1, 2, 3, 4, 5, 9, 15, 19):
        compressor = make_compressor(level, len(data))
        frame = compressor.compress(data[:1000]) + compressor.compress(data[1000:]) + compressor.flush()
        found = walk_frames(memoryview(frame), len(data))
        assert (found.frames, found.content_bytes, found.is_zero) == (1, len(data), False)
        assert zstandard.ZstdDecompressor().decompress(frame) == data


def test_several_frames_skippable_ones_and_checksums_are_walked() -> None:
    plain = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compressobj()
    unsized = plain.compress(b"abc" * 100) + plain.flush()
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    payload = render_zero_frame(10) + skippable + unsized
    found = walk_frames(memoryview(payload), 310)
    assert (found.frames, found.content_bytes, found.zero_bytes, found.is_zero) == (2, None, 10, False)
    target = bytearray(400)
    reader = PayloadReader(memoryview(payload))
    assert reader.fill(memoryview(target)) == 310
    assert bytes(target[:310]) == bytes(10) + b"abc" * 100
    assert reader.is_at_end()


def test_a_zero_frame_with_a_checksum_is_left_to_the_library() -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(300_000))
    assert not walk_frames(memoryview(frame), 300_000).is_zero


def test_nothing_expands_to_nothing() -> None:
    found = walk_frames(memoryview(b""), 0)
    assert (found.frames, found.content_bytes, found.is_zero) == (0, 0, True)


@pytest.mark.parametrize("level", [1, 3])
def test_a_frame_cut_anywhere_is_refused(level: int) -> None:
    frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(b"some text, some text" * 3)
    for size in range(1, len(frame)):
        with pytest.raises(FrameError):
            walk(frame[:size])
    walk(frame)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda frame: frame + b"x", "cut off|magic|after the last"),
        (lambda frame: frame + b"xxxx", "after the last frame"),
        (lambda frame: b"\0\0\0\0" + frame[4:], "magic"),
        (lambda frame: frame[:4] + bytes([frame[4] | 0x08]) + frame[5:], "reserved"),
        (lambda frame: frame[:4] + bytes([frame[4] | 0x01]) + frame[5:], "dictionary"),
        (lambda frame: frame[:-3] + (7).to_bytes(3, "little"), "not valid"),
        (lambda frame: b"\x5a\x2a\x4d\x18\xff\xff\xff\xff" + frame, "skippable"),
    ],
)
def test_a_spoilt_outline_is_refused(change: object, match: str) -> None:
    assert callable(change)
    with pytest.raises(FrameError, match=match):
        walk(change(render_zero_frame(0)))


def test_a_window_above_128_mib_is_refused() -> None:
    wide = bytes.fromhex("28b52ffd") + bytes([0x00, (28 - 10) << 3]) + b"\x01\x00\x00"
    with pytest.raises(FrameError, match="window"):
        walk(wide)
    fits = bytes.fromhex("28b52ffd") + bytes([0x00, (27 - 10) << 3]) + b"\x01\x00\x00"
    walk(fits)


def test_a_payload_of_endless_empty_blocks_is_refused_after_a_bounded_walk() -> None:
    empty_block = b"\x00\x00\x00"
    payload = bytes.fromhex("28b52ffd0038") + empty_block * 5000 + b"\x01\x00\x00"
    with pytest.raises(FrameError, match="too many blocks"):
        walk(payload, 1000)


def test_a_payload_of_endless_skippable_frames_is_refused() -> None:
    payload = ((0x184D2A50).to_bytes(4, "little") + bytes(4)) * 5000
    with pytest.raises(FrameError, match="too many frames"):
        walk(payload, 1000)


@pytest.mark.parametrize(
    ("level", "changed_frac", "window_bytes"),
    [
        (1, 0.001, 128 << 10),
        (2, 0.001, 128 << 10),
        (1, 0.01, 64 << 10),
        (3, 0.001, 512 << 10),
        (3, 0.01, 64 << 10),
        (4, 0.5, 64 << 10),
        (2, 0.5, 64 << 10),
    ],
)
def test_a_frame_of_a_sparse_difference_has_a_short_window(level: int, changed_frac: float, window_bytes: int) -> None:
    data = (bytes(99) + b"x") * 40_000
    compressor = make_compressor(level, len(data), changed_frac)
    frame = compressor.compress(data) + compressor.flush()
    assert zstandard.get_frame_parameters(frame).window_size == window_bytes
    assert zstandard.ZstdDecompressor().decompress(frame) == data


@pytest.mark.parametrize("level", [-5, 5, 12])
def test_other_levels_go_to_the_library_as_they_are(level: int) -> None:
    assert choose_parameters(level, 0.01) == (level, None)
    assert choose_parameters(3, None) == (3, None)
