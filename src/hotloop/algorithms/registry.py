"""The list of algorithms: what each name means, where its code is, and where its formula comes from.

Owns: one entry per estimator, loss, divergence, correction, aggregation, filter. `docs/papers.md` has one row per
entry (test), and the choices of the experiment file name only entries of this list.

Promises: importing it imports no torch; `Entry.resolve` imports the function when called.
Does not do: building anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Area = Literal["advantage", "loss", "kl", "correction", "aggregation", "filter"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One algorithm."""

    area: Area
    name: str
    function: str
    """Dotted path `module:function`."""
    source: str
    """Authors or project, year, and where to read it."""

    def resolve(self) -> Callable[..., Any]:
        """Import the function."""
        module, name = self.function.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


_ADVANTAGES = "hotloop.algorithms.advantages"
_LOSSES = "hotloop.algorithms.losses"
_KL = "hotloop.algorithms.kl:compute_kl"
_CORRECTIONS = "hotloop.algorithms.corrections:compute_correction"
_AGGREGATION = "hotloop.algorithms.aggregation:compute_sample_weights"
_SCHULMAN_KL = "Schulman 2020, Approximating KL Divergence"

ENTRIES: tuple[Entry, ...] = (
    Entry("advantage", "grpo", f"{_ADVANTAGES}:compute_group_advantages", "Shao et al. 2024, arXiv:2402.03300, 4.1.2"),
    Entry("advantage", "dr_grpo", f"{_ADVANTAGES}:compute_group_advantages", "Liu et al. 2025, arXiv:2503.20783"),
    Entry(
        "advantage", "reinforce_plus_plus", f"{_ADVANTAGES}:compute_reinforce_plus_plus", "Hu 2025, arXiv:2501.03262"
    ),
    Entry(
        "advantage",
        "reinforce_plus_plus_baseline",
        f"{_ADVANTAGES}:compute_reinforce_plus_plus_baseline",
        "Hu 2025, arXiv:2501.03262",
    ),
    Entry("advantage", "gae", f"{_ADVANTAGES}:compute_gae", "Schulman et al. 2015, arXiv:1506.02438, eq. 11, 16"),
    Entry("advantage", "whitening", f"{_ADVANTAGES}:whiten_advantages", "Ziegler et al. 2019, arXiv:1909.08593"),
    Entry("loss", "grpo", f"{_LOSSES}:compute_policy_loss", "Schulman et al. 2017, arXiv:1707.06347, eq. 7"),
    Entry("loss", "clip_higher", f"{_LOSSES}:compute_policy_loss", "Yu et al. 2025, arXiv:2503.14476, eq. 10"),
    Entry("loss", "dual_clip", f"{_LOSSES}:compute_policy_loss", "Ye et al. 2020, arXiv:1912.09729, eq. 5"),
    Entry("loss", "gspo", f"{_LOSSES}:compute_policy_loss", "Zheng et al. 2025, arXiv:2507.18071, eq. 5-7"),
    Entry("loss", "cispo", f"{_LOSSES}:compute_policy_loss", "MiniMax 2025, arXiv:2506.13585, eq. 4-5"),
    Entry("loss", "value_clip", f"{_LOSSES}:compute_value_loss", "OpenAI baselines 2017, ppo2; slime 624b824a"),
    Entry("kl", "k1", _KL, _SCHULMAN_KL),
    Entry("kl", "k2", _KL, _SCHULMAN_KL),
    Entry("kl", "k3", _KL, _SCHULMAN_KL),
    Entry("kl", "low_var_kl", _KL, f"{_SCHULMAN_KL}; clamp of slime 624b824a"),
    Entry("correction", "none", _CORRECTIONS, "weight 1"),
    Entry(
        "correction",
        "tis",
        _CORRECTIONS,
        "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    ),
    Entry("correction", "icepop", _CORRECTIONS, "Ling Team 2025, arXiv:2510.18855"),
    Entry("aggregation", "per_sample", _AGGREGATION, "Shao et al. 2024, arXiv:2402.03300, eq. 3; slime 624b824a"),
    Entry("aggregation", "per_token", _AGGREGATION, "Yu et al. 2025, arXiv:2503.14476, section 3.3; slime 624b824a"),
    Entry(
        "filter",
        "zero_std",
        "hotloop.algorithms.filters:decide_zero_std",
        "Yu et al. 2025, arXiv:2503.14476, eq. 11; slime 624b824a",
    ),
)


def find_entries(area: Area) -> tuple[Entry, ...]:
    """Return the entries of one area, in the order of the list."""
    return tuple(entry for entry in ENTRIES if entry.area == area)
