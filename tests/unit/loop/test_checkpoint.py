"""Checkpoints are complete or absent, whatever moment the process dies at."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from hotloop.errors import InputError, RunError
from hotloop.loop.checkpoint import (
    LoopState,
    checkpoint_name,
    find_latest,
    list_checkpoints,
    read_state,
    remove_unfinished,
    save_checkpoint,
)
from hotloop.loop.run_folder import RunFolder
from hotloop.trainers.base import TrainerSettings
from hotloop.trainers.fake import FakeTrainer


def _state(round_: int) -> LoopState:
    return LoopState(round_, round_ + 1, 7, {"kind": "draw", "items": 3, "drawn": 9}, 12, record={"round": round_})


def _trainer(value: float = 0.0) -> FakeTrainer:
    trainer = FakeTrainer(TrainerSettings(kind="fake"))
    trainer.weights()["logits.weight"][:] = value
    return trainer


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    save_checkpoint(folder, _state(19), _trainer(2.5), keep=2)
    assert find_latest(folder) == 19
    state, directory = read_state(folder, 19)
    assert state == _state(19)
    restored = _trainer()
    restored.load(directory)
    assert np.all(restored.weights()["logits.weight"] == 2.5)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    for round_ in (1, 3, 5, 7):
        save_checkpoint(folder, _state(round_), _trainer(), keep=2)
    assert list_checkpoints(folder) == [5, 7]


def test_no_tracker_means_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(RunFolder.create(tmp_path)) is None


class _FailingTrainer(FakeTrainer):
    """Its disk is full when it writes the optimizer."""

    def save_optimizer(self, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    save_checkpoint(folder, _state(3), _trainer(), keep=2)
    with pytest.raises(RunError) as caught:
        save_checkpoint(folder, _state(7), _FailingTrainer(TrainerSettings(kind="fake")), keep=2)
    assert (caught.value.code, caught.value.exit_code) == ("disk_full", 1)
    assert find_latest(folder) == 3
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_death_between_rename_and_tracker_leaves_the_old_checkpoint_in_force(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    save_checkpoint(folder, _state(3), _trainer(), keep=2)
    tracker = (folder.checkpoints / "latest_checkpointed_iteration.txt").read_text()
    save_checkpoint(folder, _state(7), _trainer(1.0), keep=2)
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text(tracker)
    (folder.checkpoints / ".iter_0000009.tmp").mkdir()
    assert find_latest(folder) == 3
    remove_unfinished(folder, 3)
    assert list_checkpoints(folder) == [3]
    assert not (folder.checkpoints / ".iter_0000009.tmp").exists()


def test_an_unannounced_checkpoint_of_the_same_round_is_written_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    (folder.checkpoints / checkpoint_name(5)).mkdir()
    (folder.checkpoints / checkpoint_name(5) / "state.json").write_text("{")
    save_checkpoint(folder, _state(5), _trainer(), keep=1)
    assert read_state(folder, 5)[0] == _state(5)


def test_checkpoints_beyond_the_tracker_never_push_out_the_one_in_force(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    for round_ in (3, 9):
        save_checkpoint(folder, _state(round_), _trainer(), keep=2)
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    save_checkpoint(folder, _state(5), _trainer(), keep=1)
    assert find_latest(folder) == 5 and (folder.checkpoints / checkpoint_name(5)).is_dir()


@pytest.mark.parametrize("text", ["", "nine", "8"])
def test_a_tracker_that_names_nothing_is_broken(tmp_path: Path, text: str) -> None:
    folder = RunFolder.create(tmp_path)
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(InputError, match="checkpoint_broken"):
        find_latest(folder)


def test_a_missing_checkpoint_names_the_saved_ones(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    save_checkpoint(folder, _state(3), _trainer(), keep=2)
    with pytest.raises(InputError, match=r"saved rounds: 3 \[checkpoint_missing\]"):
        read_state(folder, 4)


@pytest.mark.parametrize("content", [b"{", b'{"version": 99}', b"[]"])
def test_an_unreadable_state_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder.create(tmp_path)
    path = save_checkpoint(folder, _state(3), _trainer(), keep=2)
    (path / "state.json").write_bytes(content)
    with pytest.raises(InputError, match="checkpoint_broken"):
        read_state(folder, 3)
