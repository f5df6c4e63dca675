"""Batches for the trainer tests: groups with repeated answers, ragged lengths, and groups without any advantage."""

from __future__ import annotations

import random

from hotloop.trainers.base import Batch
from hotloop.types import Sample


def make_batch(
    *,
    num_groups: int = 6,
    group_size: int = 5,
    num_answers: int = 3,
    zero_groups: int = 2,
    seed: int = 0,
    prompt_tokens: tuple[int, int] = (3, 8),
    response_tokens: tuple[int, int] = (1, 6),
    tool_frac: float = 0.0,
    noise: float = 0.0,
) -> Batch:
    """Make groups with repeated answers, ragged lengths and groups without any advantage.

    Args:
        num_answers: distinct responses of a group; equal responses have equal advantages and logprobs.
        zero_groups: the first so many groups have no advantage.
        tool_frac: share of inner response tokens that are masked.
        noise: added to behaviour logprobs, differing between equal responses.
    """
    draw = random.Random(seed)
    samples = []
    for group in range(num_groups):
        prompt = [draw.randrange(1, 32) for _ in range(draw.randint(*prompt_tokens))]
        answers = []
        for _ in range(num_answers):
            length = draw.randint(*response_tokens)
            mask = [int(draw.random() >= tool_frac) for _ in range(length)]
            mask[0] = mask[-1] = 1
            answers.append(
                (
                    [draw.randrange(1, 32) for _ in range(length)],
                    mask,
                    [-abs(draw.gauss(2, 1)) * kept for kept in mask],
                    0.0 if group < zero_groups else draw.gauss(0, 1),
                )
            )
        for index in range(group_size):
            ids, mask, logprobs, advantage = draw.choice(answers)
            shift = draw.uniform(-noise, noise)
            samples.append(
                Sample(
                    ids=prompt + ids,
                    mask=[0] * len(prompt) + mask,
                    behaviour_logprobs=[0.0] * len(prompt)
                    + [value + shift * kept for value, kept in zip(logprobs, mask, strict=True)],
                    advantages=[0.0] * len(prompt) + [advantage * kept for kept in mask],
                    rollout_id=group * group_size + index,
                    group_id=100 + group,
                    oldest_policy_version=0,
                )
            )
    return Batch(round=0, samples=samples, num_rollouts=num_groups * group_size)
