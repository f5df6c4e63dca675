"""Processes that publish, cache or promote, and kill themselves at a given event. Run by test_snapshot_crash.py.

    python snapshot_crash_child.py WHAT ROOT FIRST LAST

For each event from FIRST to LAST a process is forked, before anything was started that a fork could break, and works in
ROOT/event<N>. Its exit status and its number of events are printed. Event 0 never comes: that process runs to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.snapshots import upload
from hotloop.snapshots.bucket import Bucket, Chunk
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.materialize import stage
from hotloop.snapshots.mirror import Mirror
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader

PARTITION = bytes(range(32))
STATES: list[dict[str, np.ndarray]] = []


def make_states() -> list[dict[str, np.ndarray]]:
    """Three versions of a small policy."""
    rng = np.random.default_rng(5)
    first = {f"layer{i}": rng.integers(0, 2**16, (48, 64), dtype=np.uint16) for i in range(2)}
    second = {name: array ^ np.uint16(1) for name, array in first.items()}
    third = {name: array.copy() for name, array in second.items()}
    third["layer1"][3:5] ^= 7
    return [first, second, third]


class Events:
    """Counts events and kills this process at one of them."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.count = 0

    def __call__(self, _name: str = "") -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


class KillingBucket:
    """A bucket with an event before, inside and after each write."""

    def __init__(self, bucket: Bucket, events: Events) -> None:
        self._bucket = bucket
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def put(self, key: str, data: Chunk, *, sha256: str = "", create_only: bool = False) -> None:
        self._events()
        self._bucket.put(key, data, sha256=sha256, create_only=create_only)
        self._events()

    def put_stream(self, key: str, pieces: Iterable[Chunk], *, size: int, sha256: str = "") -> None:
        def watched() -> Iterator[Chunk]:
            for piece in pieces:
                yield piece
                self._events()

        self._events()
        self._bucket.put_stream(key, watched(), size=size, sha256=sha256)
        self._events()


def publish_all(bucket: Bucket, events: Events) -> None:
    """Publish an anchor and two deltas, and name the last as startup."""
    # Small files go up in one request; here the larger ones shall go up in pieces.
    upload.MULTIPART_ABOVE_BYTES = 4096
    settings = PublishSettings(
        workers=1, max_shard_bytes=7000, on_step=events, now=lambda: datetime(2026, 1, 1, tzinfo=UTC)
    )
    publisher = Publisher(bucket, settings)
    for version, state in enumerate(make_states(), start=1):
        publisher.publish(state, f"step{version:06d}", version, extras={"config.json": b"{}"})
    publisher.set_startup("step000003")


def run_publisher(folder: Path, events: Events) -> None:
    publish_all(KillingBucket(open_bucket(f"file://{folder}/bucket"), events), events)


def run_cache(folder: Path, events: Events) -> None:
    """Fetch every file of the chain through a cache that has room for about half of them."""
    bucket = open_bucket(f"file://{folder}/bucket")
    cache = Cache(folder / "cache", PARTITION, bucket, max_bytes=14_000, on_step=events)
    reader = SnapshotReader(bucket)
    for identity in reader.list_identities():
        for file in reader.describe(identity).files.values():
            cache.fetch(file)


def run_mirror(folder: Path, events: Events) -> None:
    """Load the three versions one after the other."""
    bucket = open_bucket(f"file://{folder}/bucket")
    reader = SnapshotReader(bucket)
    mirror = Mirror(folder / "mirror", on_step=events)
    for version in range(1, 4):
        held = None if mirror.is_empty else mirror
        staged = stage(f"step{version:06d}", reader, MemoryFetcher(bucket), held=held)
        mirror.begin(staged)
        mirror.promote(staged)


if __name__ == "__main__":
    what, root, first, last = sys.argv[1:]
    work = {"publisher": run_publisher, "cache": run_cache, "mirror": run_mirror}[what]
    for event in range(int(first), int(last) + 1):
        pid = os.fork()
        if pid == 0:
            events = Events(event)
            work(Path(root) / f"event{event}", events)
            print(f"count {events.count}", flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(f"exit {os.waitstatus_to_exitcode(status)}", flush=True)
