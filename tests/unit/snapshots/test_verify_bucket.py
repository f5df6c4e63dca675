"""Checking a bucket: long chains, branches, foreign directories and damage."""

from __future__ import annotations

from snapshot_cases import DATA, change_state, make_bucket, upload

from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.verify import list_rows, verify_bucket


def check(bucket: FakeBucket) -> dict[str, bool]:
    return {report.identity: report.is_sound for report in verify_bucket(SnapshotReader(bucket), is_deep=True)}


def test_a_chain_of_30_deltas_verifies_and_each_object_is_read_once() -> None:
    bucket, _ = make_bucket(31, full_every=0)
    bucket.calls.clear()
    assert check(bucket) == {f"step{version:06d}": True for version in range(1, 32)}
    reads = {key: count for (action, key), count in bucket.calls.items() if action == "read"}
    assert len([key for key in reads if key.endswith(".safetensors")]) >= 31
    assert set(reads.values()) == {1}


def test_a_branch_is_rebuilt_from_its_own_parents() -> None:
    bucket, states = make_bucket(3)
    Publisher(bucket).publish(change_state(states[1], 6), "branch", 9, parent="step000002")
    assert check(bucket) == {"step000001": True, "step000002": True, "step000003": True, "branch": True}


def test_damage_to_one_delta_makes_it_and_its_descendants_bad_and_nothing_else() -> None:
    bucket, states = make_bucket(3)
    Publisher(bucket).publish(change_state(states[1], 6), "branch", 9, parent="step000002")
    key = next(key for key in bucket.objects if key.startswith("step000003") and key.endswith(".safetensors"))
    Publisher(bucket).publish(change_state(states[2], 7), "step000010", 10, parent="step000003")
    data, digest = bucket.objects[key]
    bucket.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), digest)
    assert check(bucket) == {
        "step000001": True,
        "step000002": True,
        "step000003": False,
        "branch": True,
        "step000010": False,
    }


def test_a_foreign_delta_without_its_base_is_listed_with_a_dash_and_is_bad() -> None:
    bucket, _ = make_bucket(1)
    upload(bucket, DATA / "step000002_cwtrain_xor_zstd", "weight_v000002")
    bucket.put("half/config.json", b"{}")
    _, rows = list_rows(SnapshotReader(bucket))
    by_name = {row.identity: row for row in rows}
    assert (by_name["weight_v000002"].kind, by_name["weight_v000002"].chain_length) == ("delta", None)
    assert (by_name["half"].is_complete, by_name["half"].reason) == (False, "snapshot_incomplete")
    reports = {report.identity: report for report in verify_bucket(SnapshotReader(bucket), is_deep=True)}
    assert "[parent_unknown]" in reports["weight_v000002"].summary
    assert "[snapshot_incomplete]" in reports["half"].summary
    assert reports["step000001"].is_sound
