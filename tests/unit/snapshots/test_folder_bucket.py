"""A `file://` bucket: rights that are missing are told at once, and reading never makes the directory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.bucket_access import open_bucket, open_bucket_to_read
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.retry import RetryPolicy, call_with_retries
from hotloop.snapshots.storage_errors import translate

NOBODY = 65534
CALLS: dict[str, Callable[[Bucket], object]] = {
    "put": lambda bucket: bucket.put("b", b"x"),
    "put in a new directory": lambda bucket: bucket.put("a/b", b"x"),
    "create": lambda bucket: bucket.put("b", b"x", create_only=True),
    "stream": lambda bucket: bucket.put_stream("b", [b"x"], size=1),
    "delete": lambda bucket: bucket.delete(["secret"]),
    "get": lambda bucket: bucket.get("secret", max_bytes=10),
    "read": lambda bucket: list(bucket.read("secret")),
}


@contextmanager
def no_rights() -> Iterator[None]:
    """Root may do everything, so it becomes somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def locked() -> Iterator[Path]:
    """A directory that may be read and not written, outside pytest's own, which only its owner may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "secret").write_bytes(b"x")
        (folder / "secret").chmod(0)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
@pytest.mark.parametrize("call", CALLS)
def test_a_missing_right_is_told_at_once_and_named(call: str, locked: Path) -> None:
    waits: list[float] = []
    retry = RetryPolicy(budget_s=60.0, sleep=waits.append)
    bucket = open_bucket(f"file://{locked}")
    with no_rights(), pytest.raises(SnapshotError) as caught:
        call_with_retries(retry, lambda: CALLS[call](bucket))
    verb = "read" if call in ("get", "read") else "write"
    assert (caught.value.code, caught.value.details["cause"], caught.value.exit_code) == ("storage_access", "denied", 3)
    assert caught.value.do == f"Let this user {verb} there."
    assert waits == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("is_python_error", [True, False])
def test_every_kind_of_missing_right_is_access(number: int, is_python_error: bool) -> None:
    text = f"Generic LocalFileSystem error: Unable to create dir /b/a: {os.strerror(number)} (os error {number})"
    error = OSError(number, os.strerror(number)) if is_python_error else RuntimeError(text)
    found = translate(error, action="put", url="file:///b", key="a/x")
    assert isinstance(found, SnapshotError)
    assert (found.code, found.details["cause"]) == ("storage_access", "denied")
    assert ("read-only" in found.why) == (number == errno.EROFS)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_is_no_space(number: int) -> None:
    found = translate(RuntimeError(f"failed (os error {number})"), action="put", url="file:///b", key="x")
    assert isinstance(found, SnapshotError) and found.code == "no_space"


def test_a_fault_of_the_disk_or_of_a_network_is_still_tried_again() -> None:
    for url, number in (("file:///b", errno.EIO), ("s3://b/run", errno.EPERM)):
        found = translate(RuntimeError(f"failed (os error {number})"), action="put", url=url, key="x")
        assert isinstance(found, SnapshotError) and found.code == "storage_unavailable"


def test_a_reader_waits_for_the_directory_that_its_writer_makes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/to/come"
    bucket = open_bucket_to_read(url)
    reader = SnapshotReader(bucket, retry=RetryPolicy(budget_s=0.0))
    calls: list[Callable[[], object]] = [
        reader.list_identities,
        reader.read_startup,
        lambda: bucket.list_objects("a"),
        lambda: list(bucket.read("a/b")),
        lambda: bucket.put("a", b"x"),
    ]
    for call in calls:
        with pytest.raises(SnapshotError, match="there is no such directory") as caught:
            call()
        assert (caught.value.code, caught.value.details["cause"]) == ("storage_access", "no_bucket")
    assert not (tmp_path / "to").exists()

    open_bucket(url).put("STARTUP_SNAPSHOT", b"step000001")
    assert reader.read_startup() == "step000001"
    assert reader.list_identities() == []
