"""The node's delivery cache: one read per object, partitions, corruption, eviction and pins."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotloop.errors import InputError, SnapshotError
from hotloop.snapshots.cache import Cache, parse_partition
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.reader import RemoteFile
from hotloop.snapshots.retry import RetryPolicy

PARTITION = bytes(range(32))


def put(bucket: FakeBucket, name: str, data: bytes, *, has_digest: bool = True) -> RemoteFile:
    bucket.put(f"step1/{name}", data)
    digest = hashlib.sha256(data).hexdigest() if has_digest else None
    return RemoteFile("step1", name, len(data), digest, bucket.head(f"step1/{name}").etag, "weights")


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


@pytest.fixture
def cache(bucket: FakeBucket, tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path / "cache", PARTITION, bucket)
    yield cache
    cache.close()


def reads(bucket: FakeBucket, name: str) -> int:
    return bucket.calls["read", f"step1/{name}"]


def test_an_object_is_read_once(bucket: FakeBucket, cache: Cache, tmp_path: Path) -> None:
    file = put(bucket, "a", b"x" * 100_000)
    other = Cache(tmp_path / "cache", PARTITION, bucket)
    assert bytes(cache.fetch(file)) == bytes(cache.fetch(file)) == bytes(other.fetch(file)) == b"x" * 100_000
    other.close()
    assert reads(bucket, "a") == 1


def test_an_empty_object_is_fetched_too(bucket: FakeBucket, cache: Cache) -> None:
    assert bytes(cache.fetch(put(bucket, "a", b""))) == b""


def test_concurrent_readers_join_the_first_fetch(bucket: FakeBucket, tmp_path: Path) -> None:
    file = put(bucket, "a", b"x" * 100_000)
    caches = [Cache(tmp_path / "cache", PARTITION, bucket) for _ in range(2)]
    barrier = threading.Barrier(8)

    def fetch(number: int) -> bytes:
        barrier.wait()
        return bytes(caches[number % 2].fetch(file))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(fetch, range(8))) == {b"x" * 100_000}
    for cache in caches:
        cache.close()
    assert reads(bucket, "a") == 1


def test_progress_counts_every_byte_whoever_fetched_it(bucket: FakeBucket, cache: Cache) -> None:
    file = put(bucket, "a", b"x" * 200_000)
    for _ in range(2):
        counted: list[int] = []
        cache.fetch(file, on_bytes=counted.append)
        assert sum(counted) == 200_000


def test_partitions_share_nothing_not_even_names(bucket: FakeBucket, cache: Cache, tmp_path: Path) -> None:
    file = put(bucket, "a", b"data")
    stranger = Cache(tmp_path / "cache", b"q" * 32, bucket)
    cache.fetch(file)
    stranger.fetch(file)
    assert cache.name_entry(file) != stranger.name_entry(file)
    assert reads(bucket, "a") == 2
    stranger.close()


def test_the_name_covers_bucket_identity_file_and_content(bucket: FakeBucket, cache: Cache, tmp_path: Path) -> None:
    elsewhere = Cache(tmp_path / "cache", PARTITION, FakeBucket("memory://other"))
    file = RemoteFile("step1", "a", 4, "aa", "", "weights")
    names = {
        cache.name_entry(file),
        elsewhere.name_entry(file),
        cache.name_entry(RemoteFile("step2", "a", 4, "aa", "", "weights")),
        cache.name_entry(RemoteFile("step1", "b", 4, "aa", "", "weights")),
        cache.name_entry(RemoteFile("step1", "a", 4, "bb", "", "weights")),
        cache.name_entry(RemoteFile("step1", "a", 4, None, "etag", "weights")),
        cache.name_entry(RemoteFile("step1", "a", 5, None, "etag", "weights")),
    }
    assert len(names) == 7
    elsewhere.close()


def test_nobody_else_on_the_node_can_read_an_entry(bucket: FakeBucket, cache: Cache, tmp_path: Path) -> None:
    cache.fetch(put(bucket, "a", b"data"))
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("has_digest", [True, False])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_corrupt_entry_is_fetched_again(
    bucket: FakeBucket, cache: Cache, tmp_path: Path, damage: str, has_digest: bool
) -> None:
    file = put(bucket, "a", b"x" * 1000, has_digest=has_digest)
    cache.fetch(file)
    path = tmp_path / "cache" / cache.name_entry(file) / "data"
    if damage == "flip":
        path.write_bytes(b"y" + b"x" * 999)
    else:
        os.truncate(path, 500 if damage == "truncate" else 0)
    fresh = Cache(tmp_path / "cache", PARTITION, bucket)
    assert bytes(fresh.fetch(file)) == b"x" * 1000
    fresh.close()
    assert reads(bucket, "a") == 2


def test_a_damaged_object_is_fetched_twice_and_then_given_up(bucket: FakeBucket, cache: Cache, tmp_path: Path) -> None:
    file = put(bucket, "a", b"good")
    bucket.put("step1/a", b"evil")
    with pytest.raises(SnapshotError) as caught:
        cache.fetch(file)
    assert caught.value.code == "object_corrupt"
    assert reads(bucket, "a") == 2
    assert list((tmp_path / "cache" / "partial").iterdir()) == []


def test_a_foreign_file_that_is_replaced_meanwhile_is_refused(bucket: FakeBucket, cache: Cache) -> None:
    file = put(bucket, "a", b"old!", has_digest=False)
    bucket.put("step1/a", b"new!")
    with pytest.raises(SnapshotError) as caught:
        cache.fetch(file)
    assert caught.value.code == "object_corrupt"


def test_a_broken_transfer_goes_on_by_range(bucket: FakeBucket, tmp_path: Path) -> None:
    slept: list[float] = []
    policy = RetryPolicy(sleep=slept.append, clock=lambda: sum(slept))
    cache = Cache(tmp_path / "cache", PARTITION, bucket, retry=policy)
    file = put(bucket, "a", os.urandom(300_000))
    bucket.cut_after["step1/a"] = 130_000
    assert hashlib.sha256(cache.fetch(file)).hexdigest() == file.sha256
    assert reads(bucket, "a") == 2
    assert len(slept) == 1
    cache.close()


def test_dropping_an_entry_makes_the_next_fetch_read_the_bucket(bucket: FakeBucket, cache: Cache) -> None:
    file = put(bucket, "a", b"data")
    cache.fetch(file)
    cache.drop(file)
    cache.fetch(file)
    assert reads(bucket, "a") == 2


def open_small(bucket: FakeBucket, tmp_path: Path) -> Cache:
    """A cache for three files of 1000 bytes."""
    return Cache(tmp_path / "cache", PARTITION, bucket, max_bytes=3000)


def age(cache: Cache, tmp_path: Path, files: list[RemoteFile]) -> None:
    """Give entries the use times 1, 2, 3, ... seconds."""
    for position, file in enumerate(files, start=1):
        os.utime(tmp_path / "cache" / cache.name_entry(file) / "used", (position, position))


def test_the_least_recently_used_entry_is_evicted(bucket: FakeBucket, tmp_path: Path) -> None:
    cache = open_small(bucket, tmp_path)
    files = [put(bucket, name, name.encode() * 1000) for name in "abcd"]
    for file in files[:3]:
        cache.fetch(file)
    age(cache, tmp_path, [files[1], files[0], files[2]])
    held = cache.fetch(files[1])
    age(cache, tmp_path, [files[1], files[0], files[2]])
    cache.fetch(files[3])
    assert {entry.name for entry in cache.list_entries()} == {cache.name_entry(files[i]) for i in (0, 2, 3)}
    assert bytes(held) == b"b" * 1000, "a map that is open stays readable"
    cache.close()


def test_pinned_files_are_never_evicted_by_any_process(bucket: FakeBucket, tmp_path: Path) -> None:
    mine, other = open_small(bucket, tmp_path), open_small(bucket, tmp_path)
    files = [put(bucket, name, name.encode() * 1000) for name in "abcd"]
    for file in files[:3]:
        mine.fetch(file)
    age(mine, tmp_path, files[:3])
    other.protect([files[0]])
    mine.expect([files[1]])
    mine.fetch(files[3])
    assert {entry.name for entry in mine.list_entries()} == {mine.name_entry(files[i]) for i in (0, 1, 3)}
    mine.protect(files)
    with pytest.raises(SnapshotError) as caught:
        other.fetch(put(bucket, "e", b"e" * 1000))
    assert caught.value.code == "no_space"
    mine.close()
    other.fetch(put(bucket, "e", b"e" * 1000))
    assert other.name_entry(files[0]) in {entry.name for entry in other.list_entries()}
    other.close()


def test_a_full_disk_is_no_space_and_leaves_no_scratch(
    bucket: FakeBucket, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(bucket, "a", b"data")

    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(SnapshotError) as caught:
        cache.fetch(file)
    assert (caught.value.code, caught.value.retryable) == ("no_space", True)
    assert list((tmp_path / "cache" / "partial").iterdir()) == []
    monkeypatch.undo()
    assert bytes(cache.fetch(file)) == b"data"


@pytest.mark.parametrize("text", ["", "00", "g" * 64, "0" * 63, "0" * 66])
def test_a_wrong_partition_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_partition(text)
    assert caught.value.code == "invalid_secret"
    assert not text or text not in str(caught.value)


def test_a_partition_is_64_hex_digits() -> None:
    assert parse_partition(PARTITION.hex() + "\n") == PARTITION
