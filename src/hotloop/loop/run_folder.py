"""The folder of one run: names, creation, the lock, and files that are written whole or not at all.

    <run>/experiment.json  metrics.jsonl  events.jsonl  summary.json
          policy/          the policy that training started from
          rollouts/        rollout_<round>.jsonl.zst
          checkpoints/     iter_<round>/ and latest_checkpointed_iteration.txt

Promises: a folder with anything in it is never reused for a new run; two processes never write one run.
Does not do: what the files mean (telemetry/, rollout_file.py, checkpoint.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hotloop.errors import InputError
from hotloop.telemetry.jsonl import storage_error

LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names inside one run folder."""

    root: Path

    @property
    def experiment(self) -> Path:
        return self.root / "experiment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def rollout_file(self, round_: int) -> Path:
        return self.rollouts / f"rollout_{round_}.jsonl.zst"

    @classmethod
    def create(cls, root: Path) -> RunFolder:
        """Make a new run folder.

        Raises:
            InputError: code `run_folder_used` when anything is in it already.
            RunError: code `write_failed`.
        """
        if root.exists() and (not root.is_dir() or _holds_files(root)):
            resume = f"Continue it with: hotloop run --resume {root}. " if (root / "experiment.json").is_file() else ""
            raise InputError(
                "run_folder_used",
                "the folder is not empty, and a new run never writes into an old one",
                where=f"--out {root}",
                do=f"{resume}Or name another folder with --out.",
            )
        folder = cls(root)
        try:
            folder.rollouts.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(error, root) from error
        return folder

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """Open an existing run folder.

        Raises:
            InputError: code `not_a_run` when there is no experiment.json in it.
        """
        if not (root / "experiment.json").is_file():
            raise InputError(
                "not_a_run",
                "there is no experiment.json, so this is not the folder of a run",
                where=str(root),
                do="Name the folder that hotloop run printed.",
            )
        return cls(root)

    def discard(self, *, keeps_root: bool) -> None:
        """Remove what the set-up of a run wrote, so that the corrected run can take the same folder.

        Only for a folder that `create` has just accepted: it held no files. A policy that is a link is left alone.

        Args:
            keeps_root: the folder itself was there before.
        """
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not keeps_root:
            self.root.rmdir()

    def lock(self) -> RunLock:
        """Take the run for this process until the lock is closed.

        Raises:
            InputError: code `run_is_busy` when another process has it.
        """
        return RunLock(self.root / LOCK)


def _holds_files(root: Path) -> bool:
    """Tell whether a file is anywhere inside; a run that died in its first moment leaves empty folders and a lock."""
    return any(not path.is_dir() and path.name != LOCK for path in root.rglob("*"))


class RunLock:
    """An advisory lock that the system releases when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no advisory locks on this system; two writers are then the user's affair
            return
        except OSError:
            os.close(self._file)
            raise InputError(
                "run_is_busy", "another process is running in this folder", where=str(path.parent), do="Wait for it."
            ) from None

    def close(self) -> None:
        os.close(self._file)


def write_json(path: Path, value: Mapping[str, Any], *, is_synced: bool = True) -> None:
    """Write a JSON file so that a reader sees the old content or the new, whole.

    Raises:
        RunError: code `disk_full` or `write_failed`; the old content stays.
    """
    write_bytes(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE), is_synced=is_synced)


def write_bytes(path: Path, content: bytes, *, is_synced: bool = True) -> None:
    """Write a file under a temporary name, flush it to the disk if asked, and rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if is_synced:
            sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
