"""What every verifier promises, run on each of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from hotloop.errors import HotloopError, RunError
from hotloop.types import Completion, Rollout, Score, Task
from hotloop.verifiers.base import Verifier, score_rollouts
from hotloop.verifiers.registry import KINDS, build_verifier


@dataclass(frozen=True)
class Case:
    """A verifier, and a task with a right and a wrong response."""

    kind: str
    right: str
    wrong: str
    label: str = "42"


CASES = [
    Case("exact", "42", "41"),
    Case("math", "\\boxed{84/2}", "\\boxed{41}"),
    Case("deepscaler", "hm</think>\\boxed{42}", "\\boxed{42}"),
    Case("format", "<a>1</a>", "1"),
    Case("python", "42", "41"),
    Case("remote", "42", "41"),
    Case("program", "```python\nx = 42\n```", "x = 41", "assert x == 42"),
]


def judge_by_label(task: Task, response: str) -> float:
    return float(response == task.label)


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Verifier]:
    settings: dict[str, str] = {}
    runner: web.AppRunner | None = None
    if kind == "format":
        settings = {"pattern": "<a>.*</a>"}
    elif kind == "python":
        settings = {"function": f"{__name__}.judge_by_label"}
    elif kind == "remote":

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            return web.json_response({"reward": float(body["response"] == body["label"])})

        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/"}
    verifier = build_verifier(kind, **settings)
    try:
        yield verifier
    finally:
        await verifier.close()
        if runner is not None:
            await runner.cleanup()


def rollouts_of(case: Case, *responses: str) -> list[Rollout]:
    return [
        Rollout(n, n, 0, Task(f"t{n}", "p", case.label), [1], Completion([], [], [], [], "stop"), text, "completed")
        for n, text in enumerate(responses)
    ]


def score(case: Case, *responses: str) -> list[Score]:
    async def run() -> list[Score]:
        async with opened(case.kind) as verifier:
            return await score_rollouts(verifier, rollouts_of(case, *responses))

    return asyncio.run(run())


each = pytest.mark.parametrize("case", CASES, ids=[case.kind for case in CASES])


def test_every_kind_is_under_contract() -> None:
    assert {case.kind for case in CASES} == set(KINDS)


@each
def test_right_and_wrong_are_told_apart_in_the_order_of_the_rollouts(case: Case) -> None:
    scores = score(case, case.wrong, case.right, case.wrong, case.right, case.right)
    assert [s.reward for s in scores] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert all(type(s.reward) is float for s in scores)


@each
def test_no_rollouts_give_no_scores(case: Case) -> None:
    assert score(case) == []


@each
@pytest.mark.parametrize("response", ["", "\x00", "}{" * 50, "\\boxed{" * 20, "é世界" * 10])
def test_no_response_breaks_a_verifier(case: Case, response: str) -> None:
    assert score(case, response)[0].reward == 0.0


@each
def test_judging_twice_gives_the_same_score(case: Case) -> None:
    first, second = score(case, case.right, case.right)
    assert first.reward == second.reward == 1.0


@each
def test_closing_twice_is_fine(case: Case) -> None:
    async def run() -> None:
        async with opened(case.kind) as verifier:
            await verifier.close()

    asyncio.run(run())


class Faulty:
    """A verifier of one's own that answers something else for the second rollout."""

    name = "faulty"

    def __init__(self, answer: Callable[[], object], *, is_async: bool) -> None:
        self._answer, self._is_async = answer, is_async
        self.finished = 0

    def judge(self, rollout: Rollout) -> object:
        if self._is_async:
            return self._later(rollout)
        return self._answer() if rollout.rollout_id == 1 else 1.0

    async def _later(self, rollout: Rollout) -> object:
        await asyncio.sleep(0)
        self.finished += 1
        return self._answer() if rollout.rollout_id == 1 else 1.0

    async def close(self) -> None:
        return None


def raise_value_error() -> object:
    raise ValueError("unreadable")


def raise_exit() -> object:
    sys.exit(0)


def raise_cancelled() -> object:
    raise asyncio.CancelledError


def raise_long_lines() -> object:
    raise ValueError("first\nsecond\n" + "x" * 5000)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda: None, "reward_invalid"),
        (lambda: float("nan"), "reward_invalid"),
        (lambda: float("inf"), "reward_invalid"),
        (lambda: "1", "reward_invalid"),
        (lambda: {"score": 1}, "reward_invalid"),
        (lambda: Score(None), "reward_invalid"),  # type: ignore[arg-type]  # what an untyped function may build
        (lambda: 10**400, "reward_invalid"),
        (lambda: 10**5000, "reward_invalid"),
        (lambda: Score(10**400), "reward_invalid"),
        (lambda: "x" * 2_000_000, "reward_invalid"),
        (raise_value_error, "reward_raised"),
        (raise_exit, "reward_raised"),
        (raise_cancelled, "reward_raised"),
        (raise_long_lines, "reward_raised"),
    ],
)
def test_a_missing_reward_is_an_error_that_names_its_rollout(
    answer: Callable[[], object], code: str, is_async: bool
) -> None:
    verifier = Faulty(answer, is_async=is_async)
    with pytest.raises(RunError) as caught:
        asyncio.run(score_rollouts(verifier, rollouts_of(CASES[0], "a", "b", "c")))  # type: ignore[arg-type]
    assert caught.value.code == code
    assert caught.value.details["rollout_id"] == 1
    assert "faulty, task t1, rollout 1 (response 'b')" in str(caught.value)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_stopping_a_run_while_rewards_are_awaited_is_not_an_error_of_the_reward() -> None:
    class Waiting(Faulty):
        async def _later(self, rollout: Rollout) -> object:
            await asyncio.Event().wait()
            raise AssertionError("never set")

    async def stop_it() -> None:
        verifier = Waiting(lambda: 1.0, is_async=True)
        task = asyncio.create_task(score_rollouts(verifier, rollouts_of(CASES[0], "a", "b")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stop_it())


def test_an_error_of_ours_passes_unchanged() -> None:
    def answer() -> object:
        raise HotloopError("label_missing", "no label")

    with pytest.raises(HotloopError, match="label_missing"):
        asyncio.run(score_rollouts(Faulty(answer, is_async=False), rollouts_of(CASES[0], "a", "b")))  # type: ignore[arg-type]


def test_integers_and_booleans_are_numbers() -> None:
    for answer in (True, 1):
        scores = asyncio.run(
            score_rollouts(Faulty(lambda answer=answer: answer, is_async=False), rollouts_of(CASES[0], "a", "b"))  # type: ignore[arg-type]
        )
        assert [s.reward for s in scores] == [1.0, 1.0]


def test_scoring_of_many_plain_rollouts_starts_no_task() -> None:
    async def run() -> int:
        before = len(asyncio.all_tasks())
        rollouts = rollouts_of(CASES[0], *["42"] * 50)
        coroutine = score_rollouts(build_verifier("exact"), rollouts)
        with pytest.raises(StopIteration) as finished:  # it never waits: the first step is the last
            coroutine.send(None)
        assert len(finished.value.value) == 50
        return len(asyncio.all_tasks()) - before

    assert asyncio.run(run()) == 0
