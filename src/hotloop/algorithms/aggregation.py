"""How per-token losses become one number: the weight of every token in the step's loss.

Owns: the two modes of algorithms.md section 4, written as token weights, so that
`loss = sum over tokens of weight x token loss` whatever the cut into microbatches.

Promises: weights are computed once per step from all of its samples; a microbatch only picks its rows. That is why
one microbatch and k microbatches give the same gradient, and why a sample may be skipped without moving the rest.

Does not do: losses (losses.py), the cut itself (trainers/torch).

Shapes: N samples of the step.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Aggregation = Literal["per_sample", "per_token"]


def compute_sample_weights(
    mask_sums_N: ArrayLike, rollout_ids_N: ArrayLike, *, num_rollouts: float, mode: Aggregation
) -> NDArray[np.float64]:
    """Compute the weight that each unmasked token of a sample has in the loss of the step.

    Args:
        mask_sums_N: unmasked tokens of each sample.
        rollout_ids_N: the rollout of each sample; siblings of one execution share it.
        num_rollouts: rollouts of the step, those without signal included.
        mode: `per_sample` or `per_token`.

    Returns:
        weights_N; the loss is sum over samples and tokens of weight x mask x token loss.

    Formula:
        per_sample: 1 / (max(1, mask total of all samples with that rollout id) x num_rollouts)
        per_token: 1 / sum over samples of max(1, mask sum)

    Source: slime 624b824a, `sum_of_sample_mean` and `--calculate-per-token-loss`. per_sample is the sequence mean of
        GRPO (arXiv:2402.03300), per_token the token mean of DAPO (arXiv:2503.14476, section 3.3).
    """
    mask_sums = np.asarray(mask_sums_N, dtype=np.float64)
    if mode == "per_token":
        total = float(np.maximum(mask_sums, 1.0).sum())
        return np.full(mask_sums.shape, 1.0 / total if total else 0.0)
    _, inverse = np.unique(np.asarray(rollout_ids_N), return_inverse=True)
    totals = np.maximum(np.bincount(inverse, weights=mask_sums), 1.0) if mask_sums.size else mask_sums
    weights: NDArray[np.float64] = 1.0 / (totals[inverse] * num_rollouts)
    return weights
