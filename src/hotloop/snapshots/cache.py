"""The delivery cache of a node: each object is read from the bucket once, whoever of the node's replicas wants it.

    replica process 1 --+
                        +--> lock of the entry --> first: download, verify, rename --> entry --> mapped by all
    replica process 2 --+                          others: wait, then find it

Owns: the folder `<root>/`: entries, locks, partial files and pins.

Promises: an entry is whole and verified before it has its name. Entries of different partitions share nothing, not even
names. A corrupt entry is dropped and fetched again once. Eviction takes the least recently used entry and never a file
that a live process has pinned: those of a loading chain and of the served snapshot's chain. Files are 0600 in folders
of 0700.

Does not do: what the files mean (materialize.py), transfers (transfer.py), machines without `flock`.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

from hotloop.errors import InputError, SnapshotError
from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.file_lock import hold_lock, try_lock
from hotloop.snapshots.reader import RemoteFile
from hotloop.snapshots.retry import RetryPolicy
from hotloop.snapshots.storage_errors import make_no_space
from hotloop.snapshots.transfer import download

PARTITION_BYTES = 32
_DATA = "data"
_USED = "used"
_SHA256 = "sha256"
_ENTRY_NAME_LENGTH = 64
_HASH_CHUNK_BYTES = 8 * 1024**2


def parse_partition(text: str) -> bytes:
    """Parse the secret `rl_bdn_partition`: 32 random bytes as 64 hex digits.

    Raises: InputError `invalid_secret`; the message never repeats the text.
    """
    try:
        partition = bytes.fromhex(text.strip())
    except ValueError:
        partition = b""
    if len(partition) != PARTITION_BYTES:
        raise InputError(
            "invalid_secret",
            f"must be {PARTITION_BYTES} random bytes as {2 * PARTITION_BYTES} hex digits",
            where="secret rl_bdn_partition",
            do='Make one with: python -c "import secrets; print(secrets.token_hex(32))"',
        )
    return partition


class PeerSource(Protocol):
    """Other nodes' caches; peers.py is the one over HTTP."""

    def fetch(self, file: RemoteFile, write: Callable[[bytes], None]) -> bool:
        """Hand on the bytes of a file that a peer gives; False when none does. What was handed on is checked anyway."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size: int
    used_at: float


class Cache:
    """The cache folder as one process sees it. Safe for several threads and several processes."""

    def __init__(
        self,
        root: Path | str,
        partition: bytes,
        bucket: Bucket,
        *,
        max_bytes: int = 0,
        retry: RetryPolicy | None = None,
        peers: PeerSource | None = None,
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        """Open or make the folder.

        Args:
            partition: from `parse_partition`.
            max_bytes: evict above this; 0 means that only the disk is the limit.
            peers: asked before the bucket for objects whose SHA-256 a manifest gives.
            on_step: called with each step that has just ended: `locked`, `downloaded`, `renamed`, `evicted`.
        """
        if len(partition) != PARTITION_BYTES:
            raise ValueError(f"a partition has {PARTITION_BYTES} bytes")
        self._root = Path(root)
        self._partition = partition
        self._bucket = bucket
        self._max_bytes = max_bytes
        self._retry = retry or RetryPolicy()
        self._peers = peers
        self._on_step = on_step
        self._locks = self._root / "locks"
        self._partial = self._root / "partial"
        self._pins = self._root / "pins"
        for folder in (self._root, self._locks, self._partial, self._pins):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # `mkdir` leaves the mode of an existing folder, and the process may have a wide umask.
            folder.chmod(0o700)
        self._mutex = threading.Lock()
        self._verified: set[tuple[int, int, int]] = set()
        self._pinned: set[str] = set()
        # Processes are told apart by a random name, and alive ones by the lock they hold on it.
        self._pin_path = self._pins / secrets.token_hex(8)
        # Under the eviction lock, or a reader could take the file for a dead process's between its making and locking.
        with hold_lock(self._locks / "evict"):
            descriptor = try_lock(self._pin_path)
        assert descriptor is not None, "a random name is nobody else's"
        self._pin_descriptor = descriptor

    def close(self) -> None:
        """Give up this process's pins."""
        with self._mutex:
            if self._pin_descriptor >= 0:
                self._pin_path.unlink(missing_ok=True)
                os.close(self._pin_descriptor)
                self._pin_descriptor = -1

    def name_entry(self, file: RemoteFile) -> str:
        """Compute the entry's name: an HMAC, so that other partitions can neither share nor read it."""
        content = file.sha256 if file.sha256 is not None else f"{file.etag}:{file.size}"
        message = json.dumps([self._bucket.url, file.identity, file.name, content]).encode()
        return hmac.new(self._partition, message, hashlib.sha256).hexdigest()

    # ---- the Fetcher port

    def fetch(
        self, file: RemoteFile, *, on_bytes: Callable[[int], None] = lambda nbytes: None, asks_peers: bool = True
    ) -> memoryview:
        """Return the file's bytes, mapped; from the bucket only if no process of this node has fetched it.

        Args:
            asks_peers: False for a request that comes from a peer, so that two nodes never wait for each other.

        Raises: SnapshotError `missing_object`, `object_corrupt`, `no_space`, `storage_*`.
        """
        name = self.name_entry(file)
        found = self._open(name, file)
        if found is None:
            with hold_lock(self._locks / name):
                self._on_step("locked")
                # Whoever had the lock before has probably just fetched it.
                found = self._open(name, file)
                if found is None:
                    self._remove(name)
                    found = self._download(name, file, on_bytes, asks_peers)
                    self._touch(name)
                    return found
        self._touch(name)
        on_bytes(file.size)
        return found

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Pin the files of a loading chain, in addition to what is pinned."""
        with self._mutex:
            self._pinned |= {self.name_entry(file) for file in files}
            self._write_pins()

    def protect(self, files: Iterable[RemoteFile]) -> None:
        """Pin exactly these files: those of the served snapshot's chain, once a load has ended."""
        with self._mutex:
            self._pinned = {self.name_entry(file) for file in files}
            self._write_pins()

    def drop(self, file: RemoteFile) -> None:
        """Remove an entry, so that the next fetch reads the bucket."""
        name = self.name_entry(file)
        with hold_lock(self._locks / name):
            self._remove(name)

    # ---- entries

    def _open(self, name: str, file: RemoteFile) -> memoryview | None:
        """Map an entry after checking it; None when there is none or it is corrupt."""
        path = self._root / name / _DATA
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_size != file.size:
                return None
            if status.st_size == 0:
                return memoryview(b"")
            view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)
        mark = _mark(status)
        with self._mutex:
            if mark in self._verified:
                return view
        if _hash(view) != self._expected_sha256(name, file):
            return None
        with self._mutex:
            self._verified.add(mark)
        return view

    def _expected_sha256(self, name: str, file: RemoteFile) -> str:
        """The manifest's digest, or for a foreign file the one noted when it was downloaded."""
        if file.sha256 is not None:
            return file.sha256
        try:
            return (self._root / name / _SHA256).read_text()
        except FileNotFoundError:
            return ""

    def _download(self, name: str, file: RemoteFile, on_bytes: Callable[[int], None], asks_peers: bool) -> memoryview:
        """Fetch an object into an entry. The entry's lock is held."""
        self._make_room(file.size, but=name)
        partial = self._partial / name
        try:
            sha256 = self._download_from_peer(partial, file, on_bytes) if asks_peers else ""
            try:
                sha256 = sha256 or self._download_to(partial, file, on_bytes)
            except SnapshotError as error:
                if error.code != "object_corrupt":
                    raise
                # Once more: a proxy or a disk may have damaged the bytes on their way.
                sha256 = self._download_to(partial, file, on_bytes)
            self._on_step("downloaded")
            entry = self._root / name
            entry.mkdir(mode=0o700, exist_ok=True)
            note = entry / _SHA256
            note.write_text(sha256)
            note.chmod(0o600)
            os.replace(partial, entry / _DATA)
            self._on_step("renamed")
            with self._mutex:
                self._verified.add(_mark((entry / _DATA).stat()))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise _translate(error, file) from error
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        found = self._open(name, file)
        assert found is not None, "an entry whose lock is held cannot vanish"
        return found

    def _download_from_peer(self, path: Path, file: RemoteFile, on_bytes: Callable[[int], None]) -> str:
        """Ask a peer. Returns the SHA-256 of what it gave, which is the manifest's; empty when none gave it."""
        if self._peers is None or file.sha256 is None:
            return ""
        digest = hashlib.sha256()
        size = 0
        with _create(path) as out:

            def write(piece: bytes) -> None:
                nonlocal size
                out.write(piece)
                digest.update(piece)
                size += len(piece)

            is_given = self._peers.fetch(file, write)
            _make_durable(out)
        if not is_given or size != file.size or digest.hexdigest() != file.sha256:
            return ""
        on_bytes(size)
        self._on_step("peer")
        return file.sha256

    def _download_to(self, path: Path, file: RemoteFile, on_bytes: Callable[[int], None]) -> str:
        with _create(path) as out:
            sha256 = download(self._bucket, file, out.write, retry=self._retry, on_bytes=on_bytes)
            _make_durable(out)
        return sha256

    def _touch(self, name: str) -> None:
        """Note the use of an entry; it may just have been evicted, which does no harm to its open map."""
        used = self._root / name / _USED
        try:
            used.touch(mode=0o600)
        except FileNotFoundError:
            return

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)

    # ---- room

    def list_entries(self) -> list[_Entry]:
        """List the entries, least recently used first."""
        entries: list[_Entry] = []
        for folder in self._root.iterdir():
            if len(folder.name) != _ENTRY_NAME_LENGTH:
                continue
            try:
                size = (folder / _DATA).stat().st_size
                used = folder / _USED
                used_at = (used if used.exists() else folder / _DATA).stat().st_mtime
            except FileNotFoundError:
                continue
            entries.append(_Entry(folder.name, size, used_at))
        return sorted(entries, key=lambda entry: (entry.used_at, entry.name))

    def _make_room(self, size: int, *, but: str) -> None:
        """Evict until a file of this size fits the limit and the disk.

        Raises: SnapshotError `no_space`.
        """
        with hold_lock(self._locks / "evict"):
            entries = self.list_entries()
            total = sum(entry.size for entry in entries)
            free = shutil.disk_usage(self._root).free
            surplus = total + size - self._max_bytes if self._max_bytes else 0
            needed = max(surplus, size - free)
            if needed <= 0:
                return
            pinned = self._read_pins()
            for entry in entries:
                if entry.name in pinned or entry.name == but:
                    continue
                if not self._evict(entry.name):
                    continue
                needed -= entry.size
                if needed <= 0:
                    return
            raise make_no_space(f"cache {self._root}, which needs {size} more bytes and may evict nothing else")

    def _evict(self, name: str) -> bool:
        """Remove an entry unless somebody is fetching it right now."""
        descriptor = try_lock(self._locks / name)
        if descriptor is None:
            return False
        try:
            self._remove(name)
        finally:
            os.close(descriptor)
        self._on_step("evicted")
        return True

    # ---- pins

    def _write_pins(self) -> None:
        """Write this process's pins into the file it holds locked; readers hold the eviction lock."""
        with hold_lock(self._locks / "evict"):
            text = json.dumps(sorted(self._pinned)).encode()
            os.ftruncate(self._pin_descriptor, 0)
            os.pwrite(self._pin_descriptor, text, 0)

    def _read_pins(self) -> set[str]:
        """Join the pins of every live process; files of dead ones are removed."""
        pinned: set[str] = set()
        for path in self._pins.iterdir():
            if path == self._pin_path:
                pinned |= self._pinned
                continue
            descriptor = try_lock(path)
            if descriptor is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                continue
            text = path.read_text()
            pinned |= set(json.loads(text)) if text else set()
        return pinned


def _create(path: Path) -> BufferedWriter:
    """Make a file afresh; one left by a process that was killed is of no use: nobody knows how much of it is good."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _make_durable(out: BufferedWriter) -> None:
    out.flush()
    os.fsync(out.fileno())


def _mark(status: os.stat_result) -> tuple[int, int, int]:
    """Tell a file that this process has verified from one that was replaced or written to since."""
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def _hash(view: memoryview) -> str:
    digest = hashlib.sha256()
    for start in range(0, view.nbytes, _HASH_CHUNK_BYTES):
        digest.update(view[start : start + _HASH_CHUNK_BYTES])
    return digest.hexdigest()


def _translate(error: OSError, file: RemoteFile) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return make_no_space(f"while caching {file.key}")
    return error
