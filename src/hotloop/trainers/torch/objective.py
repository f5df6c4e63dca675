"""The scalar that a microbatch adds to the step's loss, and the sums that the step's metrics are made of.

Owns: the order of algorithms.md section 5 (clip, correction, aggregation), total = pg - entropy_coef x entropy +
kl_loss_coef x kl, and the metric names of section 13.

Promises: everything is a sum of weight x value over tokens, so microbatches add up to the step. Old logprobs that
are absent are the current ones without gradient: exact in the first step of a round, whose weights they come from.

A metric is the weighted mean over the tokens that were computed. `pg_loss`, `pg_clipfrac` and `loss` divide by the
weight of all tokens of the step: samples that were skipped for having no advantage add exactly zero to them.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.algorithms.corrections import compute_correction
from hotloop.algorithms.kl import compute_kl
from hotloop.algorithms.losses import compute_policy_loss
from hotloop.trainers.base import LossSettings
from hotloop.trainers.torch.passes import TensorBatch

WEIGHT = "weight"
"""Sum of the weights of the computed tokens; divides the metrics that are means."""

TOTALS = ("train/loss", "train/pg_loss", "train/pg_clipfrac")
"""Metrics whose sum is already the value of the step."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What one microbatch contributes to a step."""

    loss: Tensor
    """Scalar with gradient."""
    sums: dict[str, Tensor]
    """Weighted sums by metric name, detached scalars."""


def compute_objective(
    settings: LossSettings,
    batch: TensorBatch,
    logprobs_BR: Tensor,
    entropy_BR: Tensor,
    *,
    old_BR: Tensor | None = None,
    reference_BR: Tensor | None = None,
) -> Objective:
    """Compute the loss of a microbatch and its metric sums.

    Args:
        settings: the objective.
        batch: masks, weights, advantages and behaviour logprobs.
        logprobs_BR: current trainer logprobs, with gradient.
        entropy_BR: entropy of each token's distribution.
        old_BR: trainer logprobs before the first step of the round; None means the current ones.
        reference_BR: logprobs of the frozen reference policy; needed when `kl_loss_coef` is positive.
    """
    current_BR = logprobs_BR.detach()
    trainer_old_BR = current_BR if old_BR is None else old_BR
    bypass = settings.old_logprobs == "behaviour"
    ratio_base_BR = batch.behaviour_BR if bypass else trainer_old_BR
    policy = compute_policy_loss(
        settings.kind,
        logprobs_BR,
        ratio_base_BR,
        batch.advantages_BR,
        batch.mask_BR,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        dual_clip=settings.dual_clip,
    )
    weights_BR = batch.weights_BR
    sums: dict[str, Tensor] = {WEIGHT: weights_BR.sum()}
    token_loss_BR = policy.loss_BT
    if settings.correction != "none":
        correction = compute_correction(
            settings.correction,
            ratio_base_BR,
            batch.behaviour_BR,
            low=settings.correction_low,
            high=settings.correction_high,
        )
        token_loss_BR = token_loss_BR * correction.weight_BT
        sums["train/tis"] = (correction.ratio_BT * weights_BR).sum()
        sums["train/tis_clipfrac"] = (correction.clipped_BT * weights_BR).sum()
        sums["train/tis_abs"] = ((correction.ratio_BT - 1).abs() * weights_BR).sum()
        sums["train/ois"] = (policy.ratio_BT * weights_BR).sum()
    pg_loss = (token_loss_BR * weights_BR).sum()
    entropy = (entropy_BR * weights_BR).sum()
    loss = pg_loss
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    if reference_BR is not None:
        kl_BR = compute_kl(settings.kl_loss_type, logprobs_BR, reference_BR)
        kl_loss = (kl_BR * weights_BR).sum()
        loss = loss + settings.kl_loss_coef * kl_loss
        sums["train/kl_loss"] = kl_loss.detach()
    with torch.no_grad():
        sums["train/loss"] = loss.detach()
        sums["train/pg_loss"] = pg_loss.detach()
        sums["train/pg_clipfrac"] = (policy.clipped_BT * weights_BR).sum()
        sums["train/ppo_kl"] = ((ratio_base_BR - current_BR) * weights_BR).sum()
        sums["train/entropy_loss"] = entropy.detach()
        gap_BR = (trainer_old_BR - batch.behaviour_BR).abs()
        sums["train/train_rollout_logprob_abs_diff"] = (gap_BR * weights_BR).sum()
    return Objective(loss, sums)


def compute_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Turn the sums of a step into its metrics; a mean over no tokens is left out."""
    weight = sums[WEIGHT]
    metrics = {name: value for name, value in sums.items() if name in TOTALS}
    if weight > 0:
        metrics |= {name: value / weight for name, value in sums.items() if name not in (*TOTALS, WEIGHT)}
    return metrics
