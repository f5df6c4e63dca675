"""Scored groups in, the batch of one round out. Pure.

Owns: advantages by group id, masks, the flat samples, and the numbers of a round that follow from its rollouts.

Promises: failed rollouts are in no baseline and in no sample; a group that keeps fewer than two rollouts gives
advantage 0, because it has no baseline. Zero-advantage rollouts stay in the batch: they are part of its denominators,
and the trainer knows how to skip their arithmetic.
Does not do: filters (controller.py), the loss (trainers/).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotloop.algorithms.advantages import compute_group_advantages
from hotloop.loop.staleness import compute_age, find_oldest_version
from hotloop.trainers.base import Batch
from hotloop.types import Group, Rollout, Sample


@dataclass(frozen=True, slots=True)
class Built:
    """A batch and the advantage of each of its rollouts."""

    batch: Batch
    advantages: Mapping[int, float]
    """Rollout id -> advantage, the same on every response token."""


def build_batch(round_: int, groups: Sequence[Group], *, normalize_std: bool) -> Built:
    """Turn the groups of a round into flat samples with advantages."""
    usable = [rollout for group in groups for rollout in group.rollouts if is_usable(rollout)]
    rewards = [rollout.score.reward for rollout in usable if rollout.score is not None]
    values = compute_group_advantages(rewards, [r.group_id for r in usable], normalize_std=normalize_std).tolist()
    samples = [make_sample(rollout, advantage) for rollout, advantage in zip(usable, values, strict=True)]
    advantages = {rollout.rollout_id: value for rollout, value in zip(usable, values, strict=True)}
    return Built(Batch(round_, samples, len(samples)), advantages)


def is_usable(rollout: Rollout) -> bool:
    """Tell whether a rollout can be trained on: it ended by itself or by its length, and has a score and tokens."""
    return rollout.status in ("completed", "truncated") and rollout.score is not None and bool(rollout.prompt_ids)


def make_sample(rollout: Rollout, advantage: float) -> Sample:
    """Lay prompt and response end to end; the prompt is masked out."""
    completion = rollout.completion
    prompt_tokens, response_tokens = len(rollout.prompt_ids), len(completion.token_ids)
    no_loss = [0.0] * prompt_tokens
    return Sample(
        ids=rollout.prompt_ids + completion.token_ids,
        mask=[0] * prompt_tokens + [1] * response_tokens,
        behaviour_logprobs=no_loss + completion.sampling_logprobs,
        advantages=no_loss + [advantage] * response_tokens,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        oldest_policy_version=find_oldest_version(completion) or 0,
        routed_experts=completion.routed_experts,
        support=completion.support,
    )


def measure_rollouts(groups: Sequence[Group], built: Built, *, trainer_version: int) -> dict[str, float]:
    """Compute the `rollout/` and `staleness/` metrics of a round from what was collected for it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    usable = [rollout for rollout in rollouts if is_usable(rollout)]
    lengths = [len(rollout.completion.token_ids) for rollout in usable] or [0]
    rewards = [rollout.score.reward for rollout in usable if rollout.score is not None]
    ages = [compute_age(s.oldest_policy_version, trainer_version) for s in built.batch.samples if sum(s.mask)] or [0]
    num_tokens = sum(lengths)
    total_logprob = sum(sum(rollout.completion.sampling_logprobs) for rollout in usable)
    metrics: dict[str, float] = {
        "rollout/raw_reward": float(np.mean(rewards)) if rewards else 0.0,
        "rollout/advantages": float(np.mean(list(built.advantages.values()))) if built.advantages else 0.0,
        "rollout/rollout_log_probs": total_logprob / num_tokens if num_tokens else 0.0,
        "rollout/response_len/mean": num_tokens / len(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": max(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/total_lengths": sum(len(s.ids) for s in built.batch.samples) / max(1, len(usable)),
        "rollout/truncated_ratio": sum(r.status == "truncated" for r in rollouts) / max(1, len(rollouts)),
        "rollout/failed": sum(r.status == "failed" for r in rollouts),
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": max(ages),
    }
    metrics.update(count_zero_std(groups))
    return metrics


def count_zero_std(groups: Sequence[Group]) -> dict[str, int]:
    """Count groups whose rewards are all equal, by that reward, and in all under `rollout/zero_std/count`."""
    counts: dict[str, int] = {"rollout/zero_std/count": 0}
    for group in groups:
        rewards = {
            rollout.score.reward for rollout in group.rollouts if is_usable(rollout) and rollout.score is not None
        }
        if len(rewards) == 1:
            name = f"rollout/zero_std/count_{round(rewards.pop(), 1)}"
            counts[name] = counts.get(name, 0) + 1
            counts["rollout/zero_std/count"] += 1
    return counts
