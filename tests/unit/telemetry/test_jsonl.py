"""Lines survive a kill and a full disk, and can be cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.errors import RunError
from hotloop.telemetry.events import EventLog
from hotloop.telemetry.jsonl import JsonLines, cut_lines, read_lines
from hotloop.telemetry.metrics import read_metrics, without_times


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"round": 0, "rollout/raw_reward": 0.25})
        lines.append({"round": 1, "rollout/raw_reward": 0.5})
        assert [record["round"] for record in read_metrics(path)] == [0, 1]


def test_an_unfinished_last_line_is_ignored_and_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"round":0}\n{"round":1}\n{"rou')
    assert [record["round"] for record in read_lines(path)] == [0, 1]
    assert cut_lines(path, lambda record: record["round"] <= 5) == len(b'{"rou')
    assert path.read_bytes() == b'{"round":0}\n{"round":1}\n'


def test_cutting_removes_the_first_refused_line_and_all_after_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"round":0}\n{"round":1}\n{"round":2}\n')
    with JsonLines(path) as lines:
        lines.cut(lambda record: record["round"] < 1)
        lines.append({"round": 7})
    assert path.read_bytes() == b'{"round":0}\n{"round":7}\n'


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none")) == []
    assert cut_lines(tmp_path / "none", lambda _: False) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    with JsonLines(tmp_path / "m.jsonl") as lines, pytest.raises(RunError) as caught:
        lines.append({"round": 0})
    assert (caught.value.code, caught.value.exit_code) == ("disk_full", 1)


def test_times_and_rates_are_left_out_of_a_comparison() -> None:
    record = {"round": 3, "train/loss": 0.1, "perf/step_time": 0.2, "perf/actor_train_tok_per_s": 9.0}
    assert without_times(record) == {"round": 3, "train/loss": 0.1}


def test_an_event_carries_its_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.34567)
    log.record("saved", round=19)
    log.close()
    assert list(read_lines(tmp_path / "events.jsonl")) == [{"time": 12.346, "event": "saved", "round": 19}]
