"""kill -9 at every step of publisher, cache and host copy: what survives is whole, and a retry completes it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import snapshot_crash_child as child

from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.materialize import rebuild, stage
from hotloop.snapshots.mirror import Mirror
from hotloop.snapshots.reader import SnapshotInfo, SnapshotReader
from hotloop.snapshots.verify import find_startup

CHILD = Path(child.__file__)
NO_EVENT = 0
Prepare = Callable[[Path], None]


def run_children(what: str, root: Path, first: int, last: int) -> list[str]:
    """Run one process for each event and return the lines that they print."""
    done = subprocess.run(
        [sys.executable, str(CHILD), what, str(root), str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def run_to_the_end(what: str, root: Path, prepare: Prepare) -> int:
    """Run a process that is not killed, in `root/event0`, and return its number of events."""
    folder = root / "event0"
    folder.mkdir()
    prepare(folder)
    count, status = run_children(what, root, NO_EVENT, NO_EVENT)
    assert status == "exit 0"
    return int(count.removeprefix("count "))


def kill_at_each_event(what: str, root: Path, num_events: int, prepare: Prepare) -> Iterator[tuple[int, Path]]:
    """Kill a process at each event, and yield the folders that they left."""
    folders = {event: root / f"event{event}" for event in range(1, num_events + 1)}
    for folder in folders.values():
        folder.mkdir()
        prepare(folder)
    assert run_children(what, root, 1, num_events) == [f"exit {-signal.SIGKILL}"] * num_events
    yield from folders.items()


def read_bucket(folder: Path) -> dict[str, bytes]:
    """Read every object, without the staging files (`name#1`) that a killed writer leaves and no listing shows."""
    bucket = folder / "bucket"
    return {
        str(path.relative_to(bucket)): path.read_bytes()
        for path in sorted(bucket.rglob("*"))
        if path.is_file() and "#" not in path.name
    }


def read_expected(version: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in child.make_states()[version - 1].items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a publisher that was not killed."""
    root = tmp_path_factory.mktemp("reference")
    run_to_the_end("publisher", root, lambda folder: None)
    return root / "event0"


@pytest.mark.slow
def test_a_killed_publisher_shows_only_whole_snapshots_and_a_retry_gives_identical_bytes(tmp_path: Path) -> None:
    num_events = run_to_the_end("publisher", tmp_path, lambda folder: None)
    assert num_events > 30
    expected = read_bucket(tmp_path / "event0")
    seen_incomplete = 0
    for event, folder in kill_at_each_event("publisher", tmp_path, num_events, lambda folder: None):
        bucket = open_bucket(f"file://{folder}/bucket")
        reader = SnapshotReader(bucket)
        for info in reader.list_snapshots():
            if not isinstance(info, SnapshotInfo):
                seen_incomplete += 1
                continue
            built = rebuild(info.identity, reader)
            content = {name: bytes(tensor.data) for name, tensor in built.tensors.items()}
            assert content == read_expected(int(info.identity[-1])), f"event {event}"
        assert find_startup(reader) in (None, "step000003")
        child.publish_all(bucket, child.Events(NO_EVENT))
        assert read_bucket(folder) == expected, f"event {event}"
        shutil.rmtree(folder)
    assert seen_incomplete > 5, "the kills met snapshots in the making"


@pytest.mark.slow
def test_a_killed_cache_holds_only_whole_entries_and_blocks_nobody(tmp_path: Path, reference: Path) -> None:
    def prepare(folder: Path) -> None:
        (folder / "bucket").symlink_to(reference / "bucket")

    num_events = run_to_the_end("cache", tmp_path, prepare)
    assert num_events > 20
    for event, folder in kill_at_each_event("cache", tmp_path, num_events, prepare):
        bucket = open_bucket(f"file://{folder}/bucket")
        reader = SnapshotReader(bucket)
        cache = Cache(folder / "cache", child.PARTITION, bucket, max_bytes=14_000)
        for identity in reader.list_identities():
            for file in reader.describe(identity).files.values():
                expected = (reference / "bucket" / identity / file.name).read_bytes()
                assert bytes(cache.fetch(file)) == expected, f"event {event}"
        assert not list((folder / "cache" / "partial").iterdir())
        assert sum(entry.size for entry in cache.list_entries()) <= 14_000
        cache.close()
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_killed_host_copy_holds_one_version_or_nothing(tmp_path: Path, reference: Path) -> None:
    def prepare(folder: Path) -> None:
        (folder / "bucket").symlink_to(reference / "bucket")

    num_events = run_to_the_end("mirror", tmp_path, prepare)
    assert num_events > 12
    dropped = 0
    for event, folder in kill_at_each_event("mirror", tmp_path, num_events, prepare):
        mirror = Mirror(folder / "mirror")
        if mirror.is_empty:
            dropped += 1
            held = None
        else:
            version = int(mirror.held.identity[-1])
            content = {name: bytes(tensor.data) for name, tensor in mirror.tensors.items()}
            assert content == read_expected(version), f"event {event}"
            assert mirror.policy_version == version
            held = mirror
        bucket = open_bucket(f"file://{folder}/bucket")
        staged = stage("step000003", SnapshotReader(bucket), MemoryFetcher(bucket), held=held)
        mirror.promote(staged)
        content = {name: bytes(tensor.data) for name, tensor in mirror.tensors.items()}
        assert content == read_expected(3), f"event {event}"
        mirror.close()
        shutil.rmtree(folder)
    # All events but the last of each promotion lie between journal and its removal.
    assert dropped == num_events - 3
