"""Rehearsals as child processes: start, stop, resume, list.

Owns: the lab's runs folder. One run is one folder `<runs>/<id>/` with `experiment.json` (as the page sent it),
`lab.json` (who started it and when), `output.log` (what the child said) and `run/`, the run folder that `hotloop run`
writes.

Promises: a run is `hotloop run` in a process of its own and is never imported; it outlives the page, and a new server
finds it on disk again. Only an experiment reaches the command line, as a file; nothing a page sends becomes an
argument. Stopping sends the interrupt that makes a run save; a run that does not end in STOP_S is killed.

Does not do: following a run (live.py), reading its rollouts (rollouts.py).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from hotloop.errors import InputError, RunError

RunState = Literal["running", "finished", "stopped", "failed"]
STOP_S = 20.0
TAIL_BYTES = 8192
TAIL_LINES = 40
_RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}(-[0-9]+)?")


@dataclass(slots=True)
class RunRecord:
    """What `lab.json` remembers of one run."""

    run_id: str
    created: float
    """Seconds since the epoch."""
    experiment_hash: str
    title: str
    pid: int = 0
    pid_started: float = 0.0
    """Start time of the process in clock ticks since boot: a recycled pid has another. 0 where the system has none."""
    was_stopped: bool = False
    return_code: int | None = None
    resumes: int = 0


@dataclass(slots=True)
class RunShelf:
    """The runs of one lab: a folder, and the children of this process."""

    root: Path
    command: tuple[str, ...] = (sys.executable, "-m", "hotloop.cli.main", "run")
    clock: Callable[[], float] = time.time
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, experiment: Mapping[str, Any], *, experiment_hash: str, title: str) -> RunRecord:
        """Write the experiment to a new folder and start `hotloop run` on it."""
        now = self.clock()
        run_id = base = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        attempt = 1
        while (self.root / run_id).exists():
            attempt += 1
            run_id = f"{base}-{attempt}"
        folder = self.root / run_id
        folder.mkdir(parents=True)
        (folder / "experiment.json").write_bytes(orjson.dumps(experiment, option=orjson.OPT_INDENT_2))
        record = RunRecord(run_id, now, experiment_hash, title)
        self._spawn(record, [str(folder / "experiment.json"), "--out", str(folder / "run")])
        return record

    def resume(self, run_id: str) -> RunRecord:
        """Start a stopped or failed run again from its last checkpoint."""
        record = self.read(run_id)
        if self.state(record) == "running":
            raise InputError("run_is_running", "the run is still going", where=run_id, do="Stop it first.")
        if not (self.folder(run_id) / "run" / "checkpoints").exists():
            raise InputError(
                "run_has_no_checkpoint", "the run ended before its first save", where=run_id, do="Start it anew."
            )
        record.was_stopped, record.return_code = False, None
        record.resumes += 1
        self._spawn(record, ["--resume", str(self.folder(run_id) / "run")])
        return record

    def stop(self, run_id: str) -> RunRecord:
        """Interrupt a run, wait until it has saved, and kill it if it does not end."""
        record = self.read(run_id)
        if self.state(record) != "running":
            return record
        record.was_stopped = True
        self._write(record)
        _signal_group(record.pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_S
        while self._is_alive(record):
            if time.monotonic() > deadline:
                _signal_group(record.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.05)
        self._collect(record)
        return record

    def stop_all(self) -> None:
        """Stop every run that this process started and that still goes."""
        for run_id in list(self._children):
            self.stop(run_id)

    def delete(self, run_id: str) -> None:
        """Remove a run that has ended, with its folder."""
        if self.state(self.read(run_id)) == "running":
            raise InputError("run_is_running", "the run is still going", where=run_id, do="Stop it first.")
        shutil.rmtree(self.folder(run_id))

    def list_runs(self) -> list[RunRecord]:
        """Give every run on disk, newest first."""
        if not self.root.is_dir():
            return []
        names = sorted((path.name for path in self.root.iterdir() if (path / "lab.json").is_file()), reverse=True)
        return [self.read(name) for name in names if _RUN_ID.fullmatch(name)]

    def read(self, run_id: str) -> RunRecord:
        """Read one run's record.

        Raises: InputError `run_unknown`: the id is not one of ours; it never becomes a path.
        """
        path = self.root / run_id / "lab.json"
        if not _RUN_ID.fullmatch(run_id) or not path.is_file():
            raise InputError("run_unknown", "there is no such run here", where=repr(run_id)[:60])
        return RunRecord(**orjson.loads(path.read_bytes()))

    def folder(self, run_id: str) -> Path:
        """Give the folder of a known run."""
        return self.root / run_id

    def state(self, record: RunRecord) -> RunState:
        """Tell whether a run goes on, and how it ended."""
        self._collect(record)
        if self._is_alive(record):
            return "running"
        if (self.folder(record.run_id) / "run" / "summary.json").is_file() and record.return_code in (0, None):
            return "finished"
        return "stopped" if record.was_stopped or record.return_code == 130 else "failed"

    def describe(self, record: RunRecord) -> dict[str, Any]:
        """Give what the page shows of one run: state, and for one that failed its last lines and how to resume."""
        state = self.state(record)
        folder = self.folder(record.run_id)
        told = asdict(record) | {"state": state, "folder": str(folder / "run"), "tail": [], "resume_command": ""}
        del told["pid_started"]
        if state in ("failed", "stopped"):
            told["tail"] = read_tail(folder / "output.log")
            if (folder / "run" / "checkpoints").exists():
                told["resume_command"] = f"hotloop run --resume {folder / 'run'}"
        return told

    def _spawn(self, record: RunRecord, arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "120", "NO_COLOR": "1"}
        with (self.folder(record.run_id) / "output.log").open("ab") as log:
            try:
                child = subprocess.Popen(
                    [*self.command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError("run_not_started", f"the child process could not start: {error}") from error
        record.pid, record.pid_started = child.pid, _start_ticks(child.pid)
        self._children[record.run_id] = child
        self._write(record)

    def _collect(self, record: RunRecord) -> None:
        """Take the exit code of a child of ours that has ended."""
        child = self._children.get(record.run_id)
        if child is not None and child.poll() is not None:
            del self._children[record.run_id]
            record.was_stopped = record.was_stopped or self.read(record.run_id).was_stopped
            record.return_code = child.returncode
            self._write(record)

    def _is_alive(self, record: RunRecord) -> bool:
        child = self._children.get(record.run_id)
        if child is not None:
            return child.poll() is None
        if record.return_code is not None or record.pid == 0 or record.pid_started == 0.0:
            return False
        return _start_ticks(record.pid) == record.pid_started

    def _write(self, record: RunRecord) -> None:
        path = self.folder(record.run_id) / "lab.json"
        fresh = path.with_suffix(".tmp")
        fresh.write_bytes(orjson.dumps(asdict(record)))
        fresh.replace(path)


def read_tail(path: Path) -> list[str]:
    """Read the last lines of a log, control characters removed."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = ["".join(c for c in line.rsplit("\r", 1)[-1] if c.isprintable() or c == "\t") for line in plain.split("\n")]
    return [line for line in lines if line.strip()][-TAIL_LINES:]


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _start_ticks(pid: int) -> float:
    """Read when a live process started; 0.0 when it is gone, a zombie, or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] == "Z" else float(fields[19])
