"""The deployment's history of loads, on disk: what a restart goes on from.

Owns: `ledger.json`, schema 1. Replaced atomically and fsynced.
Promises: a ledger that cannot be read is moved aside, never repaired, and the deployment then acts as after a reset; a
save whose outcome is unknown raises `ledger_uncertain` until a later save succeeds.
Does not do: deciding what is loaded (deployment.py).
Source: hot_load.md section 6.4.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from hotloop.errors import ServiceError

SCHEMA = 1
MAX_ENTRIES = 1000
State = Literal["loading", "done", "error", "superseded", "canceled"]


@dataclass(slots=True)
class Entry:
    """One load that was asked for."""

    identity: str
    kind: str
    parent: str | None
    policy_version: int | None
    manifest_digest: str
    formats: dict[str, Any]
    requested_at: str
    finished_at: str | None = None
    state: State = "loading"
    reason: str = ""
    replicas: dict[str, dict[str, Any]] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    """What the POST said of a directory without a manifest; needed to resolve later chains."""


class Ledger:
    """The entries, oldest first in memory, newest first when shown."""

    def __init__(self, path: Path, *, clock: Callable[[], str]) -> None:
        self._path = path
        self._clock = clock
        self._uncertain = False
        self._interrupted: Entry | None = None
        self.entries: list[Entry] = []
        self.needs_anchor = False
        """True after a reset or a lost ledger: the next load must be an anchor."""
        self.reload()

    def reload(self) -> None:
        """Read the file; one that cannot be read is moved aside."""
        self.entries = []
        self.needs_anchor = False
        self._uncertain = False
        self._interrupted = None
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return
        try:
            body = orjson.loads(raw)
            if body["schema"] != SCHEMA:
                raise ValueError(f"schema {body['schema']}")
            self.entries = [_read_entry(entry) for entry in body["entries"]]
            self.needs_anchor = bool(body["base"] and body["base"].get("needs_anchor"))
            self._close_open_entries()
        except (ValueError, KeyError, TypeError, AttributeError):
            self._interrupted = None
            aside = self._path.with_name(f"{self._path.name}.unreadable-{self._clock().replace(':', '')}")
            os.replace(self._path, aside)
            self.entries = []
            self.needs_anchor = True
            self.save()

    def _close_open_entries(self) -> None:
        """A load that ran when its gateway ended was never finished by anyone; the next save tells."""
        for entry in self.entries:
            if entry.state == "loading":
                entry.state, entry.reason, entry.finished_at = "canceled", "canceled", self._clock()
                self._interrupted = entry

    def take_interrupted(self) -> Entry | None:
        """Give the newest load that was accepted and not finished when the last gateway ended; once."""
        entry, self._interrupted = self._interrupted, None
        return entry

    def save(self) -> None:
        """Write the file.

        Raises:
            ServiceError: `ledger_uncertain`.
        """
        self.entries = self.entries[-MAX_ENTRIES:]
        body = {
            "schema": SCHEMA,
            "base": {"needs_anchor": True} if self.needs_anchor else None,
            "entries": [asdict(entry) for entry in self.entries],
        }
        try:
            _replace(self._path, orjson.dumps(body, option=orjson.OPT_INDENT_2))
        except OSError as error:
            self._uncertain = True
            raise ServiceError(
                "ledger_uncertain",
                f"the ledger could not be saved ({error.strerror})",
                where=str(self._path),
                do="Free space or mend the folder, then restart the deployment.",
            ) from error
        self._uncertain = False

    def check(self) -> None:
        """Refuse to go on from a ledger whose content on disk is unknown; saves it again first.

        Raises:
            ServiceError: `ledger_uncertain`.
        """
        if self._uncertain:
            self.save()

    def add(self, entry: Entry) -> None:
        """Note a new load.

        Raises:
            ServiceError: `ledger_uncertain`; the load is not noted.
        """
        self.entries.append(entry)
        try:
            self.save()
        except ServiceError:
            self.entries = [each for each in self.entries if each is not entry]  # refused: it never began
            raise

    def finish(self, entry: Entry, state: State, reason: str = "") -> None:
        """Note how a load ended."""
        entry.state, entry.reason, entry.finished_at = state, reason, self._clock()
        if state == "done" and entry.kind == "anchor":
            self.needs_anchor = False
        self.save()

    def clear(self) -> None:
        """Forget everything; what is served goes on."""
        self.entries = []
        self.needs_anchor = True
        self.save()

    def newest_done(self) -> Entry | None:
        """The load that a restarted deployment returns to."""
        return next((entry for entry in reversed(self.entries) if entry.state == "done"), None)

    def hints_for(self, identity: str) -> dict[str, Any]:
        """What the newest load of an identity said of it."""
        return next((entry.hints for entry in reversed(self.entries) if entry.identity == identity), {})

    def digest_of(self, identity: str) -> str:
        """The digest under which an identity was last loaded; empty when never."""
        found = (entry.manifest_digest for entry in reversed(self.entries) if entry.identity == identity)
        return next((digest for digest in found if digest), "")

    def to_json(self) -> dict[str, Any]:
        """Show it, newest first."""
        return {
            "schema": SCHEMA,
            "base": {"needs_anchor": True} if self.needs_anchor else None,
            "entries": [asdict(entry) for entry in reversed(self.entries)],
        }


def _read_entry(raw: Any) -> Entry:
    """Read one entry; what a restart goes on from must have the right types."""
    entry = Entry(**raw)
    known_hints = {"is_incremental", "parent", "compression_format", "checksum_format", "policy_version"}
    if not isinstance(entry.identity, str) or not isinstance(entry.hints, dict) or not set(entry.hints) <= known_hints:
        raise ValueError("an entry has fields of the wrong type")
    return entry


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
