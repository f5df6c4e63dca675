"""Batches: advantages by group, masks, failed rollouts, the numbers of a round."""

from __future__ import annotations

import math

import pytest

from hotloop.loop.batching import build_batch, count_zero_std, measure_rollouts
from hotloop.types import Completion, Group, Rollout, Score, Task, VersionSpan


def make_rollout(
    group_id: int, index: int, reward: float | None, *, tokens: int = 2, version: int = 4, status: str = "completed"
) -> Rollout:
    completion = Completion(
        token_ids=list(range(20, 20 + tokens)),
        sampling_logprobs=[-0.5] * tokens,
        logprobs=[-0.5] * tokens,
        version_spans=[VersionSpan(0, tokens, version)] if tokens else [],
        finish_reason="stop",
    )
    score = None if reward is None else Score(reward)
    task = Task(f"t{group_id}", "p", "l")
    return Rollout(
        group_id * 10 + index,
        group_id,
        index,
        task,
        [1, 2, 3],
        completion,
        "r",
        status,
        score,  # type: ignore[arg-type]
    )


def make_group(group_id: int, rewards: list[float | None]) -> Group:
    rollouts = [
        make_rollout(group_id, index, reward, status="completed" if reward is not None else "failed")
        for index, reward in enumerate(rewards)
    ]
    return Group(group_id, rollouts[0].task, rollouts)


def test_advantages_follow_the_worked_example_and_prompts_are_masked() -> None:
    built = build_batch(3, [make_group(0, [1.0, 0.0])], normalize_std=True)
    sample = built.batch.samples[0]
    assert sample.ids == [1, 2, 3, 20, 21]
    assert sample.mask == [0, 0, 0, 1, 1]
    assert sample.behaviour_logprobs == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert sample.advantages == pytest.approx([0, 0, 0, 0.707106, 0.707106], abs=1e-6)
    assert (built.batch.round, built.batch.num_rollouts) == (3, 2)
    assert built.advantages == pytest.approx({0: 0.707106, 1: -0.707106}, abs=1e-6)


def test_one_of_eight_right_gives_the_published_numbers() -> None:
    built = build_batch(0, [make_group(0, [1.0] + [0.0] * 7)], normalize_std=True)
    assert [round(value, 6) for value in built.advantages.values()] == [2.474867] + [-0.353552] * 7


def test_a_failed_rollout_is_in_no_baseline_and_in_no_sample() -> None:
    built = build_batch(0, [make_group(0, [1.0, 0.0, None])], normalize_std=False)
    assert built.advantages == {0: 0.5, 1: -0.5}
    assert built.batch.num_rollouts == 2


def test_a_rollout_without_siblings_has_no_advantage() -> None:
    built = build_batch(0, [make_group(0, [1.0, None])], normalize_std=True)
    assert built.advantages == {0: 0.0}


def test_groups_are_told_apart_by_id_and_not_by_place() -> None:
    a, b = make_group(0, [1.0, 0.0]), make_group(1, [5.0, 5.0])
    mixed = [Group(0, a.task, [a.rollouts[0], b.rollouts[0]]), Group(1, b.task, [a.rollouts[1], b.rollouts[1]])]
    assert build_batch(0, mixed, normalize_std=False).advantages == {0: 0.5, 10: 0.0, 1: -0.5, 11: 0.0}


def test_the_numbers_of_a_round() -> None:
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 1.0]), make_group(2, [0.0, None])]
    groups[0].rollouts[1] = make_rollout(0, 1, 0.0, tokens=6, version=2, status="truncated")
    built = build_batch(0, groups, normalize_std=True)
    metrics = measure_rollouts(groups, built, trainer_version=4)
    assert metrics["rollout/raw_reward"] == pytest.approx(3 / 5)
    assert metrics["rollout/response_len/mean"] == pytest.approx((2 * 4 + 6) / 5)
    assert (metrics["rollout/response_len/max"], metrics["rollout/response_len/median"]) == (6, 2)
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 6)
    assert metrics["rollout/failed"] == 1
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, pytest.approx(2 / 5))
    assert metrics["rollout/rollout_log_probs"] == -0.5
    assert metrics["rollout/zero_std/count_1.0"] == 1 and metrics["rollout/zero_std/count_0.0"] == 1
    assert metrics["rollout/zero_std/count"] == 2


def test_groups_with_differing_rewards_are_not_counted() -> None:
    assert count_zero_std([make_group(0, [1.0, 0.0])]) == {"rollout/zero_std/count": 0}


def test_a_round_of_failures_has_finite_numbers() -> None:
    groups = [make_group(0, [None, None])]
    metrics = measure_rollouts(groups, build_batch(0, groups, normalize_std=True), trainer_version=0)
    assert all(math.isfinite(value) for value in metrics.values())
