"""A round's rollout file holds every token, has equal bytes for equal rounds, and replays to the same batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotloop.loop.batching import build_batch
from hotloop.loop.rollout_file import read_rollouts, read_routes, replay_batch, write_rollouts
from hotloop.types import Completion, Group, Rollout, Score, Task, VersionSpan


def _groups() -> list[Group]:
    logprob = float(np.float32(-0.123456789))
    groups = []
    for group_id in range(2):
        task = Task(f"t{group_id}", "s21=", "12")
        rollouts = []
        for index in range(3):
            tokens = [5, 6, 2][: 3 - index]
            spans = [VersionSpan(0, len(tokens), 9)]
            completion = Completion(
                tokens, [logprob] * len(tokens), [logprob] * len(tokens), spans, "stop" if index == 0 else "length"
            )
            score = Score(float(index == 0), "equal" if index == 0 else "differs")
            rollouts.append(
                Rollout(group_id * 3 + index, group_id, index, task, [1, 13], completion, "12", "completed", score)
            )
        groups.append(Group(group_id, task, rollouts))
    return groups


def _write(path: Path, groups: list[Group], dropped: dict[int, str] | None = None) -> list[dict[str, object]]:
    built = build_batch(4, groups, normalize_std=True)
    write_rollouts(path, groups, built.advantages, dropped or {})
    return read_rollouts(path)


def test_every_field_of_a_rollout_is_there(tmp_path: Path) -> None:
    record = _write(tmp_path / "r.zst", _groups())[0]
    assert record["tokens"] == [1, 13, 5, 6, 2]
    assert record["rollout_log_probs"] == pytest.approx([-0.12345679] * 3, abs=1e-9)
    assert (record["group_index"], record["rollout_id"], record["index"]) == (0, 0, 0)
    assert (record["prompt"], record["response"], record["label"]) == ("s21=", "12", "12")
    assert (record["reward"], record["reason"]) == (1.0, "equal")
    assert (record["weight_versions"], record["version_spans"]) == (["9"], [[0, 3, 9]])
    assert record["advantage"] == pytest.approx(1.1547, abs=1e-4)
    assert "raw_log_probs" not in record


def test_raw_logprobs_are_written_where_they_differ(tmp_path: Path) -> None:
    groups = _groups()
    first = groups[0].rollouts[0]
    first.completion = replace(first.completion, logprobs=[-1.0, -2.0, -3.0])
    records = _write(tmp_path / "r.zst", groups)
    assert records[0]["raw_log_probs"] == [-1.0, -2.0, -3.0]
    assert "raw_log_probs" not in records[1]


def test_equal_rounds_write_equal_bytes(tmp_path: Path) -> None:
    _write(tmp_path / "a.zst", _groups())
    _write(tmp_path / "b.zst", _groups())
    assert (tmp_path / "a.zst").read_bytes() == (tmp_path / "b.zst").read_bytes()


def test_a_file_replays_to_the_batch_it_was_written_from(tmp_path: Path) -> None:
    groups = _groups()
    batch = build_batch(4, groups, normalize_std=True).batch
    again = replay_batch(4, _write(tmp_path / "r.zst", groups))
    assert (again.round, again.num_rollouts) == (batch.round, batch.num_rollouts)
    for old, new in zip(batch.samples, again.samples, strict=True):
        assert (old.ids, old.mask, old.rollout_id, old.group_id) == (new.ids, new.mask, new.rollout_id, new.group_id)
        assert np.array_equal(np.float32(old.behaviour_logprobs), np.float32(new.behaviour_logprobs))
        assert old.advantages == new.advantages and old.oldest_policy_version == new.oldest_policy_version


def test_failed_and_dropped_rollouts_are_kept_with_their_reason_and_not_replayed(tmp_path: Path) -> None:
    groups = _groups()
    failed = groups[0].rollouts[2]
    failed.status, failed.score, failed.failure = "failed", None, "the replica is gone"
    built = build_batch(4, groups[:1], normalize_std=True)
    write_rollouts(tmp_path / "r.zst", groups, built.advantages, {1: "zero_std_0.0"})
    records = read_rollouts(tmp_path / "r.zst")
    assert (records[2]["reason"], records[2]["reward"], records[2]["advantage"]) == ("the replica is gone", None, None)
    assert [record.get("dropped") for record in records] == [None] * 3 + ["zero_std_0.0"] * 3
    assert [sample.rollout_id for sample in replay_batch(4, records).samples] == [0, 1]


def test_expert_routes_survive(tmp_path: Path) -> None:
    groups = _groups()
    routes = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)
    first = groups[0].rollouts[0]
    first.completion = replace(first.completion, routed_experts=routes)
    records = _write(tmp_path / "r.zst", groups)
    assert np.array_equal(read_routes(records[0]), routes)
    assert np.array_equal(replay_batch(0, records).samples[0].routed_experts, routes)
    assert read_routes(records[1]) is None
