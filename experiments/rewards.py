"""A verifier of one's own, as docs/guides/verifier.md describes it."""

from __future__ import annotations

from hotloop.types import Score, Task


def right_places(task: Task, response: str) -> Score:
    """Share of the label's places that the response has right; a partial answer is worth something."""
    label = task.label or ""
    right = sum(a == b for a, b in zip(label, response, strict=False))
    return Score(right / max(len(label), len(response), 1), f"{right} of {len(label)} places")
