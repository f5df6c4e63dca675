"""Tensors above 2 GiB and a 10 GiB shard, in a process that may not grow by more than 1 GiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from hotloop.snapshots.codecs import arc_v2
from hotloop.snapshots.codecs.base import list_tensors
from hotloop.snapshots.shard import open_shard

GIB = 1 << 30
folder, tensor_bytes, dense_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
names = ["a", "b"]
SPOTS = [0, 2 * GIB - 1, 2 * GIB, tensor_bytes - 1]

def write(path, is_new):
    # Holes in the file stand for zeros, so that 10 GiB need no disk.
    entries = {
        name: {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [at * tensor_bytes, (at + 1) * tensor_bytes]}
        for at, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.truncate(start + len(names) * tensor_bytes)
        if is_new:
            for spot in SPOTS:
                file.seek(start + spot)
                file.write(b"x")
            file.seek(start + tensor_bytes + GIB)
            file.write(np.random.default_rng(0).integers(1, 256, dense_bytes, dtype=np.uint8).data)

write(folder / "old.safetensors", False)
write(folder / "new.safetensors", True)
old, new = (list_tensors([open_shard(folder / f"{side}.safetensors")]) for side in ("old", "new"))
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (used + GIB, used + GIB))
done = arc_v2.encode_shard(old, new, folder / "delta.safetensors", workers=2)
found = {}
with open_shard(folder / "delta.safetensors") as delta:
    for change in arc_v2.decode_shard(delta, old, workers=2, scratch=folder):
        lengths = change.ranges[:, 1] - change.ranges[:, 0]
        is_right = True
        first = 0
        for (begin, end), length in zip(change.ranges.tolist(), lengths.tolist()):
            is_right &= change.data[first : first + length] == new[change.name].data[begin:end]
            first += length
        found[change.name] = [len(change.ranges), len(change.data), is_right, change.ranges[:3].tolist()]
print(json.dumps({"changed": [t.changed_bytes for t in done.tensors], "found": found, "delta_bytes": done.nbytes}))
"""


def run(folder: Path, tensor_bytes: int, dense_bytes: int) -> dict[str, object]:
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(tensor_bytes), str(dense_bytes)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert outcome.returncode == 0, outcome.stderr
    parsed: dict[str, object] = json.loads(outcome.stdout)
    return parsed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs RLIMIT_DATA and /proc")
@pytest.mark.parametrize(("tensor_gib", "dense_mib"), [(5, 600)])
def test_a_10_gib_shard_needs_less_than_1_gib_of_memory(tensor_gib: int, dense_mib: int, tmp_path: Path) -> None:
    size, dense = (tensor_gib << 30) + 3, dense_mib << 20
    report = run(tmp_path, size, dense)
    assert report["changed"] == [4, dense]
    found = report["found"]
    assert isinstance(found, dict)
    two_gib = 2 << 30
    assert found["a"] == [4, 8 + 8 + 8 + 3, True, [[0, 8], [two_gib - 8, two_gib], [two_gib, two_gib + 8]]]
    assert found["b"][1] >= dense
    assert found["b"][2] is True
