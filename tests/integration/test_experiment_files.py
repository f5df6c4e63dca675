"""Every file under experiments/ is valid, and runs for two rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import RunCommand

from hotloop.experiment.load import load_experiment
from hotloop.experiment.presets import make_laptop_preset
from hotloop.telemetry.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "experiments").glob("*.toml"))
RUN_FILES = [path for path in FILES if load_experiment(path).experiment.laptop.policy]


def test_the_default_run_is_also_a_file() -> None:
    assert load_experiment(ROOT / "experiments" / "sort5.toml").experiment == make_laptop_preset()


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.stem))
def test_it_runs(hotloop: RunCommand, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    quick = ["--set=rounds=2", "--set=laptop.eval_rows=16", "--set=eval_samples=1", "--set=laptop.warmup_max_steps=30"]
    outcome = hotloop("run", path, "--out", tmp_path / "run", *quick)
    assert outcome.code == 0, outcome.err
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2 and "eval/sampled" in records[-1]
