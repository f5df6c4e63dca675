"""Exact match: 1 if the response equals the label after trimming white space, else 0."""

from __future__ import annotations

from hotloop.errors import RunError
from hotloop.types import Rollout, Score
from hotloop.verifiers.base import describe

_RIGHT = Score(1.0, "equal")
_WRONG = Score(0.0, "differs")


class ExactVerifier:
    """Compares text with text."""

    name = "exact"

    def judge(self, rollout: Rollout) -> Score:
        """Compare the response with the label.

        Raises:
            RunError: code `label_missing`.
        """
        return _RIGHT if rollout.response.strip() == require_label(self.name, rollout).strip() else _WRONG

    async def close(self) -> None:
        """Nothing to give back."""


def require_label(verifier_name: str, rollout: Rollout) -> str:
    """Return the label of a rollout's task.

    Raises:
        RunError: code `label_missing`.
    """
    label = rollout.task.label
    if label is None:
        raise RunError(
            "label_missing",
            "the task has no label to compare the response with",
            where=describe(verifier_name, rollout),
            do="Give every row a label, or choose a reward that needs none.",
        )
    return label
