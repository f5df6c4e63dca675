"""From a bucket to a staged snapshot: chains, changes on held content, and every check before anything is returned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from snapshot_cases import make_bucket, read_state, read_tensors

from hotloop.errors import SnapshotError
from hotloop.snapshots.apply import merge_ranges
from hotloop.snapshots.chain import Held
from hotloop.snapshots.codecs.base import SLIME_FORMATS, TensorBytes
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.materialize import StagedSnapshot, rebuild, stage
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.progress import Progress
from hotloop.snapshots.reader import SnapshotReader


class HeldStaged:
    """Content of an earlier stage, held in memory."""

    def __init__(self, staged: StagedSnapshot) -> None:
        self.held = Held(staged.identity, staged.digest)
        self.tensors: Mapping[str, TensorBytes] = staged.tensors
        self.adler32: Mapping[str, int] = {}


def hold(reader: SnapshotReader, identity: str) -> HeldStaged:
    return HeldStaged(rebuild(identity, reader))


def load(bucket: FakeBucket, identity: str, held: HeldStaged | None = None) -> StagedSnapshot:
    reader = SnapshotReader(bucket)
    return stage(identity, reader, MemoryFetcher(bucket), held=held)


def apply_changes(staged: StagedSnapshot, held: HeldStaged) -> dict[str, bytes]:
    result = read_tensors(held.tensors)
    for name, tensor in staged.iter_full_tensors(held):
        result[name] = bytes(tensor.data)
    return result


@pytest.mark.parametrize("settings", [{}, {"formats": SLIME_FORMATS, "level": 1}])
def test_one_delta_on_held_content_is_a_list_of_changes(settings: dict[str, object]) -> None:
    bucket, states = make_bucket(3, **settings)
    held = hold(SnapshotReader(bucket), "step000002")
    staged = load(bucket, "step000003", held)
    assert (staged.base, staged.chain, staged.policy_version) == ("step000002", ("step000003",), 3)
    assert [change.name for change in staged.changes] == ["layer3.weight"]
    assert not staged.tensors
    assert apply_changes(staged, held) == read_state(states[2])


@pytest.mark.parametrize("settings", [{}, {"formats": SLIME_FORMATS, "level": 1}])
def test_several_deltas_on_held_content_are_joined_into_one_change_per_tensor(settings: dict[str, object]) -> None:
    bucket, states = make_bucket(8, **settings)
    held = hold(SnapshotReader(bucket), "step000002")
    before = read_tensors(held.tensors)
    staged = load(bucket, "step000008", held)
    assert staged.chain == tuple(f"step{version:06d}" for version in range(3, 9))
    # Versions 3 to 8 change layers 3, 0, 1, 2, 3 and 0.
    assert sorted(change.name for change in staged.changes) == [f"layer{i}.weight" for i in range(4)]
    assert apply_changes(staged, held) == read_state(states[7])
    assert read_tensors(held.tensors) == before, "held content is never written to"


def test_without_held_content_the_chain_starts_at_the_anchor() -> None:
    bucket, states = make_bucket(3)
    staged = load(bucket, "step000003")
    assert (staged.base, staged.changes) == (None, ())
    assert staged.chain == ("step000001", "step000002", "step000003")
    assert read_tensors(staged.tensors) == read_state(states[2])
    assert json.loads(staged.config) == {"hidden_size": 33}


def test_held_content_of_another_branch_is_not_used() -> None:
    bucket, states = make_bucket(2)
    other, _ = make_bucket(3)
    held = hold(SnapshotReader(other), "step000003")
    staged = load(bucket, "step000002", held)
    assert staged.base is None
    assert read_tensors(staged.tensors) == read_state(states[1])


def test_the_held_target_is_an_empty_change() -> None:
    bucket, _ = make_bucket(2)
    staged = load(bucket, "step000002", hold(SnapshotReader(bucket), "step000002"))
    assert (staged.base, staged.chain, staged.is_empty) == ("step000002", (), True)
    assert (staged.policy_version, staged.manifest is not None) == (2, True)


def test_the_files_to_protect_are_those_of_the_whole_chain_also_behind_held_content() -> None:
    bucket, _ = make_bucket(4)
    held = hold(SnapshotReader(bucket), "step000003")
    staged = load(bucket, "step000004", held)
    assert staged.chain == ("step000004",)
    identities = list(dict.fromkeys(file.identity for file in staged.files))
    assert identities == [f"step{version:06d}" for version in range(1, 5)], "oldest first"
    bucket.delete(["step000002/snapshot.json"])
    staged = load(bucket, "step000004", held)
    assert {file.identity for file in staged.files} == {"step000003", "step000004"}


def test_progress_goes_through_the_stages_and_never_back() -> None:
    bucket, _ = make_bucket(3)
    reports: list[Progress] = []
    reader = SnapshotReader(bucket)
    stage("step000003", reader, MemoryFetcher(bucket), on_progress=reports.append)
    stages = [report.stage for report in reports]
    assert list(dict.fromkeys(stages)) == ["downloading", "verifying", "staged"]
    downloading = [report for report in reports if report.stage == "downloading"]
    done = [report.bytes_done for report in downloading]
    assert done == sorted(done)
    assert done[-1] == downloading[-1].bytes_total > 0


def refuse(bucket: FakeBucket, identity: str, held: HeldStaged | None = None) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        load(bucket, identity, held)
    return caught.value


def edit_manifest(bucket: FakeBucket, identity: str, edit: Callable[[dict[str, object]], None]) -> None:
    key = f"{identity}/snapshot.json"
    document = json.loads(bucket.objects[key][0])
    edit(document)
    bucket.put(key, json.dumps(document).encode())


def first_weights(bucket: FakeBucket, identity: str) -> str:
    return next(key for key in sorted(bucket.objects) if key.startswith(identity) and key.endswith(".safetensors"))


def test_f03_and_f27_a_snapshot_without_its_manifest_does_not_exist() -> None:
    bucket, _ = make_bucket(2)
    bucket.delete(["step000001/snapshot.json", "step000001/config.json"])
    assert refuse(bucket, "step000001").code == "snapshot_incomplete"


def test_f01_a_delta_of_something_else_that_cannot_be_resolved_names_both_identities() -> None:
    bucket, _ = make_bucket(3)
    held = hold(SnapshotReader(bucket), "step000001")
    for key in [key for key in bucket.objects if key.startswith("step000002/")]:
        bucket.delete([key])
    error = refuse(bucket, "step000003", held)
    assert error.code == "parent_mismatch"
    assert (error.details["parent"], error.details["held"]) == ("step000002", "step000001")


def test_f02_an_unknown_parent_with_nothing_held() -> None:
    bucket, _ = make_bucket(2)
    for key in [key for key in bucket.objects if key.startswith("step000001/")]:
        bucket.delete([key])
    assert refuse(bucket, "step000002").code == "parent_unknown"


def test_f06_a_missing_shard_names_its_key() -> None:
    bucket, _ = make_bucket(1)
    key = first_weights(bucket, "step000001")
    bucket.delete([key])
    error = refuse(bucket, "step000001")
    assert (error.code, error.details["key"]) == ("missing_object", key)


def test_f09_a_truncated_shard_is_object_corrupt_because_the_manifest_knows_better() -> None:
    bucket, _ = make_bucket(1)
    key = first_weights(bucket, "step000001")
    data, _digest = bucket.objects[key]
    bucket.put(key, data[:-1])
    error = refuse(bucket, "step000001")
    assert error.code == "object_corrupt"


def test_a_flipped_bit_is_object_corrupt() -> None:
    bucket, _ = make_bucket(1)
    key = first_weights(bucket, "step000001")
    data = bytearray(bucket.objects[key][0])
    data[-5] ^= 1
    bucket.put(key, bytes(data))
    assert refuse(bucket, "step000001").code == "object_corrupt"


def test_f04_a_manifest_with_another_checksum_is_checksum_mismatch_after_one_refetch() -> None:
    bucket, _ = make_bucket(2)

    def edit(document: dict[str, object]) -> None:
        document["tensors"]["layer2.weight"]["adler32"] = 12345  # type: ignore[index]  # JSON

    edit_manifest(bucket, "step000002", edit)
    held = hold(SnapshotReader(bucket), "step000001")
    before = read_tensors(held.tensors)
    key = first_weights(bucket, "step000002")
    bucket.calls.clear()
    error = refuse(bucket, "step000002", held)
    assert (error.code, error.details["tensor"], error.details["expected"]) == (
        "checksum_mismatch",
        "layer2.weight",
        12345,
    )
    assert bucket.calls["read", key] == 2
    assert read_tensors(held.tensors) == before


def test_f08_a_manifest_that_names_another_tensor_is_a_set_mismatch() -> None:
    bucket, _ = make_bucket(2)

    def edit(document: dict[str, object]) -> None:
        tensors: dict[str, object] = document["tensors"]  # type: ignore[assignment]  # JSON
        tensors["layer9.weight"] = tensors.pop("layer3.weight")

    edit_manifest(bucket, "step000002", edit)
    assert refuse(bucket, "step000002").code == "tensor_set_mismatch"


def test_f13_a_delta_that_changes_a_shape_is_layout_changed() -> None:
    bucket, _ = make_bucket(2)

    def edit(document: dict[str, object]) -> None:
        document["tensors"]["layer3.weight"]["shape"] = [33, 64]  # type: ignore[index]  # JSON

    edit_manifest(bucket, "step000002", edit)
    assert refuse(bucket, "step000002").code == "layout_changed"


def test_f22_a_pruned_link_is_chain_broken_and_the_next_anchor_heals() -> None:
    bucket, states = make_bucket(6, full_every=5)
    bucket.delete(["step000002/snapshot.json", "step000002/model.safetensors.index.json"])
    error = refuse(bucket, "step000004")
    assert (error.code, error.details["missing"]) == ("chain_broken", "step000002")
    # The sixth snapshot is the fifth since the anchor.
    staged = load(bucket, "step000006")
    assert staged.chain == ("step000006",)
    assert read_tensors(staged.tensors) == read_state(states[5])


def test_f28_a_delta_whose_version_is_not_above_its_parents_is_metadata_conflict() -> None:
    bucket, _ = make_bucket(2)
    edit_manifest(bucket, "step000002", lambda document: document.update(policy_version=1))
    assert refuse(bucket, "step000002").code == "metadata_conflict"


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        (Hints(policy_version=9), "policy_version"),
        (Hints(is_incremental=True, previous_identity="step000009"), "previous_snapshot_identity"),
        (Hints(is_incremental=True, compression_format="zstd"), "compression_format"),
        (Hints(is_incremental=True, compression_format="arc_v2", checksum_format="adler32"), "checksum_format"),
    ],
)
def test_a_request_that_contradicts_the_manifest_is_metadata_conflict(hints: Hints, field: str) -> None:
    bucket, _ = make_bucket(2)
    with pytest.raises(SnapshotError) as caught:
        SnapshotReader(bucket).describe("step000002", hints)
    assert (caught.value.code, caught.value.details["field"]) == ("metadata_conflict", field)


def test_a_request_that_repeats_the_manifest_or_says_less_is_fine() -> None:
    bucket, _ = make_bucket(2)
    reader = SnapshotReader(bucket)
    for hints in (Hints(), Hints(is_incremental=True), Hints(True, "step000001", "ARC_V2", "alder32", 2)):
        assert reader.describe("step000002", hints).policy_version == 2


def test_a_request_that_calls_an_anchor_a_delta_is_metadata_conflict() -> None:
    bucket, _ = make_bucket(1)
    with pytest.raises(SnapshotError) as caught:
        SnapshotReader(bucket).describe("step000001", Hints(is_incremental=True))
    assert caught.value.details["field"] == "kind"


def test_stray_files_that_are_not_weights_are_ignored() -> None:
    bucket, states = make_bucket(2)
    bucket.put("step000002/notes.txt", b"hello")
    bucket.put("step000002/extra/deep.safetensors", b"hello")
    assert read_tensors(load(bucket, "step000002").tensors) == read_state(states[1])


@pytest.mark.parametrize(
    ("lists", "union"),
    [
        ([[[0, 8]], [[16, 24]]], [[0, 8], [16, 24]]),
        ([[[0, 8]], [[8, 16]]], [[0, 16]]),
        ([[[0, 24]], [[8, 16]]], [[0, 24]]),
        ([[[8, 16], [40, 48]], [[0, 9], [32, 44]]], [[0, 16], [32, 48]]),
    ],
)
def test_ranges_are_joined_into_rising_ranges_that_do_not_touch(
    lists: list[list[list[int]]], union: list[list[int]]
) -> None:
    assert merge_ranges([np.array(ranges, dtype=np.int64) for ranges in lists]).tolist() == union
