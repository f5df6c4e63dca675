"""Safetensors files: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotloop.errors import SnapshotError
from hotloop.snapshots.shard import DTYPE_BITS, ShardWriter, compute_nbytes, open_shard, parse_header


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_of_the_safetensors_package_is_read_without_a_copy(tmp_path: Path) -> None:
    values = {"b": np.arange(6, dtype=np.int32).reshape(2, 3), "a": np.array(7.5), "none": np.zeros((0, 4), np.float16)}
    save_file(values, tmp_path / "x.safetensors", metadata={"format": "pt"})
    shard = open_shard(tmp_path / "x.safetensors")
    assert shard.metadata == {"format": "pt"}
    assert {name: (found.dtype, found.shape, found.nbytes) for name, found in shard.tensors.items()} == {
        "a": ("F64", (), 8),
        "b": ("I32", (2, 3), 24),
        "none": ("F16", (0, 4), 0),
    }
    assert bytes(shard.read("b")) == values["b"].tobytes()
    assert shard.read("b").readonly
    whole = (tmp_path / "x.safetensors").read_bytes()
    found = shard.tensors["b"]
    assert whole[found.offset : found.offset + found.nbytes] == values["b"].tobytes()


def test_views_outlive_the_shard_but_a_closed_shard_gives_no_more(tmp_path: Path) -> None:
    save_file({"a": np.arange(3, dtype=np.uint8)}, tmp_path / "x.safetensors")
    with open_shard(tmp_path / "x.safetensors") as shard:
        view = shard.read("a")
    assert bytes(view) == b"\0\1\2"
    with pytest.raises(ValueError, match="closed"):
        shard.read("a")


BROKEN = {
    "offsets_past_the_end": ({"a": entry("U8", [4], 0, 4)}, b"abc"),
    "bytes_after_the_data": ({"a": entry("U8", [2], 0, 2)}, b"abc"),
    "gap_at_the_start": ({"a": entry("U8", [2], 1, 3)}, b"abc"),
    "gap_between": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"),
    "same_place_twice": ({"a": entry("U8", [3], 0, 3), "b": entry("U8", [3], 0, 3)}, b"abc"),
    "falling_offsets": ({"a": entry("U8", [2], 3, 1)}, b"abc"),
    "negative_offset": ({"a": entry("U8", [4], -1, 3)}, b"abc"),
    "float_offset": ({"a": entry("U8", [3], 0.0, 3)}, b"abc"),
    "boolean_offset": ({"a": entry("U8", [1], False, True)}, b"a"),
    "one_offset": ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [3]}}, b"abc"),
    "offset_beyond_64_bits": ({"a": entry("U8", [3], 0, 1 << 70)}, b"abc"),
    "shape_disagrees": ({"a": entry("U16", [2], 0, 3)}, b"abc"),
    "shape_not_a_list": ({"a": {"dtype": "U8", "shape": 3, "data_offsets": [0, 3]}}, b"abc"),
    "negative_side": ({"a": entry("U8", [-3], 0, 3)}, b"abc"),
    "shape_that_overflows": ({"a": entry("U8", [1 << 62, 1 << 62], 0, 3)}, b"abc"),
    "unknown_dtype": ({"a": entry("Q8", [3], 0, 3)}, b"abc"),
    "dtype_not_text": ({"a": {"dtype": 8, "shape": [3], "data_offsets": [0, 3]}}, b"abc"),
    "half_a_byte": ({"a": entry("F4", [3], 0, 2)}, b"ab"),
    "entry_not_an_object": ({"a": [0, 3]}, b"abc"),
    "entry_without_shape": ({"a": {"dtype": "U8", "data_offsets": [0, 3]}}, b"abc"),
    "metadata_not_text": ({"__metadata__": {"a": 1}, "a": entry("U8", [3], 0, 3)}, b"abc"),
    "metadata_a_list": ({"__metadata__": [], "a": entry("U8", [3], 0, 3)}, b"abc"),
    "a_list": ([], b""),
    "a_number": (b"10", b""),
    "null": (b"null", b""),
    "not_json": (b"{]", b""),
    "not_utf8": (b'{"\xff": 1}', b""),
    "lone_surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b""),
    "name_twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
    ),
    "nested_too_deep": (b"[" * 100_000, b""),
    "endless_number": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,1]}}', b"a"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_header_that_breaks_a_rule_is_refused(name: str, tmp_path: Path) -> None:
    header, data = BROKEN[name]
    with pytest.raises(SnapshotError) as caught:
        open_shard(write_raw(tmp_path / "x.safetensors", header, data))
    assert caught.value.code == "malformed_shard"
    assert caught.value.details["file"] == "x.safetensors"


@pytest.mark.parametrize("length", [0, 1, 3, 100, (100 << 20) + 1, (1 << 64) - 1])
def test_a_header_length_outside_the_file_or_the_limits_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        open_shard(write_raw(tmp_path / "x.safetensors", b"{}", length=length))
    assert caught.value.code == "malformed_shard"


@pytest.mark.parametrize("size", range(10))
def test_a_file_too_short_for_a_header_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(SnapshotError) as caught:
        open_shard(tmp_path / "x.safetensors")
    assert caught.value.code == "malformed_shard"


def test_a_file_without_tensors_is_read(tmp_path: Path) -> None:
    assert open_shard(write_raw(tmp_path / "x.safetensors", b"{}")).tensors == {}


def test_a_header_is_checked_against_a_size_without_a_file() -> None:
    header = json.dumps({"a": entry("BF16", [3], 0, 6)}).encode()
    found = parse_header(header, 8 + len(header) + 6, where="x")
    assert found.data_start == 8 + len(header)
    assert found.tensors["a"].offset == 8 + len(header)
    with pytest.raises(SnapshotError):
        parse_header(header, 8 + len(header) + 5, where="x")


def test_bytes_of_a_shape() -> None:
    assert compute_nbytes("BF16", []) == 2
    assert compute_nbytes("F4", [3, 2]) == 3
    assert compute_nbytes("F6_E2M3", [4]) == 3
    assert compute_nbytes("F4", [3]) is None
    assert compute_nbytes("F64", [1 << 40, 0]) == 0
    assert compute_nbytes("NEW", [1]) is None


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_is_written_and_read_as_bytes(dtype: str, tmp_path: Path) -> None:
    data = os.urandom(DTYPE_BITS[dtype])
    with ShardWriter(tmp_path / "x.safetensors", {"t": (dtype, (8,))}) as writer:
        writer.begin("t")
        writer.write(data[:3])
        writer.write(data[3:])
        assert writer.end() == len(data)
        size = writer.finish()
    shard = open_shard(tmp_path / "x.safetensors")
    assert shard.nbytes == size
    assert bytes(shard.read("t")) == data


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with ShardWriter(path, {"z": ("F32", (2,)), "a": ("U8", None)}, metadata_bytes=100) as writer:
        writer.begin("z")
        writer.write(np.array([1.5, -2], np.float32).tobytes())
        writer.end()
        writer.begin("a")
        writer.write(b"xyz")
        writer.end()
        writer.finish({"key": "ümlaut"})
    loaded = load_file(path)
    assert loaded["z"].tolist() == [1.5, -2.0]
    assert loaded["a"].tobytes() == b"xyz"
    assert open_shard(path).metadata == {"key": "ümlaut"}
    assert open_shard(path).tensors["z"].offset % 8 == 0


def test_a_writer_that_is_left_early_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "x.safetensors", {"a": ("U8", None)}) as writer:
        writer.begin("a")
        writer.write(b"abc")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_to_finish_without_a_planned_tensor_unless_it_is_omitted(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x.safetensors", {"a": ("U8", None), "b": ("U8", None)}) as writer:
        writer.begin("a")
        writer.end()
        with pytest.raises(ValueError, match="'b'"):
            writer.finish()
        writer.omit("b")
        writer.finish()
    assert list(open_shard(tmp_path / "x.safetensors").tensors) == ["a"]


def test_a_writer_refuses_bytes_that_do_not_fill_the_shape(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x.safetensors", {"a": ("F32", (2,))}) as writer:
        writer.begin("a")
        writer.write(b"1234567")
        with pytest.raises(ValueError, match="7 bytes"):
            writer.end()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_writer_on_a_full_disk_says_no_space_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(SnapshotError) as caught, ShardWriter(tmp_path / "x.safetensors", {"a": ("U8", None)}) as writer:
        writer.begin("a")
        writer.write(bytes(1 << 20))
    assert caught.value.code == "no_space"
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_the_disk_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ShardWriter(tmp_path / "absent" / "x.safetensors", {})
