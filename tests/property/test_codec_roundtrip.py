"""Any checkpoint, any change, any format: what is decoded equals what was encoded, byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs import arc_v2, difference, sink, xor_zstd
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, DeltaFormats, TensorBytes, TensorChange
from hotloop.snapshots.codecs.spool import Spool
from hotloop.snapshots.shard import DTYPE_BITS, ShardWriter, compute_nbytes, open_shard

Checkpoint = dict[str, TensorBytes]
FORMATS = st.sampled_from(
    [ARC_V2_FORMATS]
    + [DeltaFormats("zstd", name, form) for name in ("adler32", "xxh3-128", "blake3") for form in ("xor", "overwrite")]
)
names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Checkpoint, Checkpoint]:
    """A base and what became of it: every dtype, 0-d and empty tensors, tied ones, sparse, dense and no changes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old: Checkpoint = {}
    new: Checkpoint = {}
    for name in draw(st.lists(names, min_size=1, max_size=6, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(shapes)
        nbytes = compute_nbytes(dtype, shape)
        if nbytes is None:
            dtype, nbytes = "I8", compute_nbytes("I8", shape)
        assert nbytes is not None
        before = rng.integers(0, 256, nbytes, dtype=np.uint8)
        after = before.copy()
        share = draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]))
        after[rng.random(nbytes) < share] ^= draw(st.integers(1, 255))
        old[name] = TensorBytes(dtype, shape, memoryview(before.tobytes()))
        new[name] = TensorBytes(dtype, shape, memoryview(after.tobytes()))
    if draw(st.booleans()):
        old["tied"], new["tied"] = next(iter(old.values())), next(iter(new.values()))
    return old, new


def rebuild(old: Checkpoint, changes: list[TensorChange]) -> dict[str, bytes]:
    made = {name: bytearray(tensor.data) for name, tensor in old.items()}
    for change in changes:
        change.write_into(made[change.name])
    return {name: bytes(data) for name, data in made.items()}


def rebuild_whole(old: Checkpoint, path: Path, formats: DeltaFormats, *, through: str) -> dict[str, bytes]:
    """The tensors that the delta holds, written by a function or in buffers; those it leaves out as they were."""
    codec = arc_v2 if formats.is_arc_v2 else xor_zstd
    made = {name: bytearray(b"\xa5" * tensor.nbytes) for name, tensor in old.items()}

    def write(name: str, position: int, data: memoryview) -> None:
        made[name][position : position + len(data)] = data

    target = write if through == "function" else {name: memoryview(data) for name, data in made.items()}
    done = {found.name for found in codec.rebuild_shard(open_shard(path), old, target, formats=formats, workers=2)}
    return {name: bytes(made[name] if name in done else tensor.data) for name, tensor in old.items()}


def encode(old: Checkpoint, new: Checkpoint, path: Path, formats: DeltaFormats, level: int) -> None:
    if formats.is_arc_v2:
        arc_v2.encode_shard(old, new, path, formats=formats, level=level, workers=2)
    else:
        xor_zstd.encode_shard(list(new), old, new, path, formats=formats, level=level, workers=2)


def decode(old: Checkpoint, path: Path, formats: DeltaFormats) -> list[TensorChange]:
    codec = arc_v2 if formats.is_arc_v2 else xor_zstd
    return list(codec.decode_shard(open_shard(path), old, formats=formats, workers=2))


@settings(max_examples=150, deadline=None)
@given(pair=checkpoints(), formats=FORMATS, level=st.sampled_from([-3, 1, 3, 9]))
def test_decoding_gives_back_what_was_encoded(
    pair: tuple[Checkpoint, Checkpoint], formats: DeltaFormats, level: int
) -> None:
    old, new = pair
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        encode(old, new, path, formats, level)
        changes = decode(old, path, formats)
        expected = {name: bytes(tensor.data) for name, tensor in new.items()}
        assert rebuild(old, changes) == expected
        assert rebuild_whole(old, path, formats, through="function") == expected
        assert rebuild_whole(old, path, formats, through="buffers") == expected
        for change in changes:
            assert change.is_changed == (bytes(old[change.name].data) != bytes(new[change.name].data))
            ends = change.ranges.reshape(-1)
            assert (np.diff(ends) >= 0).all()
            assert (change.ranges[:, 1] > change.ranges[:, 0]).all()
            assert int((change.ranges[:, 1] - change.ranges[:, 0]).sum()) == len(change.data)


@settings(max_examples=60, deadline=None)
@given(pair=checkpoints(), formats=FORMATS)
def test_a_delta_never_passes_on_another_base(pair: tuple[Checkpoint, Checkpoint], formats: DeltaFormats) -> None:
    old, new = pair
    name = max(old, key=lambda each: old[each].nbytes)
    if not old[name].nbytes or old[name].data == new[name].data:
        return
    spoilt = bytearray(old[name].data)
    # A byte that the delta does not overwrite, if there is one: overwrite may otherwise be right on any base.
    same = [at for at, (a, b) in enumerate(zip(old[name].data, new[name].data, strict=True)) if a == b]
    if not same:
        return
    spoilt[same[len(same) // 2]] ^= 0x41
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        encode(old, new, path, formats, 1)
        other = old | {name: TensorBytes(old[name].dtype, old[name].shape, memoryview(bytes(spoilt)))}
        with pytest.raises(SnapshotError) as caught:
            decode(other, path, formats)
        assert caught.value.code == "checksum_mismatch"


@settings(max_examples=60, deadline=None)
@given(
    frames=st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.booleans(), st.integers(-5, 12)), max_size=4),
    seed=st.integers(0, 1000),
)
def test_payloads_of_any_encoder_are_read(frames: list[tuple[int, bool, bool, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload, expanded = b"", b""
    for size, has_checksum, states_size, level in frames:
        part = (rng.integers(0, 256, size) * (rng.random(size) < 0.1)).astype(np.uint8).tobytes()
        compressor = zstandard.ZstdCompressor(level=level, write_checksum=has_checksum, write_content_size=states_size)
        stream = compressor.compressobj(size if states_size else -1)
        payload += stream.compress(part) + stream.flush()
        expanded += part
    old = rng.integers(0, 256, len(expanded), dtype=np.uint8).tobytes()
    new = bytes(a ^ b for a, b in zip(old, expanded, strict=True))
    base = {"t": TensorBytes("U8", (len(old),), memoryview(old))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        with ShardWriter(path, {"t": ("U8", None)}, metadata_bytes=40) as writer:
            writer.begin("t")
            writer.write(payload)
            writer.end()
            writer.finish({"t": str(checksum.adler32(new, 1))})
        assert rebuild(base, decode(base, path, ARC_V2_FORMATS)) == {"t": new}


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 40_000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5]),
    piece=st.sampled_from([64, 512, 4096]),
    limit=st.sampled_from([0, 100, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_pieces_and_spools_of_any_size_give_the_same_change(
    size: int, share: float, piece: int, limit: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    new[rng.random(size) < share] ^= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference, "PIECE_BYTES", piece)
        patch.setattr(difference, "_ZEROS", bytes(piece))
        for module in (difference, sink):
            patch.setattr(module, "Spool", lambda scratch: Spool(scratch, limit=limit))
        encoded = difference.encode_xor(old.data, new.data, checksum_format="alder32", level=3)
        changes = sink.ChangeSink()
        hasher = checksum.make_hasher("alder32")
        assert difference.decode_xor(old.data, encoded.payload, [hasher], changes) is None
        ranges, data = changes.finish()
    assert hasher.hexdigest() == encoded.digest == str(checksum.adler32(new.data, 1))
    assert encoded.changed_bytes == int(np.count_nonzero(old != new))
    target = bytearray(old.tobytes())
    TensorChange("t", "f", size, ranges, data, "", None).write_into(target)
    assert target == new.tobytes()
