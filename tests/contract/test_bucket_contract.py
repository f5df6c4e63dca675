"""What every Bucket does, on memory, a directory, the scripted fake, localbucket and a real S3 server with keys."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import bucket_servers
import pytest

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import AlreadyThere, Bucket
from hotloop.snapshots.bucket_access import open_bucket, probe_access
from hotloop.snapshots.memory_bucket import FakeBucket

KINDS = [
    "fake",
    "memory",
    "file",
    "localbucket",
    pytest.param("seaweedfs", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def localbucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bucket_servers.run_localbucket(tmp_path_factory.mktemp("localbucket")) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bucket_servers.run_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """An empty bucket of each kind."""
    name = uuid.uuid4().hex
    if request.param == "fake":
        return FakeBucket(f"memory://{name}")
    if request.param == "memory":
        return open_bucket(f"memory://{name}/run")
    if request.param == "file":
        return open_bucket(f"file://{tmp_path}/{name}")
    endpoint: str = request.getfixturevalue(request.param)
    url = f"s3://{bucket_servers.BUCKET}/{name}"
    return open_bucket(url, environ=bucket_servers.writer_environ(endpoint))


def read_all(bucket: Bucket, key: str, start: int = 0) -> bytes:
    return b"".join(bucket.read(key, start=start))


def test_what_was_put_is_read_back(bucket: Bucket) -> None:
    bucket.put("step1/config.json", b'{"a": 1}')
    assert bucket.get("step1/config.json", max_bytes=100) == b'{"a": 1}'
    info = bucket.head("step1/config.json")
    assert (info.key, info.size) == ("step1/config.json", 8)
    assert info.etag


def test_an_empty_object_is_an_object(bucket: Bucket) -> None:
    bucket.put("step1/empty", b"")
    assert bucket.get("step1/empty", max_bytes=0) == b""
    assert read_all(bucket, "step1/empty") == b""
    assert bucket.head("step1/empty").size == 0


def test_a_missing_object_has_the_code_and_the_key(bucket: Bucket) -> None:
    for call in (
        lambda: bucket.head("step1/nothing"),
        lambda: bucket.get("step1/nothing", max_bytes=10),
        lambda: read_all(bucket, "step1/nothing"),
    ):
        with pytest.raises(SnapshotError) as caught:
            call()
        assert caught.value.code == "missing_object"
        assert caught.value.details["key"] == "step1/nothing"


def test_a_too_large_object_is_refused_by_get(bucket: Bucket) -> None:
    bucket.put("step1/big", b"x" * 11)
    with pytest.raises(SnapshotError) as caught:
        bucket.get("step1/big", max_bytes=10)
    assert caught.value.code == "object_corrupt"


def test_a_read_can_start_anywhere(bucket: Bucket) -> None:
    data = bytes(range(256)) * 40
    bucket.put("step1/data", data)
    assert read_all(bucket, "step1/data", 0) == data
    assert read_all(bucket, "step1/data", 5000) == data[5000:]
    assert read_all(bucket, "step1/data", len(data) - 1) == data[-1:]


def test_listings_show_only_immediate_children(bucket: Bucket) -> None:
    assert bucket.list_directories() == []
    assert bucket.list_objects("step1") == []
    for key in ("STARTUP_SNAPSHOT", "step1/a", "step1/b", "step1/deep/c", "step10/a"):
        bucket.put(key, key.encode())
    assert bucket.list_directories() == ["step1", "step10"]
    assert [(info.key, info.size) for info in bucket.list_objects("step1")] == [("step1/a", 7), ("step1/b", 7)]


def test_a_create_only_put_never_replaces(bucket: Bucket) -> None:
    bucket.put("step1/snapshot.json", b"first", create_only=True)
    with pytest.raises(AlreadyThere):
        bucket.put("step1/snapshot.json", b"second", create_only=True)
    assert bucket.get("step1/snapshot.json", max_bytes=10) == b"first"


def test_of_many_create_only_puts_at_once_exactly_one_wins(bucket: Bucket) -> None:
    won: list[int] = []
    lost: list[int] = []
    barrier = threading.Barrier(6)

    def put(number: int) -> None:
        barrier.wait()
        try:
            bucket.put("step1/race", str(number).encode(), create_only=True)
            won.append(number)
        except AlreadyThere:
            lost.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    assert bucket.get("step1/race", max_bytes=10) == str(won[0]).encode()


def test_a_plain_put_replaces(bucket: Bucket) -> None:
    bucket.put("STARTUP_SNAPSHOT", b"step1")
    bucket.put("STARTUP_SNAPSHOT", b"step2")
    assert bucket.get("STARTUP_SNAPSHOT", max_bytes=10) == b"step2"


def test_a_digest_in_user_metadata_comes_back_or_is_absent(bucket: Bucket) -> None:
    digest = hashlib.sha256(b"data").hexdigest()
    bucket.put("step1/a", b"data", sha256=digest)
    assert bucket.head("step1/a").sha256 in ((digest, None) if bucket.has_user_metadata else (None,))


def test_a_multipart_upload_keeps_bytes_and_digest(bucket: Bucket) -> None:
    piece = hashlib.sha256(b"seed").digest() * 32768
    pieces = [bytes([number]) + piece for number in range(20)]
    data = b"".join(pieces)
    digest = hashlib.sha256(data).hexdigest()
    bucket.put_stream("step1/large", iter(pieces), size=len(data), sha256=digest)
    assert hashlib.sha256(read_all(bucket, "step1/large")).hexdigest() == digest
    assert bucket.head("step1/large").sha256 in (digest, None)
    assert read_all(bucket, "step1/large", len(data) - 9) == data[-9:]


def test_a_stream_that_breaks_off_leaves_nothing(bucket: Bucket) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(24):
            yield b"z" * 2**20
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        bucket.put_stream("step1/broken", pieces(), size=2**26)
    with pytest.raises(SnapshotError) as caught:
        bucket.head("step1/broken")
    assert caught.value.code == "missing_object"
    assert bucket.list_objects("step1") == []


def test_deleting_what_is_gone_is_no_error(bucket: Bucket) -> None:
    bucket.put("step1/a", b"x")
    bucket.delete(["step1/a", "step1/a", "step1/never"])
    assert bucket.list_objects("step1") == []


def test_the_probe_finds_write_access_and_create_only_and_leaves_no_second_object(bucket: Bucket) -> None:
    for _ in range(2):
        access = probe_access(bucket, wants_write=True)
        assert (access.can_write, access.honours_create_only) == (True, True)
    assert [info.key for info in bucket.list_objects("_hotloop")] == ["_hotloop/probe"]


def test_the_probe_sees_that_a_store_ignores_create_only() -> None:
    access = probe_access(FakeBucket(honours_create_only=False), wants_write=True)
    assert (access.can_write, access.honours_create_only) == (True, False)


def test_a_directory_bucket_follows_no_link_out_of_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("private")
    bucket = open_bucket(f"file://{tmp_path}/bucket")
    bucket.put("step1/a", b"x")
    (tmp_path / "bucket" / "step2").symlink_to(secret)
    (tmp_path / "bucket" / "step1" / "config.json").symlink_to(secret / "config.json")
    for call in (
        lambda: bucket.list_objects("step2"),
        lambda: bucket.get("step2/config.json", max_bytes=100),
        lambda: bucket.get("step1/config.json", max_bytes=100),
        lambda: bucket.put("step1/config.json", b"overwritten"),
        lambda: bucket.delete(["step2/config.json"]),
    ):
        with pytest.raises(SnapshotError) as caught:
            call()
        assert caught.value.code == "storage_access"
    assert (secret / "config.json").read_text() == "private"
