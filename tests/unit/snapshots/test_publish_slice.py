"""Publish anchor, deltas and startup into a folder, and rebuild to equal bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.materialize import rebuild
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader

State = dict[str, np.ndarray]


def make_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    state: State = {f"layer{i}.weight": rng.integers(0, 2**16, (64, 33), dtype=np.uint16) for i in range(4)}
    state["scale"] = np.array(3.5, dtype=np.float32)
    state["empty"] = np.zeros((0, 4), dtype=np.float16)
    return state


def test_an_anchor_and_its_deltas_rebuild_to_equal_bytes(tmp_path: Path) -> None:
    bucket = open_bucket(f"file://{tmp_path}/run")
    publisher = Publisher(bucket, PublishSettings(max_shard_bytes=9000))
    state = make_state()
    first = publisher.publish(state, "step000001", 1, extras={"config.json": b"{}"})
    assert (first.kind, first.num_tensors, first.num_changed) == ("anchor", 6, 6)
    history = [state]
    for version in (2, 3, 4):
        state = {name: array.copy() for name, array in state.items()}
        state[f"layer{version - 1}.weight"][5, 1:4] ^= version
        published = publisher.publish(state, f"step{version:06d}", version)
        # Three 16-bit values changed in their low byte.
        assert (published.kind, published.num_changed, published.changed_bytes) == ("delta", 1, 3)
        assert published.stored_bytes < first.stored_bytes / 4
        history.append(state)
    publisher.set_startup("step000004")

    reader = SnapshotReader(bucket)
    assert reader.read_startup() == "step000004"
    for version, expected in enumerate(history, start=1):
        built = rebuild(f"step{version:06d}", reader)
        assert built.policy_version == version
        assert {name: bytes(tensor.data) for name, tensor in built.tensors.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


def test_a_publisher_without_the_parent_in_memory_rebuilds_it_from_the_bucket(tmp_path: Path) -> None:
    bucket = open_bucket(f"file://{tmp_path}/run")
    state = make_state()
    Publisher(bucket).publish(state, "step000001", 1)
    state["layer2.weight"][0, 0] ^= 1
    published = Publisher(bucket).publish(state, "step000002", 2)
    assert (published.kind, published.parent, published.changed_bytes) == ("delta", "step000001", 1)
    built = rebuild("step000002", SnapshotReader(bucket))
    assert bytes(built.tensors["layer2.weight"].data) == state["layer2.weight"].tobytes()
