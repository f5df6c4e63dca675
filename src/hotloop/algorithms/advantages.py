"""Advantages: rewards of one step in, one advantage per rollout or per token out.

Owns: the estimators of algorithms.md section 1 (grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae) and
masked whitening, as pure numpy functions in float64.

Promises: rollouts are grouped by their group id, never by position or by an assumed group size, so groups may be
uneven and may arrive in any order. Equal rewards give exactly zero.

Does not do: dropping groups (filters.py), losses (losses.py), anything with torch.

Shapes: N rollouts of the step, T tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to the standard deviation before dividing; slime 624b824a and verl 0.9.1 use the same number."""

_WHITEN_EPSILON = 1e-8
"""Added to the variance before the reciprocal root, so that a constant batch gives zeros and not NaN."""


def compute_group_advantages(
    rewards_N: ArrayLike, group_ids_N: ArrayLike, *, normalize_std: bool = True, epsilon: float = STD_EPSILON
) -> Floats:
    """Compute each rollout's advantage as its reward minus its group's mean, over the group's standard deviation.

    Args:
        rewards_N: one reward per rollout; groups in any order, of any size.
        group_ids_N: the group of each rollout.
        normalize_std: divide by the sample standard deviation. Off: mean centring only (Dr. GRPO).
        epsilon: added to the standard deviation.

    Returns:
        advantages_N, mean zero inside each group. Exactly zero for a group of one, and for equal rewards.

    Formula: advantage_i = (reward_i - mean(group)) / (std(group) + epsilon), std with divisor n - 1; a group of one
        is not divided.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; divisor n - 1 as in slime 624b824a.
        Undivided form: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
    """
    rewards, inverse, counts = _index_groups(rewards_N, group_ids_N)
    if rewards.size == 0:
        return rewards
    centred = _center(rewards, inverse, counts)
    if not normalize_std:
        return centred
    squares = np.bincount(inverse, weights=centred * centred)
    std = np.sqrt(squares / np.maximum(counts - 1, 1))
    divisor = np.where(counts > 1, std + epsilon, 1.0)
    advantages: Floats = centred / divisor[inverse]
    return advantages


def compute_reinforce_plus_plus(
    rewards_N: ArrayLike,
    kl_NT: Sequence[ArrayLike],
    mask_NT: Sequence[ArrayLike],
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> list[Floats]:
    """Compute per-token advantages as the discounted return of a token reward that holds the KL penalty.

    Args:
        rewards_N: raw reward of each rollout.
        kl_NT: per rollout, the KL estimate of each of its T response tokens (lengths may differ).
        mask_NT: per rollout, 1 where the token was sampled; 0 on tool tokens.
        kl_coef: weight of the penalty.
        gamma: discount per token, in (0, 1].

    Returns:
        One array per rollout, [T].

    Formula: token_reward_t = -kl_coef mask_t kl_t, plus reward at the last token with mask 1;
        return_t = token_reward_t + gamma return_{t+1}. A fully masked rollout gets zeros.

    Source: Hu 2025 (REINFORCE++), arXiv:2501.03262, equations 4 to 6; placing as in slime 624b824a.
    """
    returns: list[Floats] = []
    for reward, kl, mask in zip(np.asarray(rewards_N, dtype=np.float64), kl_NT, mask_NT, strict=True):
        mask_T = np.asarray(mask, dtype=np.float64)
        token_reward_T = -kl_coef * mask_T * np.asarray(kl, dtype=np.float64)
        unmasked = np.flatnonzero(mask_T)
        if unmasked.size:
            token_reward_T[unmasked[-1]] += reward
        returns.append(_discount(token_reward_T, gamma))
    return returns


def compute_reinforce_plus_plus_baseline(
    rewards_N: ArrayLike, group_ids_N: ArrayLike, kl_NT: Sequence[ArrayLike], *, kl_coef: float = 0.0
) -> list[Floats]:
    """Compute per-token advantages as the group-centred reward minus the token's KL penalty.

    Args:
        rewards_N: raw reward of each rollout.
        group_ids_N: the group of each rollout.
        kl_NT: per rollout, the KL estimate of each of its T response tokens.
        kl_coef: weight of the penalty.

    Returns:
        One array per rollout, [T].

    Formula: advantage_t = reward - mean(group) - kl_coef kl_t; no division by the standard deviation.

    Source: Hu 2025 (REINFORCE++), arXiv:2501.03262, section on the baseline variant; slime 624b824a.
    """
    centred_N = compute_group_advantages(rewards_N, group_ids_N, normalize_std=False)
    return [centred - kl_coef * np.asarray(kl, dtype=np.float64) for centred, kl in zip(centred_N, kl_NT, strict=True)]


def compute_gae(
    token_rewards_T: ArrayLike, values_T: ArrayLike, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Floats, Floats]:
    """Compute generalised advantage estimates of one rollout, which ends after its last token.

    Args:
        token_rewards_T: reward of each token; an outcome reward sits at the last token.
        values_T: the critic's value of the state before each token.
        gamma: discount per token, in (0, 1].
        lam: weight of longer returns, in [0, 1].

    Returns:
        advantages_T and returns_T (advantages + values).

    Formula: delta_t = r_t + gamma V_{t+1} - V_t with V_T = 0; A_t = delta_t + gamma lam A_{t+1}.

    Source: Schulman et al. 2015, arXiv:1506.02438, equations 11 and 16.
    """
    rewards = np.asarray(token_rewards_T, dtype=np.float64)
    values = np.asarray(values_T, dtype=np.float64)
    next_values = np.append(values[1:], 0.0)
    advantages = _discount(rewards + gamma * next_values - values, gamma * lam)
    return advantages, advantages + values


def whiten_advantages(advantages_NT: Sequence[ArrayLike], mask_NT: Sequence[ArrayLike]) -> list[Floats]:
    """Shift and scale advantages so that unmasked tokens of the whole step have mean 0 and variance 1.

    Args:
        advantages_NT: one array per rollout.
        mask_NT: 1 where the token enters the loss.

    Returns:
        One array per rollout; masked tokens are shifted and scaled too, but do not enter the statistics.

    Formula: (A - mean) / sqrt(var + 1e-8), var with divisor n - 1 over the n unmasked tokens of the step.

    Source: slime 624b824a `normalize_advantages`; masked whitening as in Ziegler et al. 2019, arXiv:1909.08593.
    """
    arrays = [np.asarray(a, dtype=np.float64) for a in advantages_NT]
    masks = [np.asarray(m, dtype=bool) for m in mask_NT]
    kept = np.concatenate([a[m] for a, m in zip(arrays, masks, strict=True)]) if arrays else np.empty(0)
    if kept.size < 2:
        return arrays
    mean, variance = kept.mean(), kept.var(ddof=1)
    return [(a - mean) / np.sqrt(variance + _WHITEN_EPSILON) for a in arrays]


def _index_groups(rewards_N: ArrayLike, group_ids_N: ArrayLike) -> tuple[Floats, NDArray[np.intp], NDArray[np.intp]]:
    rewards = np.asarray(rewards_N, dtype=np.float64)
    group_ids = np.asarray(group_ids_N)
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and group ids {group_ids.shape} must be flat and equal in length")
    _, inverse, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    return rewards, inverse, counts


def _center(rewards_N: Floats, inverse: NDArray[np.intp], counts: NDArray[np.intp]) -> Floats:
    """Subtract the group mean. Equal rewards must give exactly 0, whatever rounding the mean has."""
    centred: Floats = rewards_N - (np.bincount(inverse, weights=rewards_N) / counts)[inverse]
    low = np.full(counts.shape, np.inf)
    high = np.full(counts.shape, -np.inf)
    np.minimum.at(low, inverse, rewards_N)
    np.maximum.at(high, inverse, rewards_N)
    centred[(low == high)[inverse]] = 0.0
    return centred


def _discount(rewards_T: Floats, factor: float) -> Floats:
    """Sum each token's reward and its discounted successors, from the right."""
    if factor == 1.0:
        flat: Floats = np.cumsum(rewards_T[::-1])[::-1].copy()
        return flat
    returns = np.empty_like(rewards_T)
    running = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        running = float(rewards_T[t]) + factor * running
        returns[t] = running
    return returns
