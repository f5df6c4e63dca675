r"""Mathematical equality: `math` compares the answer in a response, `deepscaler` the boxed answer after the thinking.

Owns: both verifiers. Equality is that of the package math-verify, which parses both sides with sympy.

Promises: an answer that cannot be read scores 0 with the reason; a label that cannot be read is compared as text.
Does not do: partial credit.

deepscaler (slime's `rm_type`): text after the last think-end tag, else after the `###Response` marker, else 0; then
the last boxed answer; an empty label scores 0. A chat template that produces neither marker makes every reward 0:
sanity.py looks for that.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from hotloop.errors import MissingExtra
from hotloop.types import Rollout, Score
from hotloop.verifiers.boxed import extract_after_thinking, extract_boxed
from hotloop.verifiers.exact import require_label

PARSE_TIMEOUT_S = 5
"""math-verify interrupts itself by a signal, which only the main thread can receive; elsewhere there is no limit."""


CACHED_PAIRS = 4096
"""Answers and labels remembered: a comparison takes milliseconds, and the answers of a group repeat."""


class MathVerifier:
    """Scores 1 if the response's answer equals the label."""

    name = "math"

    def __init__(self) -> None:
        self._equals = _Equality()

    def judge(self, rollout: Rollout) -> Score:
        """Compare answer and label.

        Raises:
            RunError: code `label_missing`.
        """
        label = require_label(self.name, rollout)
        boxed = extract_boxed(rollout.response)
        answer = rollout.response if boxed is None else f"\\boxed{{{boxed}}}"
        return self._equals.score(answer, label)

    async def close(self) -> None:
        """Nothing to give back."""


class DeepscalerVerifier:
    """Scores 1 if the boxed answer after the thinking equals the label."""

    name = "deepscaler"

    def __init__(self) -> None:
        self._equals = _Equality()

    def judge(self, rollout: Rollout) -> Score:
        """Compare the boxed answer with the label; no marker, no box or an empty label score 0."""
        label = rollout.task.label or ""
        if not label.strip():
            return Score(0.0, "empty label")
        answer = extract_after_thinking(rollout.response)
        if answer is None:
            return Score(0.0, "no think-end tag and no response marker")
        boxed = extract_boxed(answer)
        if boxed is None:
            return Score(0.0, "no boxed answer")
        return self._equals.score(f"\\boxed{{{boxed}}}", label)

    async def close(self) -> None:
        """Nothing to give back."""


class _Equality:
    """Mathematical equality of an answer in text and a label."""

    def __init__(self) -> None:
        try:
            from math_verify import parse, verify
        except ImportError as error:
            raise MissingExtra("the math reward", "math-verify", "torch") from error
        self._parse, self._verify = parse, verify
        self._compare = lru_cache(maxsize=CACHED_PAIRS)(self._compare_once)

    def score(self, answer: str, label: str) -> Score:
        """Score 1 if equal."""
        boxed_label = extract_boxed(label)
        wanted = label.strip() if boxed_label is None else boxed_label
        boxed_answer = extract_boxed(answer)
        if boxed_answer is not None and boxed_answer == wanted:
            return Score(1.0, "equal")
        return self._compare(answer, wanted)

    def _compare_once(self, answer: str, wanted: str) -> Score:
        timeout = PARSE_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
        limits: dict[str, Any] = {"parsing_timeout": timeout}
        gold = self._parse(wanted if "$" in wanted else f"${wanted}$", **limits)
        found = self._parse(answer, **limits)
        if not found:
            return Score(0.0, "no answer found")
        if not gold:
            return Score(0.0, "differs")
        equal = self._verify(gold, found, timeout_seconds=timeout)
        return Score(1.0, "equal") if equal else Score(0.0, "differs")
