"""Runs in child processes that are killed, resumed, and compared with one that was left alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hotloop.telemetry.metrics import read_metrics, without_times

CHILD = Path(__file__).with_name("killed_run.py")
ROUNDS = 12
SETTINGS = [
    f"--set=rounds={ROUNDS}",
    "--set=sampling.num_groups=4",
    "--set=sampling.group_size=8",
    "--set=laptop.eval_rows=32",
    "--set=eval_samples=2",
    "--set=eval_interval=4",
    "--set=laptop.checkpoint_interval=2",
    "--set=laptop.warmup_max_steps=40",
]
PATIENCE_S = 600.0


def start_run(die_at: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `hotloop run` so that it dies where `killed_run.py` is told."""
    return subprocess.Popen(
        [sys.executable, str(CHILD), die_at, "run", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def finish_run(die_at: str, *arguments: str) -> int:
    """Run to the end, or to the kill; anything else is a failure with the run's own words."""
    process = start_run(die_at, *arguments)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode


def kill_at_random(seed: int, run: Path) -> int:
    """Kill once the run has written a random number of lines, and a random moment later; again if it had ended."""
    draw = random.Random(seed)
    while True:
        lines, delay = draw.randint(1, ROUNDS - 2), draw.random() * 0.2
        process = start_run("never", "--out", str(run), *SETTINGS)
        while process.poll() is None and runs_to_line(run) < lines:
            time.sleep(0.005)
        time.sleep(delay)
        process.kill()
        _, err = process.communicate(timeout=60)
        if process.returncode == -signal.SIGKILL:
            return process.returncode
        assert process.returncode == 0, err
        shutil.rmtree(run)  # its last rounds took less than the delay: there was nothing left to kill


def runs_to_line(run: Path) -> int:
    """Rounds whose line is written."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def assert_same_run(one: Path, other: Path) -> None:
    """Compare everything that is not a time, byte for byte where it is a file."""
    left, right = ([without_times(r) for r in read_metrics(run / "metrics.jsonl")] for run in (one, other))
    assert len(left) == len(right)
    for record, again in zip(left, right, strict=True):
        names = record.keys() | again.keys()
        differing = {name: (record.get(name), again.get(name)) for name in names if record.get(name) != again.get(name)}
        assert not differing, f"round {record['round']}"
    for folder in ("rollouts", "checkpoints"):
        names = sorted(path.name for path in (one / folder).iterdir())
        assert names == sorted(path.name for path in (other / folder).iterdir())
    for path in (one / "rollouts").iterdir():
        assert path.read_bytes() == (other / "rollouts" / path.name).read_bytes(), path.name
    last = Path("checkpoints") / f"iter_{ROUNDS - 1:07d}"
    for file in ("model.safetensors", "optimizer.safetensors"):
        weights, again = load_file(one / last / file), load_file(other / last / file)
        assert weights.keys() == again.keys()
        for name, tensor in weights.items():
            assert np.array_equal(tensor, again[name]), f"{file}: {name}"
