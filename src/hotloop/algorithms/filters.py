"""Dynamic sampling filters: which collected groups are worth training on.

Owns: DAPO's zero-deviation filter, its drop reasons, and the rule by which a rejected group is kept after all.

Promises: a decision is a value with a reason; the caller counts the reasons under
`rollout/dynamic_filter/drop_<reason>`.

Does not do: sampling replacements (loop/sampler), advantages (advantages.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

MIN_STD = 1e-6
"""A group at or below this sample deviation of its rewards carries no signal (slime 624b824a)."""


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a group enters the batch."""

    keep: bool
    reason: str = ""
    """Empty when kept; `zero_std_<reward to one digit>` when dropped."""


def decide_zero_std(rewards_G: ArrayLike) -> FilterDecision:
    """Keep a group only if its rewards differ.

    Args:
        rewards_G: rewards of one group.

    Returns:
        Kept iff the sample standard deviation (float64, divisor n - 1) exceeds 1e-6. A group of one is dropped.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 11; slime 624b824a
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    std = float(rewards.std(ddof=1)) if rewards.size > 1 else 0.0
    if std > MIN_STD:
        return FilterDecision(keep=True)
    shown = float(rewards[0]) if rewards.size else 0.0
    return FilterDecision(keep=False, reason=f"zero_std_{round(shown, 1)}")


def decide_with_fallback(decision: FilterDecision, *, num_remaining: int, num_wanted: int) -> FilterDecision:
    """Keep a rejected group when too few candidates remain to fill the batch without it.

    Args:
        decision: what the filter said.
        num_remaining: candidates that could still enter the batch, this one included.
        num_wanted: groups that the batch needs.

    Source: slime 624b824a, `keep_when_insufficient`.
    """
    if decision.keep or num_remaining > num_wanted:
        return decision
    return FilterDecision(keep=True, reason=decision.reason)
