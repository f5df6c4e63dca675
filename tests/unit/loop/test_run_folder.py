"""A run folder is made once, locked, and its files are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.errors import InputError, RunError
from hotloop.loop.run_folder import RunFolder, write_bytes, write_json


def test_a_new_folder_has_its_places(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "run")
    assert folder.rollouts.is_dir() and folder.checkpoints.is_dir()
    assert folder.rollout_file(12).name == "rollout_12.jsonl.zst"


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    RunFolder.create(tmp_path)


def test_a_folder_whose_run_died_in_its_first_moment_may_be_used(tmp_path: Path) -> None:
    RunFolder.create(tmp_path).lock().close()
    RunFolder.create(tmp_path)


@pytest.mark.parametrize("name", ["experiment.json", "notes.txt"])
def test_a_used_folder_is_refused_and_a_run_in_it_can_be_resumed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError) as caught:
        RunFolder.create(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("run_folder_used", 2)
    assert ("--resume" in str(caught.value)) == (name == "experiment.json")


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(InputError, match="run_folder_used"):
        RunFolder.create(tmp_path / "f")


def test_a_folder_without_an_experiment_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not_a_run"):
        RunFolder.open(tmp_path)


def test_a_second_process_cannot_take_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    lock = folder.lock()
    with pytest.raises(InputError, match="run_is_busy"):
        folder.lock()
    lock.close()
    folder.lock().close()


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": 2})
    assert (tmp_path / "a.json").read_bytes() == b'{\n  "x": 2\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    write_bytes(tmp_path / "a", b"old")
    (tmp_path / ".a.tmp").symlink_to("/dev/full")
    with pytest.raises(RunError, match="disk_full"):
        write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_set_up_wrote_is_removed_and_a_linked_policy_stays(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    for name, was_there in (("made", False), ("given", True)):
        if was_there:
            (tmp_path / name).mkdir()
        folder = RunFolder.create(tmp_path / name)
        folder.policy.symlink_to(tmp_path / "policy", target_is_directory=True)
        folder.experiment.write_text("{}")
        folder.discard(keeps_root=was_there)
        assert folder.root.exists() is was_there
        assert not was_there or not list(folder.root.iterdir())
    assert (tmp_path / "policy" / "config.json").read_text() == "{}"
