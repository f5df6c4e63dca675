"""The zero-deviation filter and the token weights of both aggregation modes."""

from __future__ import annotations

import numpy as np
import pytest

from hotloop.algorithms.aggregation import compute_sample_weights
from hotloop.algorithms.filters import decide_with_fallback, decide_zero_std


def test_a_group_with_differing_rewards_is_kept() -> None:
    assert decide_zero_std([0, 1, 1]).keep


@pytest.mark.parametrize(
    ("rewards", "reason"), [([1, 1], "zero_std_1.0"), ([0, 0], "zero_std_0.0"), ([0.26, 0.26], "zero_std_0.3")]
)
def test_equal_rewards_are_dropped_with_their_value_as_reason(rewards: list[float], reason: str) -> None:
    decision = decide_zero_std(rewards)
    assert (decision.keep, decision.reason) == (False, reason)


def test_a_deviation_of_rounding_size_counts_as_equal() -> None:
    assert not decide_zero_std([0.3, 0.1 + 0.2]).keep


def test_a_group_of_one_carries_no_signal() -> None:
    assert not decide_zero_std([1.0]).keep


@pytest.mark.parametrize(("num_remaining", "keep"), [(5, False), (4, True), (3, True)])
def test_a_rejected_group_is_kept_when_no_more_than_the_batch_remain(num_remaining: int, keep: bool) -> None:
    decision = decide_with_fallback(decide_zero_std([1, 1]), num_remaining=num_remaining, num_wanted=4)
    assert decision.keep is keep


def test_two_siblings_of_one_rollout_weigh_as_one() -> None:
    weights = compute_sample_weights([3, 1], [8, 8], num_rollouts=1, mode="per_sample")
    assert (weights * [3, 1]).sum() == 1.0
    assert weights.tolist() == [0.25, 0.25]


def test_per_sample_counts_every_rollout_the_same_whatever_its_length() -> None:
    weights = compute_sample_weights([10, 2], [0, 1], num_rollouts=2, mode="per_sample")
    np.testing.assert_allclose(weights * [10, 2], [0.5, 0.5])


def test_per_sample_divides_by_all_rollouts_of_the_step_and_not_by_those_present() -> None:
    weights = compute_sample_weights([2], [0], num_rollouts=8, mode="per_sample")
    assert weights.tolist() == [1 / 16]


def test_per_token_counts_every_token_the_same_and_a_masked_sample_as_one_token() -> None:
    weights = compute_sample_weights([3, 0, 2], [0, 1, 2], num_rollouts=3, mode="per_token")
    np.testing.assert_allclose(weights, [1 / 6] * 3)


def test_no_samples_give_no_weights() -> None:
    assert compute_sample_weights([], [], num_rollouts=4, mode="per_token").size == 0
    assert compute_sample_weights([], [], num_rollouts=4, mode="per_sample").size == 0
