"""The slime, Miles and cwtrain form: the recorded step, both encodings, and its index."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import zstandard

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs import overwrite, xor_zstd
from hotloop.snapshots.codecs.base import DeltaFormats, TensorBytes, list_tensors
from hotloop.snapshots.shard import Shard, ShardWriter, open_shard

FIXTURES = Path(__file__).parents[2] / "data" / "arc_v2"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OVERWRITE = DeltaFormats("zstd", "adler32", "overwrite")


def open_all(folder: str) -> list[Shard]:
    return [open_shard(FIXTURES / folder / file) for file in FILES]


def tensor(data: bytes) -> TensorBytes:
    return TensorBytes("U8", (len(data),), memoryview(data), "base.safetensors")


def hash_text(data: bytes) -> str:
    hasher = checksum.make_hasher("adler32")
    hasher.update(memoryview(data))
    return hasher.hexdigest()


def write_overwrite(path: Path, expanded: bytes, new: bytes) -> Shard:
    with ShardWriter(path, {"t": ("U8", None)}, metadata_bytes=100) as writer:
        writer.begin("t")
        writer.write(zstandard.ZstdCompressor().compress(expanded))
        writer.end()
        writer.finish({"t": hash_text(new)})
    return open_shard(path)


def test_the_recorded_cwtrain_step_gives_the_recorded_tensors() -> None:
    folder = FIXTURES / "step000002_cwtrain_xor_zstd"
    index = xor_zstd.parse_index(json.loads((folder / "model.safetensors.index.json").read_text()), where="index")
    assert index.formats == DeltaFormats("zstd", "adler32", "xor")
    assert (index.version, index.base_version) == ("000002", "000001")
    base, full = list_tensors(open_all("step000001")), list_tensors(open_all("step000002_full"))
    delta = open_shard(folder / "model-00000-of-00001.safetensors")
    changes = {change.name: change for change in xor_zstd.decode_shard(delta, base, formats=index.formats)}
    assert set(changes) == set(index.weight_map)
    for name, new in full.items():
        rebuilt = bytearray(base[name].data)
        if name in changes:
            assert changes[name].file == base[name].file
            changes[name].write_into(rebuilt)
        assert rebuilt == bytes(new.data)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum_format", ["adler32", "xxh3-128", "blake3"])
def test_the_recorded_step_survives_both_encodings_and_every_checksum(
    encoding: str, checksum_format: str, tmp_path: Path
) -> None:
    formats = DeltaFormats("zstd", checksum_format, encoding)
    base, full = list_tensors(open_all("step000001")), list_tensors(open_all("step000002_full"))
    done = xor_zstd.encode_shard(list(full), base, full, tmp_path / "d.safetensors", formats=formats)
    delta = open_shard(tmp_path / "d.safetensors")
    assert set(delta.tensors) == {found.name for found in done.tensors if found.changed}
    assert len(done.tensors) == 15
    assert len(delta.tensors) == 13
    expected = {found.name: found.adler32 for found in done.tensors}
    for change in xor_zstd.decode_shard(delta, base, formats=formats, expected_adler32=expected):
        rebuilt = bytearray(base[change.name].data)
        change.write_into(rebuilt)
        assert rebuilt == bytes(full[change.name].data)
        assert len(change.checksum) == {"adler32": 8, "xxh3-128": 32, "blake3": 64}[checksum_format]
        change_again = bytearray(rebuilt)
        change.write_into(change_again)
        assert change_again == rebuilt


def test_cwtrain_s_own_frames_are_no_smaller_than_ours(tmp_path: Path) -> None:
    formats = DeltaFormats("zstd", "adler32", "xor")
    base, full = list_tensors(open_all("step000001")), list_tensors(open_all("step000002_full"))
    done = xor_zstd.encode_shard(list(full), base, full, tmp_path / "d.safetensors", formats=formats)
    recorded = open_shard(FIXTURES / "step000002_cwtrain_xor_zstd" / "model-00000-of-00001.safetensors")
    for found in done.tensors:
        if found.changed:
            assert found.stored_bytes <= 1.05 * recorded.tensors[found.name].nbytes + 16


def test_an_overwrite_payload_has_count_positions_and_values(tmp_path: Path) -> None:
    old, new = b"0123456789", b"0a2345678b"
    xor_zstd.encode_shard(["t"], {"t": tensor(old)}, {"t": tensor(new)}, tmp_path / "d", formats=OVERWRITE)
    expanded = zstandard.ZstdDecompressor().decompress(open_shard(tmp_path / "d").read("t"))
    assert expanded == struct.pack("<III", 2, 1, 9) + b"ab"


BAD_OVERWRITES = {
    "falling": (struct.pack("<III", 2, 9, 1) + b"ba", "decode_failed"),
    "repeated": (struct.pack("<III", 2, 1, 1) + b"ab", "decode_failed"),
    "outside": (struct.pack("<II", 1, 10) + b"a", "decode_failed"),
    "more_than_the_tensor": (struct.pack("<I", 11) + bytes(55), "decode_failed"),
    "huge_count": (b"\xff\xff\xff\xff", "decode_failed"),
    "no_count": (b"\1\0", "decode_failed"),
    "positions_cut": (struct.pack("<II", 2, 1), "decode_failed"),
    "values_cut": (struct.pack("<III", 2, 1, 9) + b"a", "decode_failed"),
    "bytes_left_over": (struct.pack("<II", 1, 1) + b"abc", "size_mismatch"),
}


@pytest.mark.parametrize("name", BAD_OVERWRITES)
def test_an_overwrite_payload_that_breaks_a_rule_is_refused(name: str, tmp_path: Path) -> None:
    expanded, code = BAD_OVERWRITES[name]
    delta = write_overwrite(tmp_path / "d", expanded, b"0a2345678b")
    with pytest.raises(SnapshotError) as caught:
        list(xor_zstd.decode_shard(delta, {"t": tensor(b"0123456789")}, formats=OVERWRITE))
    assert caught.value.code == code


def test_an_overwrite_that_changes_nothing_has_no_ranges(tmp_path: Path) -> None:
    delta = write_overwrite(tmp_path / "d", struct.pack("<II", 1, 1) + b"1", b"0123456789")
    (change,) = xor_zstd.decode_shard(delta, {"t": tensor(b"0123456789")}, formats=OVERWRITE)
    assert not change.is_changed


def test_overwrite_applies_to_its_own_result(tmp_path: Path) -> None:
    old, new = b"0123456789", b"0a2345678b"
    delta = write_overwrite(tmp_path / "d", struct.pack("<III", 2, 1, 9) + b"ab", new)
    for base in (old, new):
        (change,) = xor_zstd.decode_shard(delta, {"t": tensor(base)}, formats=OVERWRITE)
        rebuilt = bytearray(base)
        change.write_into(rebuilt)
        assert rebuilt == new


class _LargeView:
    """Stands for the size of a tensor above 4 GiB; nothing of it is read."""

    nbytes = overwrite.MAX_TENSOR_BYTES + 1


def test_overwrite_refuses_a_tensor_that_its_positions_cannot_reach() -> None:
    large: Any = _LargeView()
    with pytest.raises(SnapshotError) as caught:
        overwrite.encode_overwrite(large, large, checksum_format="adler32", level=1)
    assert caught.value.code == "unsupported_format"


def test_a_tensor_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    delta = write_overwrite(tmp_path / "d", b"\0\0\0\0", b"")
    with pytest.raises(SnapshotError) as caught:
        xor_zstd.decode_shard(delta, {"other": tensor(b"")}, formats=OVERWRITE)
    assert caught.value.code == "tensor_set_mismatch"


def test_an_index_survives_writing_and_reading() -> None:
    index = xor_zstd.render_index({"b": "f", "a": "f"}, version="000002", base_version="000001", formats=OVERWRITE)
    assert xor_zstd.is_delta_index(index)
    found = xor_zstd.parse_index(json.loads(json.dumps(index)), where="index")
    assert found == xor_zstd.DeltaIndex(OVERWRITE, "000002", "000001", {"a": "f", "b": "f"})


def test_an_empty_weight_map_is_a_valid_delta() -> None:
    index = xor_zstd.render_index({}, version="3", base_version="2", formats=OVERWRITE)
    assert xor_zstd.parse_index(index, where="index").weight_map == {}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"metadata": None}, "invalid_index"),
        ({"weight_map": []}, "invalid_index"),
        ({"weight_map": {"a": 1}}, "invalid_index"),
        ({"metadata": {"delta_encoding": "xor", "compression_format": "zstd"}}, "invalid_index"),
        ({"metadata": {"version": "1", "base_version": "0", "delta_encoding": "add"}}, "unsupported_format"),
        (
            {
                "metadata": {
                    "version": "1",
                    "base_version": "0",
                    "delta_encoding": "xor",
                    "compression_format": "zstd",
                    "checksum_format": "md5",
                }
            },
            "unsupported_checksum",
        ),
    ],
)
def test_an_index_that_breaks_a_rule_is_refused(change: dict[str, object], code: str) -> None:
    index = xor_zstd.render_index({}, version="3", base_version="2", formats=OVERWRITE) | change
    with pytest.raises(SnapshotError) as caught:
        xor_zstd.parse_index(index, where="index")
    assert caught.value.code == code


def test_names_are_cut_into_files_by_size() -> None:
    tensors = {name: tensor(bytes(size)) for name, size in [("a", 4), ("b", 6), ("c", 1), ("d", 20), ("e", 1)]}
    assert xor_zstd.split_names(tensors, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert xor_zstd.split_names({}, 10) == []
