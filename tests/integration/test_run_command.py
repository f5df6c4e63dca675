"""`hotloop run` with the real trainer and engine: it learns, repeats, replays, resumes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from command_line import RunCommand
from safetensors.numpy import load_file

from hotloop.experiment.load import load_experiment
from hotloop.experiment.presets import PRESETS
from hotloop.loop.assembly import make_trainer_settings
from hotloop.loop.rollout_file import read_rollouts, replay_batch
from hotloop.telemetry.metrics import read_metrics, without_times
from hotloop.trainers.base import open_trainer

SUMMARY_KEYS = {
    "eval_greedy_before",
    "eval_greedy_after",
    "eval_sampled_before",
    "eval_sampled_after",
    "rounds",
    "wall_s",
    "sampling_tokens_per_s",
    "train_tokens_per_s",
    "peak_rss_bytes",
    "policy_version",
}
SMALL = [
    "--set=sampling.num_groups=8",
    "--set=sampling.group_size=8",
    "--set=laptop.eval_rows=64",
    "--set=eval_samples=2",
    "--set=eval_interval=3",
    "--set=laptop.checkpoint_interval=4",
    "--set=laptop.warmup_accuracy=0.3",
    "--set=optimizer.lr_decay_style=constant",
]
"""A constant learning rate has no horizon, so a run of fewer rounds is the start of a longer one."""


def _numbers(run: Path) -> list[dict[str, Any]]:
    return [without_times(record) for record in read_metrics(run / "metrics.jsonl")]


def _weights(run: Path, round_: int) -> dict[str, Any]:
    return load_file(run / "checkpoints" / f"iter_{round_:07d}" / "model.safetensors")


def _assert_same_files(one: Path, other: Path, last_round: int) -> None:
    for path in sorted((one / "rollouts").iterdir()):
        assert path.read_bytes() == (other / "rollouts" / path.name).read_bytes(), path.name
    assert len(list((other / "rollouts").iterdir())) == last_round + 1
    left, right = _weights(one, last_round), _weights(other, last_round)
    assert left.keys() == right.keys()
    for name in left:
        assert np.array_equal(left[name], right[name]), name


@pytest.mark.slow
def test_the_default_task_is_learnt(hotloop: RunCommand, tmp_path: Path) -> None:
    outcome = hotloop(
        "run", "--out", tmp_path / "run", "--seed", "0", "--set=rounds=40", "--set=sampling.num_groups=16",
        "--set=eval_samples=4", "--set=laptop.eval_rows=256", "--set=laptop.warmup_accuracy=0.3",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    rewards = [record["rollout/raw_reward"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert fmean(rewards[-5:]) >= fmean(rewards[:5]) + 0.1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["eval_sampled_after"] > summary["eval_sampled_before"] + 0.1
    assert summary["eval_greedy_after"] > summary["eval_greedy_before"]
    assert (summary["rounds"], summary["policy_version"]) == (40, 40)
    assert summary["peak_rss_bytes"] > 50 * 1024**2


@pytest.mark.slow
def test_a_run_repeats_replays_and_resumes(hotloop: RunCommand, tmp_path: Path) -> None:
    first, second, stopped = tmp_path / "first", tmp_path / "second", tmp_path / "stopped"
    assert hotloop("run", "--out", first, "--set=rounds=7", *SMALL).code == 0
    records = read_metrics(first / "metrics.jsonl")
    assert [record["round"] for record in records] == list(range(7))
    assert [record["policy_version"] for record in records] == list(range(1, 8))
    assert [record["round"] for record in records if "eval/greedy" in record] == [2, 5, 6]
    assert all(record["train/train_rollout_logprob_abs_diff"] < 1e-5 for record in records)
    assert all(record["staleness/max"] == 0 for record in records)

    # The file in the folder repeats the run, number for number.
    assert hotloop("run", first / "experiment.json", "--out", second).code == 0
    assert _numbers(first) == _numbers(second)
    _assert_same_files(first, second, 6)

    # A round's rollout file gives the loss that the round had.
    experiment = load_experiment(first / "experiment.json").experiment
    trainer = open_trainer(make_trainer_settings(experiment, first / "policy"))
    for round_ in range(2):
        batch = replay_batch(round_, read_rollouts(first / "rollouts" / f"rollout_{round_}.jsonl.zst"))
        assert trainer.train_round(batch)["train/loss"] == pytest.approx(records[round_]["train/loss"], abs=1e-6)

    # A run of fewer rounds, resumed to the same end; only its own last round was evaluated in addition.
    assert hotloop("run", "--out", stopped, "--set=rounds=4", *SMALL).code == 0
    outcome = hotloop("run", "--resume", stopped, "--set=rounds=7")
    assert outcome.code == 0, outcome.err
    assert "resume at round 4: 3 of 7 rounds left, 32 prompts consumed, saves after rounds 6" in outcome.out
    assert "note: rounds: 4 -> 7" in outcome.out
    left, right = _numbers(first), _numbers(stopped)
    assert [record["round"] for record in right if "eval/greedy" in record] == [2, 3, 5, 6]
    for record in right[3:4]:
        for name in [name for name in record if name.startswith("eval/")]:
            del record[name]
    assert left == right
    _assert_same_files(first, stopped, 6)

    finished = hotloop("run", "--resume", stopped)
    assert finished.code == 2 and "[resume_runs_nothing]" in finished.err and "at least 8" in finished.err


@pytest.mark.slow
def test_the_mixture_of_experts_records_its_routes(hotloop: RunCommand, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = hotloop("run", "--out", run, "--set=laptop.policy=moe", "--set=rounds=2", "--set=r3=true", *SMALL)
    assert outcome.code == 0, outcome.err
    record = read_rollouts(run / "rollouts" / "rollout_1.jsonl.zst")[0]
    tokens = len(record["tokens"])
    assert record["rollout_routed_experts"]["shape"] == [tokens - 1, 2, 2]
    assert read_metrics(run / "metrics.jsonl")[0]["train/train_rollout_logprob_abs_diff"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start", "scale", "agent"])
def test_every_cluster_preset_is_rehearsed(hotloop: RunCommand, tmp_path: Path, name: str) -> None:
    choices = PRESETS[name]().model_dump(mode="json")
    (tmp_path / "experiment.json").write_text(json.dumps({"schema": 1, "app": "hotloop", "choices": choices}))
    quick = ["--set=laptop.warmup_max_steps=40", "--set=laptop.eval_rows=32", "--set=sampling.num_groups=8"]
    outcome = hotloop("run", tmp_path / "experiment.json", "--out", tmp_path / "run", "--set=rounds=3", *quick)
    assert outcome.code == 0, outcome.err
    assert "kept as chosen:" in outcome.out and "  rounds = 3" in outcome.out
    assert "not rehearsed:" in outcome.out
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3
    account = json.loads((tmp_path / "run" / "experiment.json").read_text())["rehearsal"]
    assert {"kept", "replaced", "not_rehearsed"} == set(account)
