"""The rounds of a run: order, records, saves, stops, and resuming at every place where a run can die."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_parts import TableTrainer, make_controller, make_trainer

from hotloop.errors import RunError
from hotloop.experiment.presets import make_laptop_preset
from hotloop.loop.checkpoint import LoopState, find_latest, read_state
from hotloop.loop.progress import SilentProgress
from hotloop.loop.resuming import prepare_resume
from hotloop.loop.run_folder import RunFolder
from hotloop.telemetry.jsonl import read_lines
from hotloop.telemetry.metrics import read_metrics, without_times
from hotloop.trainers.base import Batch


def _numbers(root: Path) -> list[dict[str, Any]]:
    return [without_times(record) for record in read_metrics(root / "metrics.jsonl")]


def _resume(root: Path, rounds: int) -> tuple[LoopState, Path] | None:
    experiment = make_laptop_preset().model_copy(update={"rounds": rounds})
    return prepare_resume(RunFolder(root), experiment, experiment).checkpoint


def _assert_same(one: Path, other: Path) -> None:
    assert _numbers(one) == _numbers(other)
    for path in (one / "rollouts").iterdir():
        assert path.read_bytes() == (other / "rollouts" / path.name).read_bytes()
    last = find_latest(RunFolder(one))
    assert last == find_latest(RunFolder(other))
    name = f"checkpoints/iter_{last:07d}/model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_run_learns_records_every_round_and_saves_when_due(tmp_path: Path) -> None:
    assert asyncio.run(make_controller(tmp_path, rounds=30, settings={"checkpoint_interval": 10}).run())
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["round"] for record in records] == list(range(30))
    assert [record["policy_version"] for record in records] == list(range(1, 31))
    assert np.mean([r["rollout/raw_reward"] for r in records[-5:]]) > 2 * np.mean(
        [r["rollout/raw_reward"] for r in records[:5]]
    )
    assert [record["round"] for record in records if "eval/greedy" in record] == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]
    assert len(list((tmp_path / "rollouts").iterdir())) == 30
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == ["iter_0000019", "iter_0000029"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rounds"], summary["policy_version"]) == (30, 30)
    assert summary["eval_sampled_after"] == records[-1]["eval/sampled"]
    assert summary["eval_sampled_before"] < summary["eval_sampled_after"]
    events = [event["event"] for event in read_lines(tmp_path / "events.jsonl")]
    assert events[:2] == ["started", "evaluated"] and events[-1] == "finished" and events.count("saved") == 3


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        asyncio.run(make_controller(tmp_path / name).run())
    _assert_same(tmp_path / "a", tmp_path / "b")


class _Dying(SilentProgress):
    """Ends the process, as far as the run can tell, when something has happened."""

    def __init__(self, moment: str, round_: int) -> None:
        self.moment, self.round_ = moment, round_

    def _tell(self, moment: str, round_: int) -> None:
        if (moment, round_) == (self.moment, self.round_):
            raise KeyboardInterrupt

    def saved(self, round_: int, path: Path) -> None:
        self._tell("saved", round_)

    def evaluated(self, round_: int, metrics: Any) -> None:
        self._tell("evaluated", round_)

    def round_done(self, record: Any) -> None:
        self._tell("round", record["round"])


@pytest.mark.parametrize(
    ("moment", "round_"),
    [
        ("evaluated", -1),
        ("round", 0),
        ("saved", 1),
        ("round", 1),
        ("round", 2),
        ("evaluated", 2),
        ("saved", 5),
        ("evaluated", 5),
    ],
)
def test_a_run_that_dies_goes_on_as_if_it_had_not(tmp_path: Path, moment: str, round_: int) -> None:
    asyncio.run(make_controller(tmp_path / "whole").run())
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(make_controller(tmp_path / "died", progress=_Dying(moment, round_)).run())
    state = _resume(tmp_path / "died", 6)
    assert (state is None) == (round_ < 1)
    assert asyncio.run(make_controller(tmp_path / "died", state=state).run())
    _assert_same(tmp_path / "whole", tmp_path / "died")
    whole, died = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "died"))
    for key in ("eval_greedy_before", "eval_greedy_after", "eval_sampled_before", "eval_sampled_after", "rounds"):
        assert whole[key] == died[key], key


class _Stopping(SilentProgress):
    """Asks for a stop after a round."""

    def __init__(self, round_: int) -> None:
        self.round_ = round_
        self.controller: Any = None

    def round_done(self, record: Any) -> None:
        if record["round"] == self.round_:
            self.controller.stop.request()


def test_a_stop_saves_the_last_finished_round_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    asyncio.run(make_controller(tmp_path / "whole").run())
    progress = _Stopping(2)
    progress.controller = controller = make_controller(tmp_path / "stopped", progress=progress)
    assert asyncio.run(controller.run()) is False
    assert find_latest(RunFolder(tmp_path / "stopped")) == 2
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert asyncio.run(make_controller(tmp_path / "stopped", state=_resume(tmp_path / "stopped", 6)).run())
    assert _numbers(tmp_path / "whole") == _numbers(tmp_path / "stopped")


def test_a_stop_before_the_first_round_saves_nothing(tmp_path: Path) -> None:
    controller = make_controller(tmp_path)
    controller.stop.request()
    assert asyncio.run(controller.run()) is False
    assert find_latest(RunFolder(tmp_path)) is None
    assert [event["event"] for event in read_lines(tmp_path / "events.jsonl")][-1] == "interrupted"


class _Exploding(TableTrainer):
    """Its loss is not finite in one round."""

    def train_round(self, batch: Batch) -> dict[str, float]:
        if batch.round == 3:
            raise RunError("non_finite_loss", "the loss is nan", where="optimizer step 4")
        return super().train_round(batch)


def test_a_failed_round_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = _Exploding(make_trainer()._settings)
    with pytest.raises(RunError, match="non_finite_loss"):
        asyncio.run(make_controller(tmp_path, trainer=trainer).run())
    assert find_latest(RunFolder(tmp_path)) == 1
    assert [record["round"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    failed = list(read_lines(tmp_path / "events.jsonl"))[-1]
    assert (failed["event"], failed["code"]) == ("failed", "non_finite_loss")


def test_no_rounds_means_evaluation_only(tmp_path: Path) -> None:
    assert asyncio.run(make_controller(tmp_path, rounds=0).run())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rounds"] == summary["policy_version"] == 0
    assert summary["eval_greedy_before"] == summary["eval_greedy_after"] is not None


def test_a_run_without_evaluation_has_none_in_its_summary(tmp_path: Path) -> None:
    assert asyncio.run(make_controller(tmp_path, rounds=2, held_out=[]).run())
    assert json.loads((tmp_path / "summary.json").read_text())["eval_greedy_after"] is None


def test_loop_state_survives_the_disk(tmp_path: Path) -> None:
    asyncio.run(make_controller(tmp_path, rounds=2).run())
    state, _ = read_state(RunFolder(tmp_path), 1)
    assert (state.round, state.policy_version, state.next_group_id) == (1, 2, 8)
    assert state.cursor == {"kind": "draw", "items": 8, "drawn": 8}
    assert state.record["round"] == 1 and "eval/greedy" not in state.record
