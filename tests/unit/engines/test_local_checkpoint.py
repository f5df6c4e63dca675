"""A checkpoint on disk is patched in place, and put back as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotloop.engines import local_checkpoint
from hotloop.engines.base import TensorRange
from hotloop.engines.byte_ranges import iter_windows
from hotloop.engines.local_checkpoint import LocalCheckpoint
from hotloop.errors import HotloopError


def open_checkpoint(root: Path) -> LocalCheckpoint:
    rng = np.random.default_rng(0)
    tensors = {"a": rng.random((50, 40), np.float32), "b": rng.random(300, np.float32)}
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    return LocalCheckpoint(root)


def scattered(name: str, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> TensorRange:
    where = np.flatnonzero((before != after).reshape(-1))
    return TensorRange(name, where * 4, np.full(len(where), 4), after.reshape(-1)[where].tobytes())


@pytest.mark.parametrize("window", [16, 100, 4 << 20])
def test_scattered_ranges_and_whole_tensors_are_written_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(local_checkpoint, "_WINDOW_BYTES", window)
    checkpoint = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    original, old = path.read_bytes(), load_file(path)
    rng = np.random.default_rng(1)
    new = np.where(rng.random(old["a"].shape) < 0.1, old["a"] + 1, old["a"])
    undo = checkpoint.write([scattered("a", old["a"], new)], {"b": old["b"] * 2})
    found = load_file(path)
    assert np.array_equal(found["a"], new) and np.array_equal(found["b"], old["b"] * 2)
    checkpoint.restore(undo)
    assert path.read_bytes() == original


def test_of_ranges_that_overlap_the_later_one_counts_and_all_are_put_back(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    original = path.read_bytes()
    undo = checkpoint.write(
        [TensorRange("b", np.array([8, 4, 6]), np.array([4, 4, 4]), b"AAAABBBBCCCC"), TensorRange("b", [7], [1], b"D")],
        {},
    )
    found = load_file(path)["b"].tobytes()
    assert found[4:12] == b"BBCDCCAA"
    checkpoint.restore(undo)
    assert path.read_bytes() == original


def test_scattered_ranges_cost_a_write_for_each_window_and_not_for_each_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tmp_path)
    old = load_file(tmp_path / "model.safetensors")["a"]
    new = old.copy()
    new[:, ::4] += 1
    writes: list[int] = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: writes.append(1) or real(*args))
    checkpoint.write([scattered("a", old, new)], {})
    assert len(writes) == 1 and np.array_equal(load_file(tmp_path / "model.safetensors")["a"], new)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        (TensorRange("nobody", [0], [4], b"1234"), "no such tensor"),
        (TensorRange("b", [1198], [4], b"1234"), "outside"),
        (TensorRange("b", [-1], [4], b"1234"), "outside"),
        (TensorRange("b", [0], [8], b"1234"), "4 came"),
        (TensorRange("b", [0, 8], [4], b"1234"), "differ in number"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, ranges: TensorRange, words: str) -> None:
    checkpoint = open_checkpoint(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(HotloopError, match=words) as caught:
        checkpoint.write([TensorRange("a", [0], [4], b"good"), ranges], {})
    assert caught.value.code == "install_failed"
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("offsets", "lengths", "groups"),
    [
        ([0, 4, 12, 16, 30], [4, 4, 4, 4, 4], [(0, 3), (3, 4), (4, 5)]),
        ([0, 100], [50, 4], [(0, 1), (1, 2)]),
        ([8, 0, 4], [4, 4, 4], [(0, 1), (1, 2), (2, 3)]),
        ([], [], []),
    ],
)
def test_ranges_are_grouped_by_windows(offsets: list[int], lengths: list[int], groups: list[tuple[int, int]]) -> None:
    arrays = np.array(offsets, np.int64), np.array(lengths, np.int64)
    assert list(iter_windows(*arrays, 16)) == groups
