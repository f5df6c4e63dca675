"""Advantages: the worked numbers of the published tutorial, hand-worked returns, and limit cases."""

from __future__ import annotations

import numpy as np
import pytest

from hotloop.algorithms.advantages import (
    compute_gae,
    compute_group_advantages,
    compute_reinforce_plus_plus,
    compute_reinforce_plus_plus_baseline,
    whiten_advantages,
)


def test_half_right_of_eight_gives_the_worked_number() -> None:
    advantages = compute_group_advantages([1, 1, 1, 1, 0, 0, 0, 0], [0] * 8)
    # std = sqrt(2 / 7) = 0.534522; 0.5 / (0.534522 + 1e-6)
    np.testing.assert_allclose(advantages, [0.93541259] * 4 + [-0.93541259] * 4, atol=5e-9)


def test_one_right_of_eight() -> None:
    advantages = compute_group_advantages([1] + [0] * 7, [0] * 8)
    np.testing.assert_allclose(advantages, [2.474867] + [-0.353552] * 7, atol=1e-6)


def test_a_group_of_two() -> None:
    np.testing.assert_allclose(compute_group_advantages([1, 0], [5, 5]), [0.707106, -0.707106], atol=1e-6)


def test_a_group_of_one_is_not_divided_and_has_no_advantage() -> None:
    assert compute_group_advantages([3.5, 1, 0], [1, 2, 2])[0] == 0.0


def test_equal_rewards_give_exactly_zero_although_their_mean_rounds() -> None:
    advantages = compute_group_advantages([0.1] * 3 + [1.0, 0.0], [0, 0, 0, 1, 1])
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]


def test_without_division_the_advantage_is_the_centred_reward() -> None:
    advantages = compute_group_advantages([1, 1, 1, 1, 0, 0, 0, 0], [0] * 8, normalize_std=False)
    assert advantages.tolist() == [0.5] * 4 + [-0.5] * 4


def test_groups_are_told_apart_by_id_and_never_by_position() -> None:
    rewards, group_ids = np.array([1.0, 10.0, 0.0, 0.0, 30.0]), np.array([7, 3, 7, 7, 3])
    together = compute_group_advantages(rewards, group_ids)
    order = np.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(compute_group_advantages(rewards[order], group_ids[order]), together[order])
    np.testing.assert_allclose(together[[1, 4]], compute_group_advantages([10, 30], [0, 0]))
    np.testing.assert_allclose(together[[0, 2, 3]], compute_group_advantages([1, 0, 0], [0, 0, 0]))


def test_no_rollouts_give_no_advantages() -> None:
    assert compute_group_advantages([], []).size == 0


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="equal in length"):
        compute_group_advantages([1, 2], [1])


def test_reinforce_plus_plus_puts_the_reward_on_the_last_unmasked_token() -> None:
    # token rewards: -0.1 x 1 x 2 = -0.2; masked: 0; -0.1 x 1 x 1 + 1 = 0.9; masked: 0; discounted by 0.5 from the right
    [returns] = compute_reinforce_plus_plus([1.0], [[2, 5, 1, 7]], [[1, 0, 1, 0]], kl_coef=0.1, gamma=0.5)
    np.testing.assert_allclose(returns, [-0.2 + 0.5 * 0.45, 0.45, 0.9, 0.0])


def test_reinforce_plus_plus_without_penalty_and_discount_is_the_reward_on_every_token_that_led_to_it() -> None:
    [first, masked] = compute_reinforce_plus_plus([2.0, 3.0], [[9, 9, 9], [9]], [[1, 1, 1], [0]])
    assert first.tolist() == [2.0, 2.0, 2.0]
    assert masked.tolist() == [0.0]


def test_the_baseline_form_subtracts_the_penalty_from_the_centred_reward() -> None:
    first, second = compute_reinforce_plus_plus_baseline([1, 0], [0, 0], [[1.0, 2.0], [0.0]], kl_coef=0.1)
    np.testing.assert_allclose(first, [0.4, 0.3])
    np.testing.assert_allclose(second, [-0.5])


def test_gae_with_gamma_and_lambda_one_and_no_values_is_the_final_reward() -> None:
    advantages, returns = compute_gae([0, 0, 1.0], [0, 0, 0])
    assert advantages.tolist() == [1.0, 1.0, 1.0]
    assert returns.tolist() == [1.0, 1.0, 1.0]


def test_gae_by_hand() -> None:
    # gamma 0.9, lambda 0.5, V = (0.5, 0.4), r = (0, 1): d1 = 1 - 0.4 = 0.6; d0 = 0.36 - 0.5 = -0.14
    advantages, returns = compute_gae([0, 1.0], [0.5, 0.4], gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantages, [-0.14 + 0.45 * 0.6, 0.6])
    np.testing.assert_allclose(returns, [0.63, 1.0])


def test_gae_with_lambda_zero_is_the_one_step_error() -> None:
    advantages, _ = compute_gae([0, 1.0], [0.5, 0.4], gamma=0.9, lam=0.0)
    np.testing.assert_allclose(advantages, [-0.14, 0.6])


def test_whitening_uses_unmasked_tokens_only_and_moves_all() -> None:
    first, second = whiten_advantages([[1.0, 100.0], [3.0]], [[1, 0], [1]])
    # kept 1 and 3: mean 2, variance 2
    np.testing.assert_allclose(np.r_[first, second], (np.array([1, 100, 3]) - 2) / np.sqrt(2), rtol=1e-7)


def test_whitening_of_equal_advantages_gives_zeros() -> None:
    assert whiten_advantages([[2.0, 2.0]], [[1, 1]])[0].tolist() == [0.0, 0.0]
