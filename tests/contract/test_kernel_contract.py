"""One suite over both implementations of the codec's inner loops, checked against the definitions in plain numpy."""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.snapshots import checksum
from hotloop.snapshots.codecs import kernel
from hotloop.snapshots.codecs.kernel import LINE_BYTES, NativeKernel, NumpyKernel, PieceChanges, pad_to_lines

Bytes = npt.NDArray[np.uint8]
KINDS = [NumpyKernel, NativeKernel] if kernel.NATIVE in kernel.list_kernels() else [NumpyKernel]
needs_native = pytest.mark.skipif(len(KINDS) == 1, reason="the package was built without a C compiler")

shares = st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.3, 0.34, 0.6, 1.0])
sizes = st.one_of(st.integers(1, 200), st.integers(1, 20_000), st.sampled_from([4095, 4096, 4097, 8192, 12_289]))


def make_piece(seed: int, size: int, share: float, before: int, after: int) -> tuple[Bytes, Bytes]:
    """A base with bytes before and after the piece, and a difference buffer whose padding is not zero."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, before + size + after, dtype=np.uint8)
    difference = rng.integers(0, 256, pad_to_lines(size), dtype=np.uint8)
    difference[:size] = rng.integers(1, 256, size) * (rng.random(size) < share)
    return base, difference


def check_changes(found: PieceChanges | None, base: Bytes, new: Bytes, position: int) -> None:
    """Check ranges and data against the whole new piece."""
    words = [at for at in range(0, len(new), 8) if (base[at : at + 8] != new[at : at + 8]).any()]
    if not words:
        assert found is None
        return
    assert found is not None
    if len(words) > -(-len(new) // 8) // 3:
        wanted = [[words[0], min(words[-1] + 8, len(new))]]
    else:
        wanted = [[at, min(at + 8, len(new))] for at in words]
    assert (found.ranges - position).tolist() == wanted
    assert found.data.tobytes() == b"".join(new[begin:end].tobytes() for begin, end in wanted)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    size=sizes, share=shares, before=st.integers(0, 40), after=st.sampled_from([0, 1, 7, 100]), seed=st.integers(0, 999)
)
def test_merge_gathers_the_changed_words_and_feeds_the_new_bytes(
    kind: type[NumpyKernel] | type[NativeKernel], size: int, share: float, before: int, after: int, seed: int
) -> None:
    position = 8 * before
    base, difference = make_piece(seed, size, share, position, after)
    piece = base[position : position + size]
    new = piece ^ difference[:size]
    kept = base.copy()
    hashers = [checksum.make_hasher("alder32"), checksum.make_hasher("xxh3-128"), checksum.make_hasher("adler32")]
    fresh = checksum.make_hasher("xxh3-128")
    fresh.update(new.data)
    check_changes(kind().merge(base, position, size, difference, hashers), piece, new, position)
    right = zlib.adler32(new)
    assert [each.hexdigest() for each in hashers] == [str(right), fresh.hexdigest(), f"{right:08x}"]
    assert (base == kept).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(size=sizes, share=shares, before=st.integers(0, 40), seed=st.integers(0, 999))
def test_compare_and_patch_are_each_others_inverse_and_count(
    kind: type[NumpyKernel] | type[NativeKernel], size: int, share: float, before: int, seed: int
) -> None:
    position = 8 * before
    base, difference = make_piece(seed, size, share, position, 5)
    wanted = difference.copy()
    count = int(np.count_nonzero(wanted[:size]))
    loops = kind()
    assert loops.patch(base, position, size, difference) == count
    assert (difference[:size] == base[position : position + size] ^ wanted[:size]).all()
    assert (difference[size:] == wanted[size:]).all()
    new = base.copy()
    new[position : position + size] = difference[:size]
    assert loops.compare(base, new, position, size, difference) == count
    assert (difference == wanted).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [0, 255])
def test_the_largest_sums_of_a_piece_stay_exact(kind: type[NumpyKernel] | type[NativeKernel], byte: int) -> None:
    size = 512 << 10
    base, difference = np.full(size, byte, np.uint8), np.full(size, 255, np.uint8)
    hasher = checksum.make_hasher("alder32")
    kind().merge(base, 0, size, difference, [hasher])
    assert hasher.hexdigest() == str(zlib.adler32(bytes([255 - byte]) * size))


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_do_not_fit_are_refused_before_any_byte_is_touched(
    kind: type[NumpyKernel] | type[NativeKernel],
) -> None:
    loops, base, difference = kind(), np.zeros(100, np.uint8), np.zeros(LINE_BYTES, np.uint8)
    for position, size in ((96, 8), (-8, 8), (0, -1), (0, LINE_BYTES + 1), (104, 0)):
        with pytest.raises(ValueError, match="bytes at"):
            loops.merge(base, position, size, difference, [])
        with pytest.raises(ValueError, match="bytes at"):
            loops.patch(base, position, size, difference)
        with pytest.raises(ValueError, match="bytes at"):
            loops.compare(base, base, position, size, difference)
        with pytest.raises(ValueError, match="bytes at"):
            loops.compare(np.zeros(200, np.uint8), base, position, size, difference)


@needs_native
def test_the_c_loops_refuse_arrays_that_are_not_plain_memory() -> None:
    loops, base = NativeKernel(), np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="contiguous"):
        loops.merge(np.zeros(256, np.uint8)[::2], 0, 64, np.zeros(64, np.uint8), [])
    fixed = np.zeros(64, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        loops.patch(base, 0, 64, fixed)


@pytest.fixture
def guarded() -> Iterator[int]:
    """The address where a page ends after which any access kills the process."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 4 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + 3 * page, page, 0) == 0
    yield start + 3 * page
    assert protect(start + 3 * page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@needs_native
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_the_c_loops_read_and_write_nothing_past_a_piece(guarded: int, share: float) -> None:
    """The base's last byte is the last one before a page that may not be touched; so is every output's."""
    for size in [*range(1, 70), 4095, 4096, 4097, 8191]:
        base = np.frombuffer((ctypes.c_uint8 * size).from_address(guarded - size), np.uint8)
        rng = np.random.default_rng(size)
        base[:] = rng.integers(0, 256, size, dtype=np.uint8)
        difference = (rng.integers(1, 256, size) * (rng.random(size) < share)).astype(np.uint8)
        calls = NativeKernel()._calls
        ranges, data, facts = np.zeros((size // 24 + 2, 2), np.int64), np.full(size + 8, 7, np.uint8), np.zeros(3, int)
        count = calls.hotloop_merge(
            guarded - size, difference.ctypes.data, size, 0, ranges.ctypes.data, data.ctypes.data, facts.ctypes.data
        )
        assert (data[size:] == 7).all()
        assert (ranges[size // 24 + 1 :] == 0).all()
        check_changes(
            PieceChanges(ranges[:count], data[: facts[0]]) if count else None, base, base ^ difference, position=0
        )
        copy = difference.copy()
        # The guarded piece as second input and as output, too.
        assert calls.hotloop_compare(difference.ctypes.data, guarded - size, copy.ctypes.data, size) >= 0
        assert calls.hotloop_patch(difference.ctypes.data, guarded - size, size) >= 0


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_a_library_that_is_absent_or_broken_is_not_used(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "_kernel.so"
    if content is not None:
        path.write_bytes(content)
    before = NativeKernel._library
    assert not NativeKernel.load_library(path)
    assert NativeKernel._library is before


@needs_native
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ABI", kernel.ABI + 1)
    assert not NativeKernel.load_library()


def test_only_loops_that_work_here_can_be_chosen() -> None:
    with pytest.raises(KeyError):
        kernel.use_kernel("fortran")
    assert kernel.name_kernel() in kernel.list_kernels()
