"""Runs as child processes; the child is a small real program in place of `hotloop run`, so that ends are scripted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotloop.errors import InputError
from hotloop.lab.runs import RunRecord, RunShelf, read_tail

ENDS_WELL = "import pathlib,sys; d=pathlib.Path(sys.argv[-1]); d.mkdir(); (d/'summary.json').write_text('{}')"
CRASHES = "print('round 3'); raise SystemExit('error: the reward raised [reward_raised]')"
WAITS = (
    "import pathlib,signal,sys,time; d=pathlib.Path(sys.argv[-1])\n"
    "(d/'checkpoints').mkdir(parents=True, exist_ok=True)\n"
    "signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); (d/'ready').touch(); time.sleep(60)"
)
EXPERIMENT = {"schema": 1, "choices": {"model": "flash"}}


def make_shelf(root: Path, program: str) -> RunShelf:
    return RunShelf(root, command=(sys.executable, "-c", program), clock=lambda: 1_800_000_000.0)


def start(shelf: RunShelf) -> RunRecord:
    return shelf.start(EXPERIMENT, experiment_hash="h", title="flash")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def wait_until_ended(shelf: RunShelf, record: RunRecord) -> None:
    while shelf.state(record) == "running":
        time.sleep(0.01)


def test_a_run_that_writes_its_summary_has_finished(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, ENDS_WELL)
    record = start(shelf)
    wait_until_ended(shelf, record)
    assert shelf.state(shelf.read(record.run_id)) == "finished"


def test_the_child_gets_the_experiment_as_a_file_and_nothing_else(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, "import sys; print(sys.argv[1:])")
    record = start(shelf)
    wait_until_ended(shelf, record)
    folder = tmp_path / record.run_id
    assert read_tail(folder / "output.log") == [str([str(folder / "experiment.json"), "--out", str(folder / "run")])]


def test_a_crashed_run_shows_its_last_lines(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, CRASHES)
    record = start(shelf)
    wait_until_ended(shelf, record)
    told = shelf.describe(record)
    assert told["state"] == "failed"
    assert told["tail"] == ["round 3", "error: the reward raised [reward_raised]"]
    assert told["resume_command"] == ""


def test_a_stopped_run_is_interrupted_and_says_how_to_resume(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, WAITS)
    record = start(shelf)
    run = tmp_path / record.run_id / "run"
    wait_for(run / "ready")
    stopped = shelf.stop(record.run_id)
    told = shelf.describe(stopped)
    assert (told["state"], told["return_code"]) == ("stopped", 130)
    assert told["resume_command"] == f"hotloop run --resume {run}"


def test_a_run_is_found_again_by_a_new_server_while_it_goes_on(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, WAITS)
    record = start(shelf)
    wait_for(tmp_path / record.run_id / "run" / "ready")
    other = RunShelf(tmp_path)
    found = other.list_runs()
    assert [(run.run_id, other.state(run)) for run in found] == [(record.run_id, "running")]
    shelf.stop_all()
    assert other.state(other.read(record.run_id)) == "stopped"


def test_a_run_whose_server_and_process_are_gone_has_failed(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, WAITS)
    record = start(shelf)
    wait_for(tmp_path / record.run_id / "run" / "ready")
    child = shelf._children[record.run_id]
    child.kill()
    child.wait()
    other = RunShelf(tmp_path)
    assert other.state(other.read(record.run_id)) == "failed"


def test_a_stopped_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, WAITS)
    record = start(shelf)
    run = tmp_path / record.run_id / "run"
    wait_for(run / "ready")
    shelf.stop(record.run_id)
    (run / "ready").unlink()
    again = shelf.resume(record.run_id)
    wait_for(run / "ready")
    assert (again.run_id, again.resumes, shelf.state(again)) == (record.run_id, 1, "running")
    shelf.stop_all()


def test_a_run_that_saved_nothing_cannot_be_resumed(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, CRASHES)
    record = start(shelf)
    wait_until_ended(shelf, record)
    with pytest.raises(InputError) as caught:
        shelf.resume(record.run_id)
    assert caught.value.code == "run_has_no_checkpoint"


@pytest.mark.parametrize("run_id", ["..", "../..", "x", "", "20270115-080000/..", "20270115-080000"])
def test_an_id_that_is_not_ours_never_becomes_a_path(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError) as caught:
        RunShelf(tmp_path).read(run_id)
    assert caught.value.code == "run_unknown"


def test_two_runs_of_the_same_second_have_two_folders(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, "pass")
    runs = [start(shelf), start(shelf)]
    assert [run.run_id for run in runs] == ["20270115-080000", "20270115-080000-2"]
    shelf.stop_all()


def test_a_running_run_cannot_be_deleted_and_a_stopped_one_can(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, WAITS)
    record = start(shelf)
    wait_for(tmp_path / record.run_id / "run" / "ready")
    with pytest.raises(InputError) as caught:
        shelf.delete(record.run_id)
    assert caught.value.code == "run_is_running"
    shelf.stop(record.run_id)
    shelf.delete(record.run_id)
    assert shelf.list_runs() == []


def test_a_program_that_cannot_start_is_an_error_and_not_a_run_that_hangs(tmp_path: Path) -> None:
    shelf = RunShelf(tmp_path, command=("/nonexistent/program",))
    with pytest.raises(Exception, match="could not start"):
        start(shelf)


def test_a_tail_has_no_control_characters_and_only_the_last_state_of_a_progress_line(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"\x1b[31mred\x1b[0m\n10%\r55%\r99%\nbell\x07 \xff\n")
    assert read_tail(log) == ["red", "99%", "bell \ufffd"]


def test_a_stopped_child_leaves_no_process_behind(tmp_path: Path) -> None:
    shelf = make_shelf(tmp_path, WAITS)
    record = start(shelf)
    wait_for(tmp_path / record.run_id / "run" / "ready")
    shelf.stop_all()
    gone = subprocess.run(["ps", "-p", str(record.pid)], capture_output=True, check=False)
    assert gone.returncode != 0
