"""Corrections: detached weights that answer the mismatch between trainer and engine logprobs of the same tokens.

Owns: TIS and IcePop of algorithms.md section 5. The weight multiplies the clipped loss, after the clip and before
the aggregation; masks and denominators stay as they are.

Promises: the weight carries no gradient. The ratio is trainer over engine, exp(old - behaviour): it mixes version
and engine effects and cannot separate them.

Does not do: bypass (that is old := behaviour, a choice of the trainer), sequence-level weights.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

CorrectionKind = Literal["none", "tis", "icepop"]


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction does to each token."""

    weight_BT: torch.Tensor
    """Multiplies the token's loss."""
    ratio_BT: torch.Tensor
    """exp(old - behaviour), before any bound."""
    clipped_BT: torch.Tensor
    """1.0 where the weight differs from the ratio."""


def compute_correction(
    kind: CorrectionKind,
    old_logprobs_BT: torch.Tensor,
    behaviour_logprobs_BT: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Correction:
    """Weigh each token by how likely the trainer holds it against how likely the engine held it.

    Args:
        kind: `none`, `tis` or `icepop`.
        old_logprobs_BT: trainer logprobs before the first step of the round.
        behaviour_logprobs_BT: recorded by the engine.
        low: lower bound of the ratio, inclusive.
        high: upper bound of the ratio, inclusive.

    Formula:
        tis: clamp(ratio, low, high)
        icepop: ratio where low <= ratio <= high, else 0
        none: 1

    Source: TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; IcePop:
        Ling Team 2025, arXiv:2510.18855; both as in slime 624b824a `vanilla_tis_function`, `icepop_function`.
    """
    ratio = torch.exp(old_logprobs_BT.detach() - behaviour_logprobs_BT.detach())
    if kind == "none":
        weight = torch.ones_like(ratio)
        return Correction(weight, ratio, torch.zeros_like(ratio))
    if kind == "tis":
        weight = ratio.clamp(low, high)
    else:
        weight = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return Correction(weight, ratio, (weight != ratio).to(ratio.dtype))
