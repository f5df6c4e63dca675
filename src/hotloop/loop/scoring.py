"""Groups in, scores on their rollouts: the loop's side of the Verifier port.

Owns: `score_groups`, and `JudgeVerifier`, which lets a built-in task with several right answers judge its own.

Promises: a rollout that failed or was aborted is never scored, so it can never count as reward 0; all others are scored
in one call, so that verifiers that wait all wait together.
Does not do: holding verifiers to their contract (verifiers/base.py), group filters (collecting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotloop.loop.tasks import Judge
from hotloop.types import Group, Rollout, Score
from hotloop.verifiers.base import Verifier, score_rollouts


async def score_groups(groups: Sequence[Group], verifier: Verifier) -> None:
    """Set the score of every rollout that has an answer.

    Raises:
        RunError: whatever the verifier or its contract raises, naming the rollout.
    """
    rollouts = [
        rollout for group in groups for rollout in group.rollouts if rollout.status not in ("failed", "aborted")
    ]
    for rollout, score in zip(rollouts, await score_rollouts(verifier, rollouts), strict=True):
        rollout.score = score


@dataclass(frozen=True, slots=True)
class JudgeVerifier:
    """A built-in task's own judgement."""

    name: str
    judge_answer: Judge

    def judge(self, rollout: Rollout) -> Score:
        """Judge the response."""
        return self.judge_answer(rollout.task, rollout.response)

    async def close(self) -> None:
        """Nothing to give back."""
