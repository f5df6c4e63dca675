"""One made-up prompt, eight answers: the numbers of "Understand an RL run".

Owns: `answer_understand`, the starting point that it offers, and the rewards of the example.

Promises: mean, standard deviation and advantages come from the trainer's own advantage function, not from this file, so
what the page explains is what a run computes. The example is not measured and says so.
"""

from __future__ import annotations

import statistics
from typing import Any

from hotloop.algorithms.advantages import STD_EPSILON, compute_group_advantages

REWARDS = (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
ANSWERS = ("so x = 12", "thus 12", "x = 12", "the answer is 12", "x = 14", "we get 10", "x = 12.5", "no solution")
PROMPT = "3x + 5 = 41. What is x?"
LABEL = "12"

STARTING_POINT: dict[str, Any] = {
    "correction": "tis",
    "sc": False,
    "algorithm": {"kind": "grpo"},
    "sampling.num_groups": 8,
    "sampling.group_size": 8,
    "sampling.temperature": 1.0,
}
"""GRPO as the example shows it: eight answers a prompt, the group's mean as baseline, TIS for the mismatch."""


def answer_understand() -> dict[str, Any]:
    """Give the example with its numbers."""
    groups = [0] * len(REWARDS)
    return {
        "prompt": PROMPT,
        "label": LABEL,
        "answers": list(ANSWERS),
        "rewards": list(REWARDS),
        "mean": statistics.fmean(REWARDS),
        "std": statistics.stdev(REWARDS),
        "epsilon": STD_EPSILON,
        "advantages": compute_group_advantages(REWARDS, groups).tolist(),
        "advantages_without_epsilon": compute_group_advantages(REWARDS, groups, epsilon=0.0).tolist(),
        "starting_point": STARTING_POINT,
    }
