"""Directories without a manifest (section 2.2 of the hot-load contract), with files that other writers wrote."""

from __future__ import annotations

import json

import pytest
from snapshot_cases import DATA, read_tensors, upload

from hotloop.errors import SnapshotError
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, DeltaFormats, list_tensors
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.materialize import rebuild, stage
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.shard import open_shard

FIREWORKS = Hints(
    is_incremental=True, previous_identity="step000001", compression_format="arc_v2", checksum_format="alder32"
)


def make_reader(**directories: str) -> SnapshotReader:
    bucket = FakeBucket()
    for identity, folder in directories.items():
        upload(bucket, DATA / folder, identity)
    return SnapshotReader(bucket)


def read_directory(folder: str) -> dict[str, bytes]:
    return read_tensors(list_tensors(open_shard(path) for path in (DATA / folder).glob("*.safetensors")))


def expected_tensors() -> dict[str, bytes]:
    return read_directory("step000002_full")


def refuse(reader: SnapshotReader, identity: str, hints: Hints | None = None) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        reader.describe(identity, hints)
    return caught.value


def test_an_index_and_a_config_are_an_anchor() -> None:
    info = make_reader(step000001="step000001").describe("step000001")
    assert (info.kind, info.parent, info.formats, info.policy_version) == ("anchor", None, None, 1)


def test_a_slime_delta_names_parent_formats_and_version_in_its_index() -> None:
    reader = make_reader(weight_v000002="step000002_cwtrain_xor_zstd")
    info = reader.describe("weight_v000002")
    assert (info.kind, info.parent, info.policy_version) == ("delta", "weight_v000001", 2)
    assert info.formats == DeltaFormats("zstd", "adler32", "xor")


def test_a_slime_delta_on_its_renamed_base_gives_the_targets_bytes() -> None:
    reader = make_reader(weight_v000001="step000001", weight_v000002="step000002_cwtrain_xor_zstd")
    built = rebuild("weight_v000002", reader)
    assert built.chain == ("weight_v000001", "weight_v000002")
    assert read_tensors(built.tensors) == expected_tensors()


def test_a_base_version_that_is_an_identity_wins_over_the_number() -> None:
    reader = make_reader(base="step000001", delta="step000002_cwtrain_xor_zstd")
    bucket = reader.bucket
    assert isinstance(bucket, FakeBucket)
    index = json.loads(bucket.get("delta/model.safetensors.index.json", max_bytes=10**6))
    index["metadata"]["base_version"] = "base"
    bucket.put("delta/model.safetensors.index.json", json.dumps(index).encode())
    assert reader.describe("delta").parent == "base"
    assert read_tensors(rebuild("delta", reader).tensors) == expected_tensors()


def test_the_posts_policy_version_wins_over_the_index() -> None:
    reader = make_reader(weight_v000002="step000002_cwtrain_xor_zstd")
    assert reader.describe("weight_v000002", Hints(policy_version=70)).policy_version == 70


def test_a_fireworks_delta_is_what_the_request_says() -> None:
    reader = make_reader(step000001="step000001", step000002="step000002")
    info = reader.describe("step000002", FIREWORKS)
    assert (info.kind, info.parent, info.formats, info.policy_version) == ("delta", "step000001", ARC_V2_FORMATS, 2)
    staged = stage("step000002", reader, MemoryFetcher(reader.bucket), hints=FIREWORKS)
    assert read_tensors(staged.tensors) == expected_tensors()


@pytest.mark.parametrize(
    ("identity", "hints", "version"),
    [
        ("step000007", Hints(policy_version=3), 3),
        ("step000007", Hints(), 7),
        ("final", Hints(served_policy_version=11), 12),
        ("final", Hints(), None),
    ],
)
def test_the_version_comes_from_the_request_the_digits_or_what_is_served(
    identity: str, hints: Hints, version: int | None
) -> None:
    assert make_reader(**{identity: "step000001"}).describe(identity, hints).policy_version == version


def test_an_arc_v2_delta_beside_a_config_is_not_taken_for_an_anchor() -> None:
    reader = make_reader(step000002="step000002")
    with pytest.raises(SnapshotError) as caught:
        rebuild("step000002", reader)
    assert caught.value.code == "missing_parent"


def test_a_fireworks_delta_needs_a_parent_and_a_format() -> None:
    reader = make_reader(step000002="step000002")
    assert refuse(reader, "step000002", Hints(is_incremental=True, compression_format="arc_v2")).code == (
        "missing_parent"
    )
    assert refuse(reader, "step000002", Hints(is_incremental=True, previous_identity="a")).code == "missing_format"


@pytest.mark.parametrize("name", ["arc_v1", "arc_v3", "zlib", "gzip"])
def test_an_unknown_format_is_refused_with_the_supported_list(name: str) -> None:
    reader = make_reader(step000002="step000002")
    error = refuse(reader, "step000002", Hints(True, "step000001", name, "alder32"))
    assert error.code == "unsupported_format"
    assert any("arc_v2" in text for text in error.details["supported"])
    error = refuse(reader, "step000002", Hints(True, "step000001", "arc_v2", "crc32"))
    assert error.code == "unsupported_checksum"


def test_an_adapter_is_refused() -> None:
    bucket = FakeBucket()
    bucket.put("lora/adapter_config.json", b"{}")
    bucket.put("lora/config.json", b"{}")
    bucket.put("lora/model.safetensors", b"x")
    assert refuse(SnapshotReader(bucket), "lora").code == "unsupported_snapshot"


@pytest.mark.parametrize("names", [[], ["config.json"], ["model.safetensors"], ["tokenizer.json", "notes.txt"]])
def test_anything_else_is_incomplete(names: list[str]) -> None:
    bucket = FakeBucket()
    for name in names:
        bucket.put(f"step1/{name}", b"{}")
    error = refuse(SnapshotReader(bucket), "step1")
    assert (error.code, error.retryable) == ("snapshot_incomplete", True)


def test_an_index_whose_file_is_not_there_yet_is_a_missing_object() -> None:
    reader = make_reader(step000001="step000001")
    reader.bucket.delete(["step000001/model-00002-of-00002.safetensors"])
    error = refuse(reader, "step000001")
    assert error.code == "missing_object"
    assert error.details["key"] == "step000001/model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "file",
    ["../step000001/model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", "", "a\\b.safetensors"],
)
def test_an_index_that_names_anything_but_a_plain_safetensors_file_is_invalid(file: str) -> None:
    bucket = FakeBucket()
    bucket.put("step1/config.json", b"{}")
    bucket.put("step1/model.safetensors.index.json", json.dumps({"weight_map": {"a": file}}).encode())
    bucket.calls.clear()
    assert refuse(SnapshotReader(bucket), "step1").code == "invalid_index"
    asked = {key for _, key in bucket.calls}
    assert asked <= {"step1", "step1/snapshot.json", "step1/model.safetensors.index.json"}


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff"])
def test_an_index_that_is_no_index_is_invalid(text: bytes) -> None:
    bucket = FakeBucket()
    bucket.put("step1/config.json", b"{}")
    bucket.put("step1/model.safetensors.index.json", text)
    assert refuse(SnapshotReader(bucket), "step1").code == "invalid_index"


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "adapter.safetensors"])
def test_f08_a_weight_file_outside_the_index_is_a_set_mismatch(name: str) -> None:
    reader = make_reader(step000001="step000001")
    reader.bucket.put("step000001/notes.txt", b"fine")
    reader.describe("step000001")
    reader.bucket.put(f"step000001/{name}", b"x")
    assert refuse(reader, "step000001").code == "tensor_set_mismatch"


@pytest.mark.parametrize("name", ["tensor_extra", "tensor_missing"])
def test_f08_a_shard_with_other_tensors_than_the_index_says_is_a_set_mismatch(name: str) -> None:
    reader = make_reader(step000001="step000001", step000002="step000002")
    broken = (DATA / "bad" / f"{name}.safetensors").read_bytes()
    reader.bucket.put("step000002/model-00001-of-00002.safetensors", broken)
    with pytest.raises(SnapshotError) as caught:
        stage("step000002", reader, MemoryFetcher(reader.bucket), hints=FIREWORKS)
    assert caught.value.code == "tensor_set_mismatch"


def test_f08_an_index_that_misplaces_a_tensor_is_a_set_mismatch() -> None:
    reader = make_reader(step000001="step000001")
    key = "step000001/model.safetensors.index.json"
    index = json.loads(reader.bucket.get(key, max_bytes=10**6))
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    reader.bucket.put(key, json.dumps(index).encode())
    with pytest.raises(SnapshotError) as caught:
        rebuild("step000001", reader)
    assert caught.value.code == "tensor_set_mismatch"


def test_an_identity_is_checked_before_any_storage_call() -> None:
    bucket = FakeBucket()
    assert refuse(SnapshotReader(bucket), "../etc").code == "invalid_identity"
    assert not bucket.calls


def test_the_digest_of_a_foreign_directory_changes_with_its_files() -> None:
    reader = make_reader(step000001="step000001")
    first = reader.describe("step000001").digest
    assert reader.describe("step000001").digest == first
    reader.bucket.put("step000001/model-00002-of-00002.safetensors", b"other")
    assert reader.describe("step000001").digest != first


def test_an_empty_index_of_a_slime_delta_is_an_empty_delta() -> None:
    reader = make_reader(weight_v000001="step000001")
    index = {
        "metadata": {
            "version": "000002",
            "base_version": "000001",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        },
        "weight_map": {},
    }
    reader.bucket.put("weight_v000002/model.safetensors.index.json", json.dumps(index).encode())
    built = rebuild("weight_v000002", reader)
    assert read_tensors(built.tensors) == read_directory("step000001")
