"""The Verifier port: a finished rollout in, a Score out; and the one way in which the loop asks for scores.

Owns: the Protocol that every verifier implements, `score_rollouts`, and the check that turns whatever a reward
function answered into a Score or a clear error.

    rollouts -> judge, one after the other -> Score      (a plain function: no task, no await)
                                           -> awaitable  (a service, a child process: all wait together)

Promises (held by tests/contract/test_verifier_contract.py on every implementation):
- scores come back in the order of the rollouts;
- a reward that is missing, not a number or not finite, or a verifier that raises (`sys.exit` and a cancellation of its
  own included), is an error that names the rollout: never a reward of zero, never a run that ends without a word.

Does not do: choosing what a failed rollout is worth (it is never scored), aggregation, advantages.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Sequence
from numbers import Real
from typing import Protocol

from hotloop.errors import HotloopError, RunError
from hotloop.types import Rollout, Score

_MOST_SHOWN = 200
Judgement = Score | float | Awaitable[Score | float]


class Verifier(Protocol):
    """Judges rollouts."""

    @property
    def name(self) -> str:
        """What errors and metrics call it."""
        ...

    def judge(self, rollout: Rollout) -> Judgement:
        """Judge one rollout now, or return something to await."""
        ...

    async def close(self) -> None:
        """Give back connections and processes."""
        ...


async def score_rollouts(verifier: Verifier, rollouts: Sequence[Rollout]) -> list[Score]:
    """Score rollouts, in their order.

    Raises:
        RunError: code `reward_invalid` or `reward_raised`, naming the rollout; errors of the verifier's own (such as
            `reward_unreachable`) pass unchanged.
    """
    scores: list[Score | None] = [None] * len(rollouts)
    waiting: list[tuple[int, Awaitable[Score | float]]] = []
    try:
        for position, rollout in enumerate(rollouts):
            judgement = _judge(verifier, rollout)
            if type(judgement) is Score and type(judgement.reward) is float and math.isfinite(judgement.reward):
                scores[position] = judgement
            elif inspect.isawaitable(judgement):
                waiting.append((position, judgement))
            else:
                scores[position] = check_score(judgement, verifier.name, rollout)
    except BaseException:
        for _, judgement in waiting:
            if inspect.iscoroutine(judgement):
                judgement.close()  # never started; closing it says that this is on purpose
        raise
    if waiting:
        tasks = [asyncio.ensure_future(_finish(verifier, rollouts[place], judgement)) for place, judgement in waiting]
        try:
            for (position, _), score in zip(waiting, await asyncio.gather(*tasks), strict=True):
                scores[position] = score
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return [score for score in scores if score is not None]


def check_score(value: object, verifier_name: str, rollout: Rollout) -> Score:
    """Accept a Score or a finite number.

    Raises:
        RunError: code `reward_invalid`, naming the rollout and what came back.
    """
    try:
        score = Score(float(value)) if isinstance(value, Real) else value
        if isinstance(score, Score) and isinstance(score.reward, Real) and math.isfinite(score.reward):
            return score
        shown = repr(score.reward if isinstance(score, Score) else value)
    except (OverflowError, ValueError):  # a whole number beyond every float, perhaps too long to be written out
        shown = "a number too large for a float"
    raise RunError(
        "reward_invalid",
        f"the reward is {cut_text(shown)}, and a reward is one finite number (or a Score)",
        where=describe(verifier_name, rollout),
        do="Return a float for every response; 0.0 for a wrong one.",
        details={"rollout_id": rollout.rollout_id, "task_id": rollout.task.task_id},
    )


def describe(verifier_name: str, rollout: Rollout) -> str:
    """Name a rollout for an error: verifier, task, rollout and the start of its response."""
    start = rollout.response if len(rollout.response) <= 60 else rollout.response[:57] + "..."
    return f"reward {verifier_name}, task {rollout.task.task_id}, rollout {rollout.rollout_id} (response {start!r})"


def cut_text(text: str) -> str:
    """Make one line of at most 200 characters of something that came from outside, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 3] + "..."


def _judge(verifier: Verifier, rollout: Rollout) -> Judgement:
    try:
        return verifier.judge(rollout)
    except HotloopError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # a plain call: nobody else can cancel it
        raise _raised(verifier.name, rollout, error) from error


async def _finish(verifier: Verifier, rollout: Rollout, judgement: Awaitable[Score | float]) -> Score:
    try:
        value = await judgement
    except HotloopError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the run is being stopped
        raise _raised(verifier.name, rollout, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(verifier.name, rollout, error) from error
    return check_score(value, verifier.name, rollout)


def _raised(name: str, rollout: Rollout, error: BaseException) -> RunError:
    return RunError(
        "reward_raised",
        f"it raised {type(error).__name__}: {cut_text(str(error))}",
        where=describe(name, rollout),
        do="Make the reward function answer 0.0 for a response it cannot read, or fix the error.",
        details={"rollout_id": rollout.rollout_id, "task_id": rollout.task.task_id},
    )
