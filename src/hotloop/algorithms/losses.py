"""Policy losses, per token: the clipped objectives of algorithms.md section 2.

Owns: clip (with clip-higher and dual clip), GSPO's sequence ratio, CISPO, and the value loss.

Promises: a token's loss depends on its own row only, so rows may be cut into microbatches, merged or skipped; masked
tokens get a loss too, and the caller's weight removes them.

Does not do: corrections (corrections.py), aggregation (aggregation.py), entropy and logprobs (logprobs.py).

Shapes: B rows, T response tokens; logprobs are natural logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LossKind = Literal["grpo", "gspo", "cispo"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss per token, and what its metrics need."""

    loss_BT: torch.Tensor
    """Negative of the objective."""
    ratio_BT: torch.Tensor
    """Importance ratio that entered the loss, detached."""
    clipped_BT: torch.Tensor
    """1.0 where the clip changed the token's loss; never where the advantage is 0."""


def compute_policy_loss(
    kind: LossKind,
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Compute the policy loss of each token.

    Args:
        kind: `grpo` (token ratio), `gspo` (sequence ratio) or `cispo` (detached clipped weight).
        logprobs_BT: current trainer logprobs, with gradient.
        old_logprobs_BT: logprobs before the first step of the round.
        advantages_BT: one per token.
        mask_BT: 1.0 where the token counts; used by gspo's sequence mean.
        eps_clip: width of the clip below 1; for cispo, 1 or more removes the lower bound.
        eps_clip_high: width of the clip above 1.
        dual_clip: bound c > 1 of the loss of negative advantages; None means off. Not used by cispo.

    Formula:
        d_t = old_t - current_t (gspo: its masked mean over the row); rho = exp(-d)
        clip loss = max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A)
        dual clip = min(clip loss, -c A) where A < 0
        cispo = -sg(clip(rho, 1 - eps, 1 + eps_high)) A logprob

    Source: clip: Schulman et al. 2017, arXiv:1707.06347, equation 7; clip-higher: DAPO, arXiv:2503.14476, equation
        10; dual clip: Ye et al. 2020, arXiv:1912.09729, equation 5; GSPO: Zheng et al. 2025, arXiv:2507.18071,
        equations 5 to 7; CISPO: MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5; forms of slime 624b824a.
    """
    difference_BT = old_logprobs_BT.detach() - logprobs_BT
    if kind == "gspo":
        difference_BT = compute_sequence_mean(difference_BT, mask_BT).expand_as(difference_BT)
    ratio_BT = torch.exp(-difference_BT)
    clipped_ratio_BT = ratio_BT.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    if kind == "cispo":
        weight_BT = clipped_ratio_BT.detach()
        loss_BT = -weight_BT * advantages_BT * logprobs_BT
        clipped_BT = ((weight_BT != ratio_BT.detach()) & (advantages_BT != 0)).to(loss_BT.dtype)
        return PolicyLoss(loss_BT, ratio_BT.detach(), clipped_BT)
    plain_BT = -ratio_BT * advantages_BT
    bounded_BT = -clipped_ratio_BT * advantages_BT
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    clipped_BT = (bounded_BT > plain_BT).to(loss_BT.dtype)
    if dual_clip is not None:
        capped_BT = torch.minimum(loss_BT, -dual_clip * advantages_BT)
        loss_BT = torch.where(advantages_BT < 0, capped_BT, loss_BT)
    return PolicyLoss(loss_BT, ratio_BT.detach(), clipped_BT)


def compute_sequence_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Average each row over its unmasked tokens; a fully masked row gives 0.

    Returns:
        means_B1, to be broadcast over the row.

    Source: slime 624b824a `compute_gspo_kl`.
    """
    total_B1 = (values_BT * mask_BT).sum(dim=-1, keepdim=True)
    return total_B1 / mask_BT.sum(dim=-1, keepdim=True).clamp(min=1.0)


def compute_value_loss(
    values_BT: torch.Tensor, old_values_BT: torch.Tensor, returns_BT: torch.Tensor, *, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped value loss of each token.

    Returns:
        loss_BT and clipped_BT (1.0 where the clipped error is the larger).

    Formula: max((V - R)^2, (V_old + clip(V - V_old, +-value_clip) - R)^2), without a factor 1/2.

    Source: slime 624b824a; clipping as in Schulman et al.'s PPO implementation (OpenAI baselines, ppo2).
    """
    bounded_BT = old_values_BT + (values_BT - old_values_BT).clamp(-value_clip, value_clip)
    plain_error_BT = (values_BT - returns_BT) ** 2
    bounded_error_BT = (bounded_BT - returns_BT) ** 2
    clipped_BT = (bounded_error_BT > plain_error_BT).to(values_BT.dtype)
    return torch.maximum(plain_error_BT, bounded_error_BT), clipped_BT
