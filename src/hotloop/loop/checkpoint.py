"""Checkpoints: everything a run needs to go on as if it had never stopped.

    checkpoints/.iter_0000019.tmp/   written and flushed, file by file
                 |  rename
    checkpoints/iter_0000019/        model.safetensors config.json tokenizer... optimizer.safetensors state.json
                 |  then
    checkpoints/latest_checkpointed_iteration.txt   "19"

Owns: `LoopState` (state.json) and its saving and loading. The iteration is the number of the last finished round.

Promises: a kill at any moment leaves the tracker naming a complete checkpoint, or no tracker; a failed save leaves no
half-written one. Old checkpoints are removed only after the tracker has moved on.
Does not do: when to save (experiment/resume.py), what a trainer writes (trainers/).
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError

from hotloop.errors import InputError
from hotloop.loop.run_folder import RunFolder, sync_directory, write_bytes
from hotloop.telemetry.jsonl import storage_error
from hotloop.trainers.base import Trainer

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
STATE_VERSION = 1


@dataclass(slots=True)
class LoopState:
    """What the loop itself remembers between rounds; weights and optimizer lie beside it."""

    round: int
    """The last finished round."""
    policy_version: int
    """Of the saved weights."""
    seed: int
    """All randomness of a run is derived from it and from counters, so no generator state exists."""
    cursor: dict[str, Any]
    """Of the prompt source, after the round."""
    next_group_id: int
    evaluation_before: dict[str, float] = field(default_factory=dict)
    """Held-out evaluation before round 0; empty when there was none."""
    record: dict[str, Any] = field(default_factory=dict)
    """Metrics of the round, without the evaluation that follows the save."""
    published_identity: str = ""
    """Newest snapshot that this run published; empty when it publishes none."""
    wall_s: float = 0.0
    sampled_tokens: int = 0
    sampling_s: float = 0.0
    trained_tokens: int = 0
    training_s: float = 0.0
    version: int = STATE_VERSION


def checkpoint_name(round_: int) -> str:
    """Name of a checkpoint's directory, slime's own."""
    return f"iter_{round_:07d}"


def find_latest(folder: RunFolder) -> int | None:
    """Return the round that the tracker names, None when there is no tracker.

    Raises:
        InputError: code `checkpoint_broken`.
    """
    tracker = folder.checkpoints / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit() or not (folder.checkpoints / checkpoint_name(int(text))).is_dir():
        raise InputError(
            "checkpoint_broken",
            f"the tracker names iteration {text!r}, which is not here",
            where=str(tracker),
            do="Write the number of an existing iter_ directory into it.",
        )
    return int(text)


def list_checkpoints(folder: RunFolder) -> list[int]:
    """Return the rounds of all complete checkpoints, rising."""
    names = [path.name for path in folder.checkpoints.glob("iter_*") if (path / STATE).is_file()]
    return sorted(int(name.removeprefix("iter_")) for name in names)


def read_state(folder: RunFolder, round_: int) -> tuple[LoopState, Path]:
    """Read the loop's state of one checkpoint, and say where its weights lie.

    Raises:
        InputError: code `checkpoint_missing` or `checkpoint_broken`.
    """
    directory = folder.checkpoints / checkpoint_name(round_)
    path = directory / STATE
    if not path.is_file():
        saved = ", ".join(map(str, list_checkpoints(folder))) or "none"
        raise InputError("checkpoint_missing", f"there is none; saved rounds: {saved}", where=str(directory))
    try:
        values = orjson.loads(path.read_bytes())
        if values.get("version") != STATE_VERSION:
            raise ValueError(f"version {values.get('version')}, this program reads {STATE_VERSION}")
        names = {entry.name for entry in fields(LoopState)}
        return LoopState(**{name: value for name, value in values.items() if name in names}), directory
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError("checkpoint_broken", f"cannot be read ({error})", where=str(path)) from error


def save_checkpoint(folder: RunFolder, state: LoopState, trainer: Trainer, *, keep: int) -> Path:
    """Save weights, optimizer and loop state; the tracker moves last. Saving a saved round again does nothing.

    Raises:
        RunError: code `disk_full` or `write_failed`; earlier checkpoints and the tracker are untouched.
    """
    directory = folder.checkpoints / checkpoint_name(state.round)
    if find_latest(folder) == state.round:
        return directory
    temporary = folder.checkpoints / f".{directory.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        trainer.save_policy(temporary)
        trainer.save_optimizer(temporary / OPTIMIZER)
        (temporary / STATE).write_bytes(orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
        for path in temporary.iterdir():
            _sync_file(path)
        sync_directory(temporary)
        if directory.exists():  # left by a run that was killed before its tracker moved
            shutil.rmtree(directory)
        temporary.rename(directory)
        sync_directory(folder.checkpoints)
        write_bytes(folder.checkpoints / TRACKER, f"{state.round}\n".encode())
    except SafetensorError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        code = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
        raise storage_error(OSError(code, str(error)), directory) from error
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise storage_error(error, directory) from error
    except BaseException:  # Ctrl-C in the middle of a save too must leave no half of one behind
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in [saved for saved in list_checkpoints(folder) if saved <= state.round][:-keep]:
        shutil.rmtree(folder.checkpoints / checkpoint_name(old))
    return directory


def remove_unfinished(folder: RunFolder, latest: int | None) -> None:
    """Remove what a killed run left beyond its tracker: half-written and never announced checkpoints."""
    last = -1 if latest is None else latest
    for path in list(folder.checkpoints.iterdir()):
        is_saved = path.name.startswith("iter_") and int(path.name.removeprefix("iter_")) <= last
        if path.is_dir() and not is_saved:
            shutil.rmtree(path)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
