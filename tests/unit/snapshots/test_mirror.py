"""The host copy: what it holds is what was promoted, or nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshot_cases import make_bucket, read_state, read_tensors

from hotloop.errors import SnapshotError
from hotloop.snapshots.codecs.base import SLIME_FORMATS
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.materialize import StagedSnapshot, stage
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.mirror import Mirror
from hotloop.snapshots.reader import SnapshotReader


def load(bucket: FakeBucket, version: int, mirror: Mirror) -> StagedSnapshot:
    held = None if mirror.is_empty else mirror
    return stage(f"step{version:06d}", SnapshotReader(bucket), MemoryFetcher(bucket), held=held)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path / "mirror")
    yield mirror
    mirror.close()


def reopen(mirror: Mirror, tmp_path: Path) -> Mirror:
    mirror.close()
    return Mirror(tmp_path / "mirror")


@pytest.mark.parametrize("settings", [{}, {"formats": SLIME_FORMATS, "level": 1}])
def test_anchor_and_deltas_are_promoted_and_survive_a_restart(tmp_path: Path, settings: dict[str, object]) -> None:
    bucket, states = make_bucket(5, **settings)
    mirror = Mirror(tmp_path / "mirror")
    for version in (1, 2, 3, 5):
        staged = load(bucket, version, mirror)
        assert staged.base == (None if version == 1 else f"step{3 if version == 5 else version - 1:06d}")
        mirror.begin(staged)
        mirror.promote(staged)
        assert (mirror.held.identity, mirror.held.digest) == (staged.identity, staged.digest)
        assert mirror.policy_version == version
        assert read_tensors(mirror.tensors) == read_state(states[version - 1])
        mirror = reopen(mirror, tmp_path)
        assert (mirror.held.identity, mirror.dropped_because) == (staged.identity, "")
        assert read_tensors(mirror.tensors) == read_state(states[version - 1])
    mirror.close()


def test_a_new_anchor_replaces_the_old_file(mirror: Mirror, tmp_path: Path) -> None:
    bucket, states = make_bucket(4, full_every=2)
    for version in (1, 3):
        mirror.promote(load(bucket, version, mirror))
    assert read_tensors(mirror.tensors) == read_state(states[2])
    assert [path.name for path in (tmp_path / "mirror").glob("weights-*")] == ["weights-2.bin"]


def test_f38_a_crash_between_install_and_promotion_drops_the_copy(mirror: Mirror, tmp_path: Path) -> None:
    bucket, states = make_bucket(2)
    mirror.promote(load(bucket, 1, mirror))
    mirror.begin(load(bucket, 2, mirror))
    after = reopen(mirror, tmp_path)
    assert after.is_empty
    assert "crash" in after.dropped_because
    after.promote(load(bucket, 2, after))
    assert read_tensors(after.tensors) == read_state(states[1])
    after.close()


def test_an_abandoned_load_changes_nothing(mirror: Mirror, tmp_path: Path) -> None:
    bucket, states = make_bucket(2)
    mirror.promote(load(bucket, 1, mirror))
    mirror.begin(load(bucket, 2, mirror))
    mirror.abandon()
    after = reopen(mirror, tmp_path)
    assert read_tensors(after.tensors) == read_state(states[0])
    after.close()


def test_f39_promoting_twice_changes_nothing(mirror: Mirror) -> None:
    bucket, states = make_bucket(2)
    mirror.promote(load(bucket, 1, mirror))
    staged = load(bucket, 2, mirror)
    mirror.promote(staged)
    mirror.promote(staged)
    assert read_tensors(mirror.tensors) == read_state(states[1])


def test_changes_of_another_base_are_refused_and_nothing_is_written(mirror: Mirror) -> None:
    bucket, states = make_bucket(3)
    mirror.promote(load(bucket, 1, mirror))
    second = load(bucket, 2, mirror)
    mirror.promote(second)
    third = load(bucket, 3, mirror)
    mirror.promote(third)
    with pytest.raises(SnapshotError) as caught:
        mirror.promote(second)
    assert caught.value.code == "parent_mismatch"
    assert read_tensors(mirror.tensors) == read_state(states[2])


@pytest.mark.parametrize("damage", ["flip", "truncate", "state", "missing"])
def test_a_damaged_copy_is_dropped(mirror: Mirror, tmp_path: Path, damage: str) -> None:
    bucket, _ = make_bucket(1)
    mirror.promote(load(bucket, 1, mirror))
    mirror.close()
    weights = tmp_path / "mirror" / "weights-1.bin"
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[100] ^= 1
        weights.write_bytes(bytes(data))
    elif damage == "truncate":
        os.truncate(weights, 100)
    elif damage == "state":
        (tmp_path / "mirror" / "mirror.json").write_text('{"schema": 1}')
    else:
        weights.unlink()
    after = Mirror(tmp_path / "mirror")
    assert after.is_empty
    assert after.dropped_because
    after.close()


def test_a_copy_belongs_to_one_process_at_a_time(mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        Mirror(tmp_path / "mirror")
    assert caught.value.code == "mirror_in_use"


def test_the_copy_is_private(mirror: Mirror, tmp_path: Path) -> None:
    bucket, _ = make_bucket(1)
    mirror.promote(load(bucket, 1, mirror))
    for path in (tmp_path / "mirror").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_f31_an_empty_delta_advances_the_version(mirror: Mirror) -> None:
    from hotloop.snapshots.publisher import Publisher

    bucket, states = make_bucket(1)
    Publisher(bucket).publish(states[0], "step000002", 2)
    mirror.promote(load(bucket, 1, mirror))
    staged = load(bucket, 2, mirror)
    assert (staged.is_empty, staged.changed_bytes) == (True, 0)
    mirror.promote(staged)
    assert (mirror.held.identity, mirror.policy_version) == ("step000002", 2)


def test_views_of_an_old_copy_stay_readable_while_a_new_one_is_written(mirror: Mirror) -> None:
    bucket, states = make_bucket(4, full_every=2)
    mirror.promote(load(bucket, 1, mirror))
    old = mirror.tensors["layer0.weight"].data
    mirror.promote(load(bucket, 3, mirror))
    assert bytes(old) == states[0]["layer0.weight"].tobytes()


def test_a_failed_install_forgets_the_copy(mirror: Mirror, tmp_path: Path) -> None:
    bucket, _ = make_bucket(1)
    mirror.promote(load(bucket, 1, mirror))
    mirror.forget()
    assert mirror.is_empty
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["lock"]
