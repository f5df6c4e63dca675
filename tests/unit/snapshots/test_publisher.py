"""What a publisher decides, writes and refuses."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_cases import DATA, change_state, make_bucket, make_state, read_state, read_tensors

from hotloop.errors import SnapshotError
from hotloop.snapshots.checkpoint import open_checkpoint
from hotloop.snapshots.codecs import arc_v2
from hotloop.snapshots.codecs.base import SLIME_FORMATS
from hotloop.snapshots.manifest import parse_manifest
from hotloop.snapshots.materialize import rebuild
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.verify import verify_bucket


def rebuild_bytes(bucket: FakeBucket, identity: str) -> dict[str, bytes]:
    return read_tensors(rebuild(identity, SnapshotReader(bucket)).tensors)


def refuse(publisher: Publisher, *arguments: object, **settings: object) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        publisher.publish(*arguments, **settings)  # type: ignore[arg-type]  # passed on
    assert caught.value.exit_code == 2
    return caught.value


def test_every_nth_snapshot_since_the_anchor_is_an_anchor() -> None:
    bucket, states = make_bucket(8, full_every=3)
    reader = SnapshotReader(bucket)
    infos = [reader.describe(f"step{version:06d}") for version in range(1, 9)]
    kinds = [info.kind for info in infos]
    assert kinds == ["anchor", "delta", "delta", "anchor", "delta", "delta", "anchor", "delta"]
    manifests = [info.manifest for info in infos]
    assert [manifest.chain_length for manifest in manifests if manifest] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rebuild_bytes(bucket, "step000008") == read_state(states[7])


def test_the_manifest_is_the_last_object_written() -> None:
    bucket = FakeBucket()
    order: list[str] = []

    def note(action: str, key: str) -> None:
        if action.startswith("put") and key.startswith("step"):
            order.append(key.split("/")[1])

    bucket.fault = note
    Publisher(bucket).publish(make_state(), "step000001", 1, extras={"config.json": b"{}", "tokenizer.json": b"{}"})
    assert order == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "snapshot.json",
    ]


def test_encoding_one_shard_overlaps_the_upload_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, states = make_bucket(1)
    encoded: list[str] = []
    second_encoded = threading.Event()
    encode = arc_v2.encode_shard

    def watch(*arguments: Any, **settings: Any) -> Any:
        result = encode(*arguments, **settings)
        encoded.append(result.file)
        if len(encoded) == 2:
            second_encoded.set()
        return result

    def hold_first_upload(action: str, key: str) -> None:
        if action == "put" and key == f"step000002/{encoded[0] if encoded else ''}":
            assert second_encoded.wait(30), "the second shard is encoded while the first one is on its way"

    monkeypatch.setattr(arc_v2, "encode_shard", watch)
    bucket.fault = hold_first_upload
    Publisher(bucket).publish(change_state(states[0], 2), "step000002", 2)
    assert second_encoded.is_set()
    assert rebuild_bytes(bucket, "step000002") == read_state(change_state(states[0], 2))


def test_no_encoded_shard_stays_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket, states = make_bucket(1)
    most = 0

    def count(action: str, key: str) -> None:
        nonlocal most
        most = max(most, sum(1 for path in tmp_path.rglob("*") if path.is_file()))

    bucket.fault = count
    Publisher(bucket, PublishSettings(workers=1)).publish(change_state(states[0], 2), "step000002", 2)
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_tells_sizes_digests_and_checksums_that_others_compute_too() -> None:
    import hashlib
    import zlib

    bucket, states = make_bucket(2)
    manifest = parse_manifest(bucket.objects["step000002/snapshot.json"][0], identity="step000002")
    for name, entry in manifest.files.items():
        data, metadata = bucket.objects[f"step000002/{name}"]
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert metadata == entry.sha256
    for name, array in states[1].items():
        assert manifest.tensors[name].adler32 == zlib.adler32(array.tobytes())
    assert {name for name, entry in manifest.tensors.items() if entry.changed} == {"layer2.weight"}


def test_publishing_the_same_again_finds_it_and_writes_nothing() -> None:
    bucket, states = make_bucket(3)
    before = dict(bucket.objects)
    for version, state in enumerate(states, start=1):
        again = Publisher(bucket, PublishSettings(max_shard_bytes=9000)).publish(
            state, f"step{version:06d}", version, extras={"config.json": b'{"hidden_size": 33}'}
        )
        assert again.was_there
        assert again.parent == (None if version == 1 else f"step{version - 1:06d}")
    assert bucket.objects == before


def test_a_retry_of_an_older_delta_finds_its_own_parent_again() -> None:
    bucket, states = make_bucket(3)
    for kind in ("auto", "delta"):
        again = Publisher(bucket).publish(
            states[1], "step000002", 2, kind=kind, extras={"config.json": b'{"hidden_size": 33}'}
        )
        assert (again.was_there, again.parent) == (True, "step000001")


def test_f16_the_same_identity_with_other_bytes_is_refused() -> None:
    bucket, states = make_bucket(2)
    other = change_state(states[1], 7)
    assert refuse(Publisher(bucket), other, "step000002", 2).code == "identity_conflict"
    assert rebuild_bytes(bucket, "step000002") == read_state(states[1])


def test_an_unfinished_snapshot_is_completed_only_by_the_same_bytes() -> None:
    bucket, states = make_bucket(2)
    bucket.delete(["step000002/snapshot.json"])
    assert refuse(Publisher(bucket), change_state(states[1], 7), "step000002", 2).code == "identity_conflict"
    published = Publisher(bucket).publish(
        states[1], "step000002", 2, extras={"config.json": b'{"hidden_size": 33}'}, kind="delta"
    )
    assert (published.kind, published.was_there) == ("delta", False)
    assert rebuild_bytes(bucket, "step000002") == read_state(states[1])


def test_a_store_that_ignores_create_only_still_cannot_lose_a_race_silently() -> None:
    bucket = FakeBucket(honours_create_only=False)
    publisher = Publisher(bucket)
    rival, _ = make_bucket(1)
    theirs = json.loads(rival.objects["step000001/snapshot.json"][0])
    theirs["policy_version"] = 9

    def race(action: str, key: str) -> None:
        # The rival's manifest replaces ours right after it was put.
        if (action, key) == ("get", "step000001/snapshot.json") and key in bucket.objects:
            bucket.objects[key] = (json.dumps(theirs).encode(), "")

    bucket.fault = race
    assert refuse(publisher, make_state(), "step000001", 1).code == "identity_conflict"


@pytest.mark.parametrize("version", [1, 2])
def test_f28_a_policy_version_is_used_once_in_a_bucket(version: int) -> None:
    bucket, states = make_bucket(2)
    error = refuse(Publisher(bucket), states[0], "step000003", version)
    assert (error.code, error.details["taken_by"]) == ("policy_version_taken", f"step{version:06d}")


def test_f28_a_policy_version_rises_along_a_chain() -> None:
    bucket, states = make_bucket(2)
    assert refuse(Publisher(bucket), states[0], "step000000", 0).code == "metadata_conflict"


@pytest.mark.parametrize("version", [-1, 2**63, "1", None])
def test_a_policy_version_is_an_integer_from_zero_up(version: object) -> None:
    assert refuse(Publisher(FakeBucket()), make_state(), "step000001", version).code == "policy_version_taken"


def test_a_missing_or_incomplete_parent_is_refused() -> None:
    bucket, states = make_bucket(1)
    assert refuse(Publisher(bucket), states[0], "step000002", 2, parent="step000009").code == "parent_unknown"
    bucket.delete(["step000001/snapshot.json"])
    assert refuse(Publisher(bucket), states[0], "step000002", 2, kind="delta").code == "parent_unknown"


def test_f13_a_changed_shape_or_tensor_set_is_refused() -> None:
    bucket, states = make_bucket(1)
    reshaped = {**states[0], "scale": np.zeros((1,), np.float32)}
    assert refuse(Publisher(bucket), reshaped, "step000002", 2).code == "layout_changed"
    renamed = {("new" if name == "scale" else name): array for name, array in states[0].items()}
    assert refuse(Publisher(bucket), renamed, "step000002", 2).code == "tensor_set_mismatch"
    missing = {name: array for name, array in states[0].items() if name != "layer1.weight"}
    assert refuse(Publisher(bucket), missing, "step000002", 2).code == "tensor_set_mismatch"
    assert not [key for key in bucket.objects if key.startswith("step000002")]


def test_f40_a_tied_tensor_that_appears_is_dropped_and_one_that_disappears_is_filled_in() -> None:
    bucket, states = make_bucket(1)
    tied = {**change_state(states[0], 1)}
    tied["head.weight"] = tied["layer1.weight"]
    Publisher(bucket).publish(tied, "step000002", 2)
    assert set(rebuild_bytes(bucket, "step000002")) == set(states[0])

    both = FakeBucket()
    first = {**make_state(), "head.weight": make_state()["layer0.weight"]}
    Publisher(both).publish(first, "step000001", 1)
    second = change_state(make_state(), 4)
    published = Publisher(both).publish(second, "step000002", 2)
    # Layer 0 and its tied head changed, three low bytes each.
    assert (published.num_changed, published.changed_bytes) == (2, 6)
    assert rebuild_bytes(both, "step000002")["head.weight"] == second["layer0.weight"].tobytes()


def test_f40_an_untied_name_that_appears_is_refused() -> None:
    bucket, states = make_bucket(1)
    other = {**states[0], "head.weight": states[0]["layer1.weight"] ^ np.uint16(1)}
    assert refuse(Publisher(bucket), other, "step000002", 2).code == "tensor_set_mismatch"


def test_an_empty_delta_can_be_skipped() -> None:
    bucket, states = make_bucket(1)
    before = dict(bucket.objects)
    skipped = Publisher(bucket).publish(states[0], "step000002", 2, skip_empty=True)
    assert skipped.is_skipped
    assert {key for key in bucket.objects if key.startswith("step")} == {
        key for key in before if key.startswith("step")
    }
    published = Publisher(bucket).publish(states[0], "step000002", 2)
    assert (published.num_changed, published.changed_bytes, published.is_skipped) == (0, 0, False)


def test_a_dry_run_writes_nothing_and_says_the_same() -> None:
    bucket, states = make_bucket(1)
    before = dict(bucket.objects)
    new = change_state(states[0], 2)
    rehearsed = Publisher(bucket).publish(new, "step000002", 2, is_dry_run=True)
    assert bucket.objects == before
    real = Publisher(bucket).publish(new, "step000002", 2)
    assert (rehearsed.kind, rehearsed.stored_bytes, rehearsed.changed_bytes) == (
        real.kind,
        real.stored_bytes,
        real.changed_bytes,
    )


def test_the_trainer_may_reuse_its_buffers_after_publish_has_returned() -> None:
    bucket = FakeBucket()
    publisher = Publisher(bucket)
    state = make_state()
    for version in range(1, 5):
        state[f"layer{version % 4}.weight"][0, :] += 1
        publisher.publish(state, f"step{version:06d}", version)
    assert rebuild_bytes(bucket, "step000004") == read_state(state)
    assert verify_bucket(SnapshotReader(bucket), is_deep=True)[-1].is_sound


def test_parents_in_memory_need_no_download() -> None:
    bucket = FakeBucket()
    publisher = Publisher(bucket)
    state = make_state()
    for version in range(1, 4):
        publisher.publish(change_state(state, version), f"step{version:06d}", version)
    assert not [key for action, key in bucket.calls if action == "read"]


def test_a_slime_delta_leaves_unchanged_tensors_out_and_an_arc_v2_delta_can_follow() -> None:
    bucket, states = make_bucket(1)
    second, third = change_state(states[0], 2), change_state(states[0], 3)
    Publisher(bucket, PublishSettings(formats=SLIME_FORMATS, level=1)).publish(second, "step000002", 2)
    manifest = parse_manifest(bucket.objects["step000002/snapshot.json"][0], identity="step000002")
    assert {name for name, entry in manifest.tensors.items() if entry.file} == {"layer2.weight"}
    index = json.loads(bucket.objects["step000002/model.safetensors.index.json"][0])
    assert index["metadata"]["base_version"] == "step000001"
    assert (index["metadata"]["version"], index["metadata"]["checksum_format"]) == ("000002", "xxh3-128")
    Publisher(bucket).publish(third, "step000003", 3)
    assert rebuild_bytes(bucket, "step000003") == read_state(third)


def test_a_slime_name_is_written_as_six_digits() -> None:
    bucket = FakeBucket()
    publisher = Publisher(bucket, PublishSettings(formats=SLIME_FORMATS, level=1))
    publisher.publish(make_state(), "weight_v000007", 7)
    publisher.publish(change_state(make_state(), 1), "weight_v000008", 8)
    index = json.loads(bucket.objects["weight_v000008/model.safetensors.index.json"][0])
    assert index["metadata"]["base_version"] == "000007"


def test_a_directory_is_uploaded_byte_for_byte_and_its_index_keeps_its_metadata() -> None:
    bucket = FakeBucket()
    Publisher(bucket).publish(DATA / "step000001", "step000001", 1)
    for path in (DATA / "step000001").glob("*.safetensors"):
        assert bucket.objects[f"step000001/{path.name}"][0] == path.read_bytes()
    index = json.loads(bucket.objects["step000001/model.safetensors.index.json"][0])
    assert index["metadata"] == {"completed_by": "snapshot.json", "total_size": 308717}


def test_a_delta_of_directories_of_every_dtype_rebuilds_the_new_one() -> None:
    bucket = FakeBucket()
    Publisher(bucket).publish(DATA / "step000001", "step000001", 1)
    new = open_checkpoint(DATA / "step000002_full")
    published = Publisher(bucket).publish(
        DATA / "step000002_full", "step000002", 2, parent="step000001", base_dir=DATA / "step000001"
    )
    assert (published.num_changed, published.num_tensors) == (13, 15)
    assert rebuild_bytes(bucket, "step000002") == read_tensors(new.tensors)


def test_a_base_directory_with_other_content_is_parent_mismatch() -> None:
    bucket = FakeBucket()
    Publisher(bucket).publish(DATA / "step000001", "step000001", 1)
    error = refuse(
        Publisher(bucket),
        DATA / "step000002_full",
        "step000002",
        2,
        parent="step000001",
        base_dir=DATA / "step000002_full",
    )
    assert error.code == "parent_mismatch"


def test_a_one_file_checkpoint_gets_an_index(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.arange(6, dtype=np.float32)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text("{}")
    bucket = FakeBucket()
    Publisher(bucket).publish(tmp_path, "step000001", 1)
    index = json.loads(bucket.objects["step000001/model.safetensors.index.json"][0])
    assert index["weight_map"] == {"a": "model.safetensors"}


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "unsupported_snapshot"),
        ({"config.json": "{}"}, "checkpoint_unreadable"),
        ({"config.json": "{}", "a.safetensors": "x", "b.safetensors": "x"}, "checkpoint_unreadable"),
        (
            {
                "config.json": "{}",
                "a.safetensors": "x",
                "model.safetensors.index.json": '{"weight_map":{"w":"b.safetensors"}}',
            },
            "checkpoint_unreadable",
        ),
        ({"config.json": "{}", "model.safetensors": "x"}, "malformed_shard"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, files: dict[str, str], code: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SnapshotError) as caught:
        Publisher(FakeBucket()).publish(tmp_path, "step000001", 1)
    assert caught.value.code == code


def test_a_larger_model_is_cut_into_shards_of_the_given_size() -> None:
    bucket = FakeBucket()
    state = {f"w{i}": np.zeros(1000, np.uint8) for i in range(5)}
    Publisher(bucket, PublishSettings(max_shard_bytes=2000)).publish(state, "step000001", 1)
    shards = sorted(key.split("/")[1] for key in bucket.objects if key.endswith(".safetensors"))
    assert shards == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "value", [[1.0], object(), np.zeros(2, dtype="S3"), ("F32", (3,), b"12345678"), np.zeros(2, ">f4")]
)
def test_a_value_that_is_no_tensor_is_refused(value: object) -> None:
    assert refuse(Publisher(FakeBucket()), {"w": value}, "step000001", 1).code == "checkpoint_unreadable"


def test_plain_records_carry_dtypes_that_numpy_does_not_know() -> None:
    bucket = FakeBucket()
    record = ("BF16", (2, 3), memoryview(bytes(range(12))))
    Publisher(bucket).publish({"w": record}, "step000001", 1)
    tensor = rebuild("step000001", SnapshotReader(bucket)).tensors["w"]
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == ("BF16", (2, 3), bytes(range(12)))


def test_startup_names_only_a_complete_snapshot() -> None:
    bucket, _ = make_bucket(1)
    publisher = Publisher(bucket)
    publisher.set_startup("step000001")
    assert bucket.objects["STARTUP_SNAPSHOT"][0] == b"step000001"
    with pytest.raises(SnapshotError) as caught:
        publisher.set_startup("step000002")
    assert caught.value.code == "snapshot_incomplete"
    assert bucket.objects["STARTUP_SNAPSHOT"][0] == b"step000001"
