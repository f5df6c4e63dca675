"""The recorded arc_v2 step, every broken delta of the fixtures, and what a change is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hotloop.errors import SnapshotError
from hotloop.snapshots.codecs import arc_v2
from hotloop.snapshots.codecs.base import (
    ARC_V2_FORMATS,
    DeltaFormats,
    TensorBytes,
    TensorChange,
    list_tensors,
    parse_formats,
)
from hotloop.snapshots.codecs.kernel import list_kernels, name_kernel, use_kernel
from hotloop.snapshots.shard import ShardWriter, open_shard

FIXTURES = Path(__file__).parents[2] / "data" / "arc_v2"
BASE, DELTA, FULL = FIXTURES / "step000001", FIXTURES / "step000002", FIXTURES / "step000002_full"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())["files"]
REASONS = {
    "checksum_missing_for_one_tensor": "checksum_missing",
    "metadata_absent": "checksum_missing",
    "checksum_wrong": "checksum_mismatch",
    "file_truncated": "malformed_shard",
    "frame_corrupt": "decode_failed",
    "frame_magic_zeroed": "decode_failed",
    "tensor_extra": "tensor_set_mismatch",
    "tensor_missing": "tensor_set_mismatch",
}


def tensor(data: bytes, dtype: str = "U8") -> TensorBytes:
    return TensorBytes(dtype, (len(data),), memoryview(data))


def write_delta(path: Path, payloads: dict[str, bytes], checksums: dict[str, str]) -> Path:
    with ShardWriter(path, dict.fromkeys(payloads, ("U8", None)), metadata_bytes=10_000) as writer:
        for name, payload in payloads.items():
            writer.begin(name)
            writer.write(payload)
            writer.end()
        writer.finish(checksums)
    return path


@pytest.mark.parametrize("file", FILES)
def test_the_recorded_delta_gives_the_recorded_tensors(file: str) -> None:
    base, full = open_shard(BASE / file), open_shard(FULL / file)
    changes = list(arc_v2.decode_shard(open_shard(DELTA / file), list_tensors([base])))
    assert [change.name for change in changes] == sorted(EXPECTED[file]["tensors"])
    for change in changes:
        recorded = EXPECTED[file]["tensors"][change.name]
        assert change.checksum == recorded["adler32_decimal"]
        assert change.adler32 == int(recorded["adler32_decimal"])
        assert change.nbytes == recorded["nbytes"]
        assert change.is_changed == recorded["changed"]
        assert change.file == file
        rebuilt = bytearray(base.read(change.name))
        change.write_into(rebuilt)
        assert rebuilt == bytes(full.read(change.name))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_recorded_delta_rebuilds_the_recorded_tensors_piece_by_piece(file: str, workers: int) -> None:
    base, full = list_tensors([open_shard(BASE / file)]), list_tensors([open_shard(FULL / file)])
    made = {name: bytearray(tensor.nbytes) for name, tensor in base.items()}

    def write(name: str, position: int, data: memoryview) -> None:
        made[name][position : position + len(data)] = data

    rebuilt = list(arc_v2.rebuild_shard(open_shard(DELTA / file), base, write, workers=workers))
    assert [tensor.name for tensor in rebuilt] == sorted(base)
    for tensor in rebuilt:
        assert made[tensor.name] == full[tensor.name].data
        old, new = (np.frombuffer(side[tensor.name].data, np.uint8) for side in (base, full))
        assert tensor.nbytes == len(new)
        assert tensor.changed_bytes == int(np.count_nonzero(old != new))
        assert tensor.is_changed == EXPECTED[file]["tensors"][tensor.name]["changed"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kernel", list_kernels())
def test_the_recorded_delta_rebuilds_the_recorded_tensors_in_buffers(file: str, kernel: str) -> None:
    base, full = list_tensors([open_shard(BASE / file)]), list_tensors([open_shard(FULL / file)])
    made = {name: bytearray(b"\xa5" * tensor.nbytes) for name, tensor in base.items()}
    views = {name: memoryview(buffer) for name, buffer in made.items()}
    in_use = name_kernel()
    use_kernel(kernel)
    try:
        rebuilt = list(arc_v2.rebuild_shard(open_shard(DELTA / file), base, views))
    finally:
        use_kernel(in_use)
    assert [tensor.name for tensor in rebuilt] == sorted(base)
    for tensor in rebuilt:
        assert made[tensor.name] == full[tensor.name].data
        old, new = (np.frombuffer(side[tensor.name].data, np.uint8) for side in (base, full))
        assert tensor.changed_bytes == int(np.count_nonzero(old != new))


def test_a_buffer_of_another_size_or_over_the_base_is_refused() -> None:
    file = FILES[0]
    with open_shard(BASE / file) as shard:
        kept = {name: bytearray(shard.read(name)) for name in shard.tensors}
    base = {
        name: dataclasses.replace(tensor, data=memoryview(kept[name]))
        for name, tensor in list_tensors([open_shard(BASE / file)]).items()
    }
    right = {name: memoryview(bytearray(tensor.nbytes)) for name, tensor in base.items()}
    name = max(base, key=lambda each: base[each].nbytes)
    for wrong, message in (
        (memoryview(bytearray(base[name].nbytes - 1)), "needs a writable buffer"),
        (memoryview(bytes(base[name].nbytes)), "needs a writable buffer"),
        (memoryview(kept[name]), "lies over its base"),
    ):
        before = bytes(kept[name])
        with pytest.raises(ValueError, match=message):
            list(arc_v2.rebuild_shard(open_shard(DELTA / file), base, {**right, name: wrong}))
        assert bytes(kept[name]) == before


@pytest.mark.parametrize("name", REASONS)
def test_rebuilding_refuses_a_broken_delta_for_the_same_reason(name: str) -> None:
    base = list_tensors([open_shard(BASE / FILES[0])])
    with pytest.raises(SnapshotError) as caught:
        delta = open_shard(FIXTURES / "bad" / f"{name}.safetensors")
        list(arc_v2.rebuild_shard(delta, base, lambda name, position, data: None))
    assert caught.value.code == REASONS[name]


@pytest.mark.parametrize("file", FILES)
def test_encoding_the_recorded_step_finds_the_recorded_checksums_and_changes(file: str, tmp_path: Path) -> None:
    base, full = list_tensors([open_shard(BASE / file)]), list_tensors([open_shard(FULL / file)])
    done = arc_v2.encode_shard(base, full, tmp_path / file)
    written = open_shard(tmp_path / file)
    assert done.nbytes == (tmp_path / file).stat().st_size
    assert written.metadata == {name: found["metadata_value"] for name, found in EXPECTED[file]["tensors"].items()}
    assert list(written.tensors) == sorted(EXPECTED[file]["tensors"])
    for found in done.tensors:
        assert found.changed == EXPECTED[file]["tensors"][found.name]["changed"]
        expanded = zstandard.ZstdDecompressor().decompress(written.read(found.name))
        old, new = (np.frombuffer(side[found.name].data, np.uint8) for side in (base, full))
        assert expanded == (old ^ new).tobytes()
        assert found.changed_bytes == int(np.count_nonzero(old != new))
        assert found.stored_bytes == written.tensors[found.name].nbytes
        assert zstandard.get_frame_parameters(written.read(found.name)).content_size == found.nbytes


def test_equal_input_gives_equal_files_whatever_the_number_of_workers(tmp_path: Path) -> None:
    base, full = list_tensors([open_shard(BASE / FILES[1])]), list_tensors([open_shard(FULL / FILES[1])])
    digests = set()
    for workers in (1, 2, 5):
        arc_v2.encode_shard(base, full, tmp_path / "x.safetensors", workers=workers)
        digests.add(hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_broken_delta_has_its_reason_and_leaves_the_base_alone(name: str, workers: int, tmp_path: Path) -> None:
    file = FILES[0]
    shutil.copy(BASE / file, tmp_path / file)
    with pytest.raises(SnapshotError) as caught:
        delta = open_shard(FIXTURES / "bad" / f"{name}.safetensors")
        list(arc_v2.decode_shard(delta, list_tensors([open_shard(tmp_path / file)]), workers=workers))
    assert caught.value.code == REASONS[name]
    assert (tmp_path / file).read_bytes() == (BASE / file).read_bytes()


def test_all_recorded_broken_deltas_are_tested() -> None:
    assert sorted(REASONS) == sorted(path.stem for path in (FIXTURES / "bad").iterdir())


def test_a_checksum_mismatch_names_tensor_expected_and_actual() -> None:
    with pytest.raises(SnapshotError) as caught:
        delta = open_shard(FIXTURES / "bad" / "checksum_wrong.safetensors")
        list(arc_v2.decode_shard(delta, list_tensors([open_shard(BASE / FILES[0])])))
    assert caught.value.details == {
        "tensor": "model.layers.0.self_attn.q_proj.weight",
        "expected": "3211532896",
        "actual": "3211532895",
    }


def test_the_manifest_s_checksum_is_verified_too() -> None:
    base, delta = list_tensors([open_shard(BASE / FILES[0])]), open_shard(DELTA / FILES[0])
    right = {name: int(found["adler32_decimal"]) for name, found in EXPECTED[FILES[0]]["tensors"].items()}
    assert len(list(arc_v2.decode_shard(delta, base, expected_adler32=right))) == 5
    wrong = right | {"model.layers.0.frozen.weight": 7}
    with pytest.raises(SnapshotError) as caught:
        list(arc_v2.decode_shard(delta, base, expected_adler32=wrong))
    assert caught.value.code == "checksum_mismatch"
    assert caught.value.details["expected"] == 7


def test_checks_without_decompression_come_before_the_first_change() -> None:
    base = list_tensors([open_shard(BASE / FILES[0])])
    with pytest.raises(SnapshotError):
        arc_v2.decode_shard(open_shard(FIXTURES / "bad" / "metadata_absent.safetensors"), base)


def test_a_delta_on_the_wrong_base_is_a_checksum_mismatch() -> None:
    with pytest.raises(SnapshotError) as caught:
        list(arc_v2.decode_shard(open_shard(DELTA / FILES[0]), list_tensors([open_shard(FULL / FILES[0])])))
    assert caught.value.code == "checksum_mismatch"


def test_a_full_file_in_place_of_a_delta_is_malformed() -> None:
    with pytest.raises(SnapshotError) as caught:
        arc_v2.decode_shard(open_shard(FULL / FILES[0]), list_tensors([open_shard(BASE / FILES[0])]))
    assert caught.value.code == "malformed_shard"


@pytest.mark.parametrize("states_size", [True, False])
@pytest.mark.parametrize("size", [0, 1, 99, 101, 5000])
def test_a_payload_of_another_size_is_a_size_mismatch(size: int, states_size: bool, tmp_path: Path) -> None:
    payload = zstandard.ZstdCompressor(write_content_size=states_size).compress(b"\1" * size)
    delta = write_delta(tmp_path / "d.safetensors", {"t": payload}, {"t": "1"})
    with pytest.raises(SnapshotError) as caught:
        list(arc_v2.decode_shard(open_shard(delta), {"t": tensor(bytes(100))}))
    assert caught.value.code == "size_mismatch"


def test_a_small_payload_that_expands_without_end_is_stopped_at_the_tensor_s_size(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20))
    assert len(bomb) < 20_000
    delta = write_delta(tmp_path / "d.safetensors", {"t": bomb}, {"t": "1"})
    with pytest.raises(SnapshotError) as caught:
        list(arc_v2.decode_shard(open_shard(delta), {"t": tensor(bytes(100))}))
    assert caught.value.code in ("size_mismatch", "decode_failed")


def test_bytes_after_the_last_frame_are_refused(tmp_path: Path) -> None:
    payload = zstandard.ZstdCompressor().compress(bytes(100)) + b"tail!"
    delta = write_delta(tmp_path / "d.safetensors", {"t": payload}, {"t": "6553601"})
    with pytest.raises(SnapshotError) as caught:
        list(arc_v2.decode_shard(open_shard(delta), {"t": tensor(bytes(100))}))
    assert caught.value.code == "decode_failed"


def test_several_frames_with_checksums_in_a_row_are_read(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor(write_checksum=True, level=9).compress
    payload = compress(bytes(60)) + compress(b"\1" * 40)
    new = bytes(60) + b"\1" * 40
    # Adler-32 by hand: a = 1 + 40 = 41; b counts a after each byte: 60 * 1 + sum(2..41) = 60 + 860 = 920.
    delta = write_delta(tmp_path / "d.safetensors", {"t": payload}, {"t": str(920 << 16 | 41)})
    (change,) = arc_v2.decode_shard(open_shard(delta), {"t": tensor(bytes(100))})
    rebuilt = bytearray(100)
    change.write_into(rebuilt)
    assert rebuilt == new


def test_ranges_are_rising_and_hold_the_changed_bytes(tmp_path: Path) -> None:
    old = bytes(1001)
    new = bytearray(old)
    new[3] = new[500] = new[1000] = 9
    arc_v2.encode_shard({"t": tensor(old)}, {"t": tensor(bytes(new))}, tmp_path / "d.safetensors")
    (change,) = arc_v2.decode_shard(open_shard(tmp_path / "d.safetensors"), {"t": tensor(old)})
    assert change.ranges.tolist() == [[0, 8], [496, 504], [1000, 1001]]
    assert bytes(change.data) == bytes(new[0:8] + new[496:504] + new[1000:1001])


def test_a_densely_changed_tensor_is_one_range(tmp_path: Path) -> None:
    old, new = bytes(4096), b"\xaa" * 4096
    arc_v2.encode_shard({"t": tensor(old)}, {"t": tensor(new)}, tmp_path / "d.safetensors")
    (change,) = arc_v2.decode_shard(open_shard(tmp_path / "d.safetensors"), {"t": tensor(old)})
    assert change.ranges.tolist() == [[0, 4096]]
    assert bytes(change.data) == new


def test_writing_a_change_twice_gives_the_same_bytes() -> None:
    change = TensorChange("t", "f", 10, np.array([[1, 3], [5, 6]]), memoryview(b"abc"), "1", 1)
    target = bytearray(b"0123456789")
    change.write_into(target)
    assert target == b"0ab34c6789"
    change.write_into(target)
    assert target == b"0ab34c6789"
    with pytest.raises(ValueError, match="10 bytes"):
        change.write_into(bytearray(9))


@pytest.mark.parametrize("name", ["arc_v2", "ARC_V2", "xor_one_to_one_zstd", "Xor_One_To_One_Zstd"])
def test_the_format_s_names_are_understood_in_any_case(name: str) -> None:
    assert parse_formats(name) == ARC_V2_FORMATS
    assert parse_formats(name, "adler32").checksum_format == "adler32"


@pytest.mark.parametrize("name", ["arc_v1", "arc_v3", "xor_one_to_one_zlib", "gzip", "", None, 7, [], {}])
def test_other_formats_are_refused_with_the_list(name: object) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_formats(name)
    assert caught.value.code == "unsupported_format"
    assert any("arc_v2" in supported for supported in caught.value.details["supported"])


def test_an_unknown_checksum_is_refused_with_the_list() -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_formats("arc_v2", "crc32")
    assert caught.value.code == "unsupported_checksum"
    assert caught.value.details["supported"] == ["alder32", "adler32", "xxh3-128", "blake3"]


def test_adler32_by_name_is_hex_in_an_arc_v2_file_too(tmp_path: Path) -> None:
    formats = DeltaFormats("arc_v2", "adler32", "xor")
    arc_v2.encode_shard({"t": tensor(b"xxxxxxxxx")}, {"t": tensor(b"Wikipedia")}, tmp_path / "d", formats=formats)
    delta = open_shard(tmp_path / "d")
    assert delta.metadata == {"t": "11e60398"}
    assert len(list(arc_v2.decode_shard(delta, {"t": tensor(b"xxxxxxxxx")}, formats=formats))) == 1
    with pytest.raises(SnapshotError) as caught:
        arc_v2.decode_shard(delta, {"t": tensor(b"xxxxxxxxx")})
    assert caught.value.code == "checksum_malformed"


@pytest.mark.parametrize(
    ("new", "code"),
    [
        ({}, "tensor_set_mismatch"),
        ({"t": tensor(bytes(4)), "u": tensor(bytes(4))}, "tensor_set_mismatch"),
        ({"t": tensor(bytes(5))}, "layout_changed"),
        ({"t": tensor(bytes(4), "I8")}, "layout_changed"),
    ],
)
def test_a_checkpoint_of_another_layout_is_not_encoded(new: dict[str, TensorBytes], code: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        arc_v2.encode_shard({"t": tensor(bytes(4))}, new, tmp_path / "d")
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_the_same_tensor_in_two_files_is_refused() -> None:
    with pytest.raises(SnapshotError) as caught:
        list_tensors([open_shard(BASE / FILES[0]), open_shard(FULL / FILES[0])])
    assert caught.value.code == "tensor_set_mismatch"
