"""How old a rollout is, in policy versions, and what a bound on it admits. Pure functions.

Owns: age, and the rule for a batch. In a synchronous run every age is 0, so any bound holds.

Promises: with a bound s no sample of a batch is older than s when the rule is applied at batch time.
Does not do: admission to a server that samples while training goes on.
"""

from __future__ import annotations

from hotloop.types import Completion


def find_oldest_version(completion: Completion) -> int | None:
    """Return the oldest policy version that produced a token; None for an empty answer."""
    spans = completion.version_spans
    if len(spans) == 1:  # nearly every answer; a round asks this of each of its rollouts
        return spans[0].policy_version
    return min((span.policy_version for span in spans), default=None)


def compute_age(oldest_version: int, trainer_version: int) -> int:
    """Compute staleness in versions: the trainer's version now minus the oldest version of any token."""
    return trainer_version - oldest_version


def is_too_old(age: int, max_staleness: int | None) -> bool:
    """Tell whether a rollout of this age must not be trained on."""
    return max_staleness is not None and age > max_staleness
