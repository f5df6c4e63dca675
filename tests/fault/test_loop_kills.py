"""kill -9 at any moment, then --resume: the same metrics, rollout files and weights as the run that was left alone."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from kill_and_compare import SETTINGS, assert_same_run, finish_run, kill_at_random, runs_to_line, start_run

KILLS = ["optimizer_saved:2", "before_tracker:3", "random:0", "random:1"]
"""Two inside a save, two at a random moment; benchmarks/kills.py does twenty."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("untouched") / "run"
    assert finish_run("never", "--out", str(run), *SETTINGS) == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("die_at", KILLS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(untouched: Path, tmp_path: Path, die_at: str) -> None:
    run = tmp_path / "run"
    point, _, number = die_at.partition(":")
    code = kill_at_random(int(number), run) if point == "random" else finish_run(die_at, "--out", str(run), *SETTINGS)
    assert code == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    assert finish_run("never", "--resume", str(run)) == 0
    assert_same_run(untouched, run)


@pytest.mark.slow
def test_an_interrupt_saves_says_how_to_go_on_and_loses_nothing(untouched: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process: subprocess.Popen[str] = start_run("never", "--out", str(run), *SETTINGS)
    while process.poll() is None and runs_to_line(run) < 3:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert f"hotloop run --resume {run}" in err
    saved = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= runs_to_line(run) - 1 >= 2
    assert finish_run("never", "--resume", str(run)) == 0
    assert_same_run(untouched, run)
