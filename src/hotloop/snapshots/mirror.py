"""The host copy of what a replica serves: the parent of the next delta, kept across restarts.

    <root>/mirror.json       identity, digest, tensor table, name of the weights file; replaced atomically
    <root>/weights-N.bin     the tensors one after the other
    <root>/journal.json      there from before an install until the copy has been promoted

    begin(staged) --> install on the engine --> promote(staged)          abandon() when nothing was installed
      journal written                             changes written, mirror.json replaced, journal removed

Promises: what `held` names is what the file holds, checked by checksums at opening. After a crash between `begin` and
the end of `promote` the copy holds nothing (it may be of either version), so that the next load starts from an anchor;
two versions are never mixed. Changes are absolute values, and are refused on any base but their own.

Does not do: fetching (materialize.py), installing (service/).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from hotloop.errors import SnapshotError
from hotloop.snapshots.anchor import compute_adler32
from hotloop.snapshots.chain import Held
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.codecs.parallel import map_in_order
from hotloop.snapshots.file_lock import try_lock
from hotloop.snapshots.materialize import StagedSnapshot
from hotloop.snapshots.storage_errors import make_no_space
from hotloop.snapshots.upload import split

_SCHEMA = 1
_STATE = "mirror.json"
_JOURNAL = "journal.json"
_ALIGNMENT = 64
OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the weights file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    adler32: int


@dataclass(frozen=True, slots=True)
class _State:
    """What mirror.json says."""

    identity: str
    digest: str
    policy_version: int | None
    weights: str
    """Name of the weights file."""
    tensors: Mapping[str, _Place]
    nbytes: int


class Mirror:
    """One replica's host copy. One thread at a time; one process at a time."""

    def __init__(self, root: Path | str, *, on_step: OnStep = lambda step: None, verifies: bool = True) -> None:
        """Open the folder and take what is in it if it can be trusted.

        Args:
            on_step: called with each step that has just ended; for tests that kill.
            verifies: compare every tensor with its checksum; only a test that counts reads has a reason to say no.

        Raises: SnapshotError `mirror_in_use` when another process has it open.
        """
        self._root = Path(root)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._on_step = on_step
        descriptor = try_lock(self._root / "lock")
        if descriptor is None:
            raise SnapshotError(
                "mirror_in_use",
                "is open in another process",
                where=f"host copy {self._root}",
                do="Give each replica its own state directory.",
                exit_code=3,
            )
        self._descriptor = descriptor
        self._state: _State | None = None
        self._map: mmap.mmap | None = None
        self.dropped_because = ""
        """Why an existing copy was not taken; empty when there was none or it was."""
        try:
            self._load(verifies)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the folder up. Views of its tensors stay valid."""
        self._state = None
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # ---- the HeldContent port

    @property
    def is_empty(self) -> bool:
        """Nothing is held; the next load starts from an anchor."""
        return self._state is None

    @property
    def held(self) -> Held:
        """Identity and digest of the content."""
        state = self._require()
        return Held(state.identity, state.digest)

    @property
    def policy_version(self) -> int | None:
        """Policy version of the content."""
        return self._require().policy_version

    @property
    def tensors(self) -> Mapping[str, TensorBytes]:
        """Every tensor, read-only; valid until the next promotion writes to them."""
        state = self._require()
        view = memoryview(self._map).toreadonly() if self._map is not None else memoryview(b"")
        return {
            name: TensorBytes(place.dtype, place.shape, view[place.offset : place.offset + place.nbytes], place.file)
            for name, place in state.tensors.items()
        }

    @property
    def adler32(self) -> Mapping[str, int]:
        """Checksum of each tensor's current bytes."""
        return {name: place.adler32 for name, place in self._require().tensors.items()}

    def _require(self) -> _State:
        if self._state is None:
            raise ValueError("the host copy holds nothing; ask is_empty first")
        return self._state

    # ---- steps of a load

    def begin(self, staged: StagedSnapshot) -> None:
        """Write the journal, before the first byte is installed.

        Raises: SnapshotError `parent_mismatch` when the changes are not of the content held.
        """
        self._check_base(staged)
        entry = {"from": self._state.identity if self._state is not None else None, "to": staged.identity}
        self._write_json(_JOURNAL, entry)
        self._on_step("journal")

    def abandon(self) -> None:
        """Remove the journal: nothing was installed and nothing was written."""
        self._remove_file(_JOURNAL)

    def promote(self, staged: StagedSnapshot) -> None:
        """Make the copy hold what was installed. Doing it twice changes nothing.

        Raises:
            SnapshotError: `parent_mismatch` when the changes are not of the content held, `checksum_mismatch` when the
                result is not the staged content, `no_space`. After any of them the copy holds nothing.
        """
        if self._state is not None and (self._state.identity, self._state.digest) == (staged.identity, staged.digest):
            self._remove_file(_JOURNAL)
            return
        if not (self._root / _JOURNAL).exists():
            self.begin(staged)
        self._check_base(staged)
        try:
            if staged.base is None:
                self._replace(staged)
            else:
                self._change(staged)
        except BaseException:
            # The journal stays: whoever opens the folder next must not trust it either.
            self._state = None
            self._map = None
            raise
        self._on_step("state")
        self._remove_file(_JOURNAL)
        self._on_step("done")
        self._remove_strays()

    def forget(self) -> None:
        """Hold nothing, on disk too: after an install that failed midway."""
        self._state = None
        self._map = None
        self._remove_file(_STATE)
        self._remove_file(_JOURNAL)
        self._remove_strays()

    def _check_base(self, staged: StagedSnapshot) -> None:
        if staged.base is None:
            return
        held = self._state.identity if self._state is not None else None
        if held != staged.base:
            raise SnapshotError(
                "parent_mismatch",
                f"its changes are of {staged.base}, but {held or 'nothing'} is held",
                where=f"snapshot {staged.identity}",
                do="Stage it again.",
                details={"identity": staged.identity, "parent": staged.base, "held": held},
            )

    def _replace(self, staged: StagedSnapshot) -> None:
        """Write full content beside the old file, then point the state to it."""
        places: dict[str, _Place] = {}
        end = 0
        for name, tensor in sorted(staged.tensors.items()):
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = offset + tensor.nbytes
            adler32 = _known_adler32(staged, name)
            places[name] = _Place(
                tensor.dtype,
                tensor.shape,
                tensor.file,
                offset,
                tensor.nbytes,
                compute_adler32(tensor) if adler32 is None else adler32,
            )
        weights = f"weights-{self._next_number()}.bin"
        path = self._root / weights
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as out:
                for name, place in places.items():
                    out.seek(place.offset)
                    for piece in split(staged.tensors[name].data):
                        _write_all(out.fileno(), piece)
                    self._on_step(f"tensor:{name}")
                # A last tensor that is empty may lie beyond the last written byte.
                os.ftruncate(out.fileno(), max(end, 1))
                os.fsync(out.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._translate(error) from error
        self._on_step("weights")
        state = _State(staged.identity, staged.digest, staged.policy_version, weights, places, max(end, 1))
        self._write_state(state)
        self._map = _open_map(path)
        self._state = state

    def _change(self, staged: StagedSnapshot) -> None:
        """Write changes into the file that is held; the journal marks it as untrusted meanwhile."""
        state = self._require()
        assert self._map is not None
        places = dict(state.tensors)
        writable = memoryview(self._map)
        for change in staged.changes:
            place = places[change.name]
            target = writable[place.offset : place.offset + place.nbytes]
            change.write_into(target)
            actual = compute_adler32(TensorBytes(place.dtype, place.shape, target))
            expected = change.adler32 if change.adler32 is not None else _known_adler32(staged, change.name)
            if expected is not None and actual != expected:
                raise SnapshotError(
                    "checksum_mismatch",
                    f"tensor {change.name!r} of the host copy has Adler-32 {actual}; {expected} was staged",
                    where=f"snapshot {staged.identity}",
                    do="The copy is dropped; the next load starts from an anchor.",
                    details={"tensor": change.name, "expected": expected, "actual": actual},
                )
            places[change.name] = _Place(place.dtype, place.shape, place.file, place.offset, place.nbytes, actual)
            self._on_step(f"tensor:{change.name}")
        self._map.flush()
        self._on_step("weights")
        new = _State(staged.identity, staged.digest, staged.policy_version, state.weights, places, state.nbytes)
        self._write_state(new)
        self._state = new

    # ---- files

    def _load(self, verifies: bool) -> None:
        if (self._root / _JOURNAL).exists():
            self.dropped_because = "a crash interrupted an install or its promotion"
            self.forget()
            return
        self._remove_strays()
        path = self._root / _STATE
        if not path.exists():
            return
        try:
            state = _parse_state(path.read_bytes())
            weights = self._root / state.weights
            if weights.stat().st_size != state.nbytes:
                raise ValueError("the weights file has another size")
            self._map = _open_map(weights)
        except (ValueError, KeyError, TypeError, OSError) as error:
            self.dropped_because = f"its files cannot be read ({error})"
            self.forget()
            return
        self._state = state
        if verifies and not self._matches_checksums(state):
            self.dropped_because = "a tensor does not have its checksum"
            self.forget()

    def _matches_checksums(self, state: _State) -> bool:
        tensors = self.tensors
        names = list(state.tensors)
        sums = map_in_order(lambda name: compute_adler32(tensors[name]), names)
        return all(state.tensors[name].adler32 == adler32 for name, adler32 in zip(names, sums, strict=True))

    def _write_state(self, state: _State) -> None:
        self._write_json(
            _STATE,
            {
                "schema": _SCHEMA,
                "identity": state.identity,
                "digest": state.digest,
                "policy_version": state.policy_version,
                "weights": state.weights,
                "nbytes": state.nbytes,
                "tensors": {
                    name: [place.dtype, list(place.shape), place.file, place.offset, place.nbytes, place.adler32]
                    for name, place in state.tensors.items()
                },
            },
        )

    def _write_json(self, name: str, document: object) -> None:
        """Replace a file atomically and durably."""
        path = self._root / name
        temporary = path.with_suffix(".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as out:
                out.write(orjson.dumps(document))
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._translate(error) from error
        self._sync_folder()

    def _remove_file(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)
        self._sync_folder()

    def _sync_folder(self) -> None:
        descriptor = os.open(self._root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_strays(self) -> None:
        """Remove weights files and temporaries that the state does not name."""
        keep = ""
        if self._state is not None:
            keep = self._state.weights
        elif (self._root / _STATE).exists():
            try:
                keep = _parse_state((self._root / _STATE).read_bytes()).weights
            except (ValueError, KeyError, TypeError):
                keep = ""
        for path in self._root.iterdir():
            if (path.name.startswith("weights-") and path.name != keep) or path.suffix == ".tmp":
                path.unlink(missing_ok=True)

    def _next_number(self) -> int:
        """A number that no file has: one that is mapped must never be truncated under its readers."""
        numbers = [path.stem.removeprefix("weights-") for path in self._root.glob("weights-*.bin")]
        return max((int(number) for number in numbers if number.isdigit()), default=0) + 1

    def _translate(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return make_no_space(f"host copy {self._root}")
        return error


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece.nbytes:
        piece = piece[os.write(descriptor, piece) :]


def _open_map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)


def _known_adler32(staged: StagedSnapshot, name: str) -> int | None:
    """The checksum that the manifest gives; staging has verified it."""
    if staged.manifest is None or name not in staged.manifest.tensors:
        return None
    return staged.manifest.tensors[name].adler32


def _parse_state(data: bytes) -> _State:
    document = orjson.loads(data)
    if document["schema"] != _SCHEMA:
        raise ValueError(f"schema {document['schema']} is not {_SCHEMA}")
    weights = document["weights"]
    if not isinstance(weights, str) or "/" in weights or not weights.startswith("weights-"):
        raise ValueError("it names no weights file")
    places = {
        name: _Place(dtype, tuple(shape), file, offset, nbytes, adler32)
        for name, (dtype, shape, file, offset, nbytes, adler32) in document["tensors"].items()
    }
    return _State(
        document["identity"],
        document["digest"],
        document["policy_version"],
        weights,
        places,
        document["nbytes"],
    )
