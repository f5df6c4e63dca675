"""kill -9 at any moment, then --resume: the same metrics, rollout files and weights as the run that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
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
KILLS = ["optimizer_saved:2", "before_tracker:3", "random:0", "random:1"]
"""Two inside a save, two at a random moment; the benchmark kills.py does many more."""


def _start(die_at: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(CHILD), die_at, "run", *arguments], env=environment, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def _finish(die_at: str, *arguments: str) -> int:
    process = _start(die_at, *arguments)
    _, err = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode


def _kill_at_random(seed: int, run: Path) -> int:
    """Kill once the run has written a random number of lines, and a random part of a round later."""
    draw = random.Random(seed)
    lines, delay = draw.randint(1, ROUNDS - 2), draw.random() * 0.2
    process = _start("never", "--out", str(run), *SETTINGS)
    metrics = run / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=60)
    return process.returncode


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("untouched") / "run"
    assert _finish("never", "--out", str(run), *SETTINGS) == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("die_at", KILLS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(untouched: Path, tmp_path: Path, die_at: str) -> None:
    run = tmp_path / "run"
    point, _, number = die_at.partition(":")
    code = _kill_at_random(int(number), run) if point == "random" else _finish(die_at, "--out", str(run), *SETTINGS)
    assert code == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    assert _finish("never", "--resume", str(run)) == 0
    assert_same_run(untouched, run)


def assert_same_run(one: Path, other: Path) -> None:
    """Compare everything that is not a time, byte for byte where it is a file."""
    left, right = ([without_times(r) for r in read_metrics(run / "metrics.jsonl")] for run in (one, other))
    assert left == right
    names = sorted(path.name for path in (one / "rollouts").iterdir())
    assert names == sorted(path.name for path in (other / "rollouts").iterdir())
    for name in names:
        assert (one / "rollouts" / name).read_bytes() == (other / "rollouts" / name).read_bytes(), name
    names = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (other / "checkpoints").iterdir())
    last = Path("checkpoints") / f"iter_{ROUNDS - 1:07d}"
    for file in ("model.safetensors", "optimizer.safetensors"):
        weights, again = load_file(one / last / file), load_file(other / last / file)
        assert weights.keys() == again.keys()
        for name, tensor in weights.items():
            assert np.array_equal(tensor, again[name]), f"{file}: {name}"
