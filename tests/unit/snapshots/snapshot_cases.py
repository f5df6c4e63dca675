"""Small checkpoints and buckets that several tests of snapshots use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher

DATA = Path(__file__).resolve().parents[2] / "data" / "arc_v2"
State = dict[str, np.ndarray]


def make_state(seed: int = 0) -> State:
    """Four 16-bit matrices, a scalar and an empty tensor."""
    rng = np.random.default_rng(seed)
    state: State = {f"layer{i}.weight": rng.integers(0, 2**16, (64, 33), dtype=np.uint16) for i in range(4)}
    state["scale"] = np.array(3.5, dtype=np.float32)
    state["empty"] = np.zeros((0, 4), dtype=np.float16)
    return state


def change_state(state: State, version: int) -> State:
    """Change three values of one matrix."""
    new = {name: array.copy() for name, array in state.items()}
    new[f"layer{version % 4}.weight"][5, 1:4] ^= version
    return new


def read_tensors(tensors: Mapping[str, TensorBytes]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def read_state(state: State) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def upload(bucket: Bucket, folder: Path, identity: str) -> None:
    """Put a directory into a bucket as a foreign writer would."""
    for path in sorted(folder.iterdir()):
        bucket.put(f"{identity}/{path.name}", path.read_bytes())


def publish_history(bucket: Bucket, num_snapshots: int, **settings: object) -> list[State]:
    """Publish step000001, step000002, ...; return their states."""
    chosen = PublishSettings(max_shard_bytes=9000, **settings)  # type: ignore[arg-type]  # passed on by name
    publisher = Publisher(bucket, chosen)
    states: list[State] = []
    for version in range(1, num_snapshots + 1):
        states.append(change_state(states[-1], version) if states else make_state())
        publisher.publish(states[-1], f"step{version:06d}", version, extras={"config.json": b'{"hidden_size": 33}'})
    return states


def make_bucket(num_snapshots: int, **settings: object) -> tuple[FakeBucket, list[State]]:
    bucket = FakeBucket()
    return bucket, publish_history(bucket, num_snapshots, **settings)
