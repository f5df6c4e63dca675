"""Format: 1 if the whole response matches a regular expression, else 0."""

from __future__ import annotations

import re

from hotloop.errors import InputError
from hotloop.types import Rollout, Score

_RIGHT = Score(1.0, "matches")
_WRONG = Score(0.0, "does not match")


class FormatVerifier:
    """Matches the whole response; a dot matches a line break too."""

    name = "format"

    def __init__(self, pattern: str) -> None:
        """Compile the pattern.

        Raises:
            InputError: code `reward_pattern`.
        """
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise InputError(
                "reward_pattern",
                f"not a regular expression: {error}",
                where=f"reward.pattern = {pattern!r}",
                do="Write it in the syntax of Python's re module.",
            ) from error

    def judge(self, rollout: Rollout) -> Score:
        """Match the response."""
        return _RIGHT if self._pattern.fullmatch(rollout.response) else _WRONG

    async def close(self) -> None:
        """Nothing to give back."""
