"""Transfers that are cut, throttled or refused, through a proxy in front of localbucket and a real S3 server."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bucket_servers
import numpy as np
import pytest
from bucket_servers import BUCKET, READER, Fault, FaultProxy

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.bucket_access import StaticKeys, open_bucket, probe_access
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.materialize import rebuild, stage
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import RemoteFile, SnapshotReader
from hotloop.snapshots.retry import RetryPolicy
from hotloop.snapshots.transfer import download

MIB = 2**20


@pytest.fixture(scope="module", params=["localbucket", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = bucket_servers.run_localbucket if request.param == "localbucket" else bucket_servers.run_seaweedfs
    with run(tmp_path_factory.mktemp(request.param)) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str) -> Iterator[FaultProxy]:
    with bucket_servers.run_fault_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test."""
    return hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]


def open_through(proxy: FaultProxy, name: str) -> Bucket:
    return open_bucket(f"s3://{BUCKET}/{name}", environ=bucket_servers.writer_environ(proxy.endpoint))


def make_policy(slept: list[float], budget_s: float = 600.0) -> RetryPolicy:
    """A policy whose clock is moved by its own sleeps, so that no test waits."""
    return RetryPolicy(
        budget_s=budget_s,
        clock=lambda: sum(slept),
        sleep=slept.append,
        random=random.Random(7).random,
    )


def put_file(bucket: Bucket, data: bytes) -> RemoteFile:
    bucket.put("step1/data", data)
    return RemoteFile("step1", "data", len(data), hashlib.sha256(data).hexdigest(), "", "weights")


def fetch(bucket: Bucket, file: RemoteFile, policy: RetryPolicy) -> bytes:
    pieces: list[bytes] = []
    download(bucket, file, pieces.append, retry=policy)
    return b"".join(pieces)


def test_a_download_that_is_cut_goes_on_where_it_stopped(proxy: FaultProxy, name: str) -> None:
    bucket = open_through(proxy, name)
    data = np.random.default_rng(1).bytes(20 * MIB)
    file = put_file(bucket, data)
    for cut_after in (9 * MIB, 5 * MIB):
        proxy.faults.append(Fault(lambda method, path: method == "GET" and path.endswith("data"), cut_after=cut_after))
    proxy.ranges.clear()
    slept: list[float] = []
    assert fetch(bucket, file, make_policy(slept)) == data
    resumed = [int(header.removeprefix("bytes=").rstrip("-").split("-")[0]) for header in proxy.ranges]
    assert len(resumed) >= 2
    assert all(start > 0 for start in resumed)
    assert resumed == sorted(resumed)


def test_a_throttled_store_is_asked_again_with_growing_jittered_waits(proxy: FaultProxy, name: str) -> None:
    bucket = open_through(proxy, name)
    file = put_file(bucket, b"x" * 1000)
    # The library asks twice per attempt, so that eight refusals are four failed attempts of ours.
    proxy.faults.append(Fault(lambda method, path: method == "GET", times=8, status=503, code="SlowDown"))
    slept: list[float] = []
    assert fetch(bucket, file, make_policy(slept)) == b"x" * 1000
    assert len(slept) == 4
    for number, wait in enumerate(slept):
        ceiling = 0.1 * 2**number
        assert 0.1 * ceiling <= wait <= ceiling


def test_a_store_that_stays_down_is_unavailable_after_the_budget(proxy: FaultProxy, name: str) -> None:
    bucket = open_through(proxy, name)
    file = put_file(bucket, b"x")
    proxy.faults.append(Fault(lambda method, path: method == "GET", times=10**6, status=500, code="InternalError"))
    slept: list[float] = []
    with pytest.raises(SnapshotError) as caught:
        fetch(bucket, file, make_policy(slept, budget_s=60.0))
    assert (caught.value.code, caught.value.retryable, caught.value.exit_code) == ("storage_unavailable", True, 3)
    assert 60.0 - 15.0 < sum(slept) <= 60.0


def test_damaged_bytes_are_never_returned(proxy: FaultProxy, name: str) -> None:
    bucket = open_through(proxy, name)
    file = put_file(bucket, b"good")
    bucket.put("step1/data", b"evil")
    with pytest.raises(SnapshotError) as caught:
        fetch(bucket, file, make_policy([]))
    assert caught.value.code == "object_corrupt"


@pytest.mark.parametrize("num_bytes", [0, 3, 5])
def test_an_object_of_another_size_is_corrupt_at_once(proxy: FaultProxy, name: str, num_bytes: int) -> None:
    bucket = open_through(proxy, f"{name}{num_bytes}")
    file = put_file(bucket, b"good")
    bucket.put("step1/data", b"x" * num_bytes)
    slept: list[float] = []
    with pytest.raises(SnapshotError) as caught:
        fetch(bucket, file, make_policy(slept))
    assert (caught.value.code, slept) == ("object_corrupt", [])


def test_a_publish_through_a_faulty_store_ends_with_equal_bytes(proxy: FaultProxy, name: str) -> None:
    bucket = open_through(proxy, name)
    rng = np.random.default_rng(2)
    state = {f"layer{i}": rng.integers(0, 2**16, (512, 512), dtype=np.uint16) for i in range(3)}
    proxy.faults.append(Fault(lambda method, path: method == "PUT", times=5, status=503))
    proxy.faults.append(Fault(lambda method, path: method == "HEAD", times=3, status=500, code="InternalError"))
    slept: list[float] = []
    publisher = Publisher(bucket, retry=make_policy(slept))
    publisher.publish(state, "step000001", 1, extras={"config.json": b"{}"})
    state = {key: array ^ np.uint16(key == "layer1") for key, array in state.items()}
    publisher.publish(state, "step000002", 2)
    assert slept, "the faults were met"
    built = rebuild("step000002", SnapshotReader(bucket))
    assert {key: bytes(tensor.data) for key, tensor in built.tensors.items()} == {
        key: array.tobytes() for key, array in state.items()
    }


def test_a_large_shard_goes_up_in_parts_and_a_cut_part_is_sent_again(proxy: FaultProxy, name: str) -> None:
    bucket = open_through(proxy, name)
    # Above 64 MiB: 80 MiB of random bytes in one shard.
    state = {"weight": np.random.default_rng(3).integers(0, 256, 80 * MIB, dtype=np.uint8)}
    proxy.faults.append(
        Fault(lambda method, path: method == "PUT" and path.endswith(".safetensors"), times=3, status=503)
    )
    slept: list[float] = []
    Publisher(bucket, retry=make_policy(slept)).publish(state, "step000001", 1)
    uploads = sum(count for (method, _), count in proxy.requests.items() if method == "POST")
    assert uploads >= 2, "a multipart upload begins and ends with a POST"
    assert bytes(rebuild("step000001", SnapshotReader(bucket)).tensors["weight"].data) == state["weight"].tobytes()


def test_eight_readers_of_two_replicas_read_each_object_once(proxy: FaultProxy, name: str, tmp_path: Path) -> None:
    bucket = open_through(proxy, name)
    rng = np.random.default_rng(4)
    state = {f"layer{i}": rng.integers(0, 2**16, (256, 256), dtype=np.uint16) for i in range(2)}
    publisher = Publisher(bucket)
    publisher.publish(state, "step000001", 1)
    state["layer0"][3, 3] ^= 1
    publisher.publish(state, "step000002", 2)
    proxy.requests.clear()
    caches = [Cache(tmp_path / "cache", b"p" * 32, bucket) for _ in range(2)]
    reader = SnapshotReader(bucket)

    def load(number: int) -> bytes:
        staged = stage("step000002", reader, caches[number % 2])
        return bytes(staged.tensors["layer0"].data)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(load, range(8)))
    for cache in caches:
        cache.close()
    assert set(results) == {state["layer0"].tobytes()}
    for identity in ("step000001", "step000002"):
        assert proxy.count_gets(f"{identity}/model-00001-of-00001.safetensors") == 1


READER_PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.materialize import stage
from hotloop.snapshots.reader import SnapshotReader

url, folder = sys.argv[1:]
bucket = open_bucket(url)
cache = Cache(folder, bytes(range(32)), bucket)
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(8) as pool:
    loads = [pool.submit(stage, "step000002", SnapshotReader(bucket), cache) for _ in range(8)]
    texts = {bytes(load.result().tensors["layer0"].data).hex()[:64] for load in loads}
print(*texts, flush=True)
"""


def test_two_processes_with_eight_readers_each_read_each_object_once(
    proxy: FaultProxy, name: str, tmp_path: Path
) -> None:
    bucket = open_through(proxy, name)
    rng = np.random.default_rng(5)
    state = {f"layer{i}": rng.integers(0, 2**16, (1024, 512), dtype=np.uint16) for i in range(3)}
    publisher = Publisher(bucket, PublishSettings(max_shard_bytes=2 * MIB))
    publisher.publish(state, "step000001", 1, extras={"config.json": b"{}"})
    state["layer0"][0, 0] ^= 1
    publisher.publish(state, "step000002", 2, extras={"config.json": b"{}"})
    proxy.requests.clear()
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", READER_PROGRAM, f"s3://{BUCKET}/{name}", str(tmp_path / "cache")],
            env={**os.environ, **bucket_servers.writer_environ(proxy.endpoint)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for replica in replicas:
        assert replica.stdout is not None
        assert replica.stdout.readline() == "ready\n"
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.write("go\n")
        replica.stdin.flush()
    outputs = [replica.communicate(timeout=120)[0].strip() for replica in replicas]
    assert outputs == [state["layer0"].tobytes().hex()[:64]] * 2
    shards = sorted(
        (path, count) for (method, path), count in proxy.requests.items() if method == "GET" and "model-" in path
    )
    assert [count for _, count in shards] == [1] * 4, shards


@pytest.mark.slow
def test_a_publisher_killed_inside_a_multipart_upload_is_completed_by_a_retry(
    proxy: FaultProxy, name: str, tmp_path: Path
) -> None:
    program = (
        "import os, signal, sys, numpy as np\n"
        "from hotloop.snapshots.bucket_access import open_bucket\n"
        "from hotloop.snapshots.publisher import Publisher\n"
        "state = {'w': np.random.default_rng(6).integers(0, 256, 80 * 2**20, dtype=np.uint8)}\n"
        "Publisher(open_bucket(sys.argv[1])).publish(state, 'step000001', 1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, f"s3://{BUCKET}/{name}"],
        env={**os.environ, **bucket_servers.writer_environ(proxy.endpoint)},
    )
    # A part of the upload is a PUT with a part number in its query; the path is that of the shard.
    while not any(method == "PUT" and path.endswith(".safetensors") for method, path in list(proxy.requests)):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    bucket = open_through(proxy, name)
    assert SnapshotReader(bucket).find("step000001") is None
    state = {"w": np.random.default_rng(6).integers(0, 256, 80 * MIB, dtype=np.uint8)}
    assert Publisher(bucket).publish(state, "step000001", 1).was_there is False
    assert bytes(rebuild("step000001", SnapshotReader(bucket)).tensors["w"].data) == state["w"].tobytes()


@pytest.mark.slow
def test_wrong_keys_and_missing_rights_are_named_and_no_secret_is_shown(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with bucket_servers.run_seaweedfs(tmp_path_factory.mktemp("keys")) as endpoint:
        url = f"s3://{BUCKET}/run"
        reader = open_bucket(url, keys=StaticKeys(*READER, "us-east-1", endpoint))
        assert probe_access(reader, wants_write=False).can_write is False
        with pytest.raises(SnapshotError) as caught:
            probe_access(reader, wants_write=True)
        assert caught.value.details["cause"] == "denied"
        assert "put (s3:PutObject)" in str(caught.value)

        stranger = open_bucket(url, keys=StaticKeys("NOSUCHKEYID", "no-such-secret", "us-east-1", endpoint))
        wrong_secret = open_bucket(url, keys=StaticKeys(READER[0], "no-such-secret", "us-east-1", endpoint))
        for bucket in (stranger, wrong_secret):
            with pytest.raises(SnapshotError) as caught:
                probe_access(bucket, wants_write=False)
            error = caught.value
            assert (error.code, error.details["cause"], error.exit_code) == ("storage_access", "denied", 3)
            shown = f"{error} {error.details} {error.__cause__}"
            for secret in (*READER, "NOSUCHKEYID", "no-such-secret"):
                assert secret not in shown
        missing = open_bucket("s3://nosuchbucket/run", environ=bucket_servers.writer_environ(endpoint))
        with pytest.raises(SnapshotError) as caught:
            probe_access(missing, wants_write=False)
        assert caught.value.details["cause"] == "no_bucket"


@pytest.mark.slow
def test_an_interrupted_multipart_upload_is_aborted_on_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b"z" * MIB
        raise RuntimeError("the trainer died")

    with bucket_servers.run_seaweedfs(tmp_path_factory.mktemp("abort")) as endpoint:
        bucket = open_bucket(f"s3://{BUCKET}/run", environ=bucket_servers.writer_environ(endpoint))
        with pytest.raises(RuntimeError, match="the trainer died"):
            bucket.put_stream("step1/data", pieces(), size=2**27)
        uploads = bucket_servers.open_client(endpoint).list_multipart_uploads(Bucket=BUCKET)
        assert uploads.get("Uploads", []) == []
