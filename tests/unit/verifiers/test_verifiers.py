"""Each verifier's judgement, on answers whose reward is known."""

from __future__ import annotations

import asyncio
import time

import pytest
from verifier_samples import rollout_of

from hotloop.errors import InputError, RunError
from hotloop.types import Score
from hotloop.verifiers.base import score_rollouts
from hotloop.verifiers.boxed import extract_after_thinking, extract_boxed
from hotloop.verifiers.program import Limits, ProgramVerifier, extract_program, run_program
from hotloop.verifiers.registry import KINDS, build_verifier, open_verifier


@pytest.mark.parametrize(
    ("response", "reward"), [("42", 1.0), (" 42\n", 1.0), ("42.0", 0.0), ("", 0.0), ("the answer is 42", 0.0)]
)
def test_exact_trims_and_compares(response: str, reward: float) -> None:
    assert build_verifier("exact").judge(rollout_of(response)).reward == reward


def test_exact_without_a_label_is_an_error_that_names_the_task() -> None:
    with pytest.raises(RunError, match=r"t7.*label_missing"):
        build_verifier("exact").judge(rollout_of("x", None, number=7))


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\fbox{7}", "7"),
        ("\\boxed {7}", "7"),
        ("\\boxed{1", None),
        ("none", None),
        ("\\boxed and later {7}", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, boxed: str | None) -> None:
    assert extract_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a</think>b</think>c", "c"),
        ("x ###Response y", " y"),
        ("###Response a</think>b", "b"),
        ("plain", None),
    ],
)
def test_the_answer_follows_the_thinking(text: str, answer: str | None) -> None:
    assert extract_after_thinking(text) == answer


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("so it is \\boxed{1/2}", "0.5", 1.0),
        ("\\boxed{\\frac{1}{2}}", "\\frac12", 1.0),
        ("\\boxed{x^2+1}", "1+x^2", 1.0),
        ("x = 42", "42", 1.0),
        ("\\boxed{41}", "42", 0.0),
        ("no idea", "7", 0.0),
        ("\\boxed{7}", "\\boxed{7}", 1.0),
        ("\\boxed{\\text{north}}", "\\text{north}", 1.0),
    ],
)
def test_math_compares_values_and_not_spelling(response: str, label: str, reward: float) -> None:
    assert build_verifier("math").judge(rollout_of(response, label)).reward == reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("hm</think>\\boxed{42}", "42", 1.0),
        ("###Response \\boxed{42}", "42", 1.0),
        ("\\boxed{42}", "42", 0.0),
        ("\\boxed{42}</think> I forgot the box: 42", "42", 0.0),
        ("</think>\\boxed{41}", "42", 0.0),
        ("</think>\\boxed{42}", "", 0.0),
        ("</think>\\boxed{84/2}", "\\boxed{42}", 1.0),
    ],
)
def test_deepscaler_wants_a_marker_and_a_box(response: str, label: str, reward: float) -> None:
    assert build_verifier("deepscaler").judge(rollout_of(response, label)).reward == reward


@pytest.mark.parametrize(("response", "reward"), [("<a>x\ny</a>", 1.0), ("<a>x</a> more", 0.0)])
def test_format_matches_the_whole_response(response: str, reward: float) -> None:
    assert build_verifier("format", pattern="<a>.*</a>").judge(rollout_of(response)).reward == reward


def test_a_pattern_that_is_no_regular_expression_is_an_input_error() -> None:
    with pytest.raises(InputError, match="reward_pattern"):
        build_verifier("format", pattern="(")


def run(program: str, tests: str, **limits: float) -> Score:
    return asyncio.run(run_program(program, tests, Limits(**limits)))  # type: ignore[arg-type]


def test_a_program_that_passes_its_tests_scores_one() -> None:
    assert run("def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3").reward == 1.0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x): return x", "AssertionError"),
        ("def f(x: return", "SyntaxError"),
        ("import sys; sys.exit(0)", "ended before the last test (exit code 0)"),
        ("import os; os._exit(0)", "ended before the last test (exit code 0)"),
        ("raise ValueError('no')", "ValueError: no"),
    ],
)
def test_a_program_that_fails_or_leaves_early_scores_zero(program: str, reason: str) -> None:
    score = run(program, "assert f(1) == 2")
    assert score.reward == 0.0
    assert reason in score.reason


def test_a_program_that_hangs_is_killed() -> None:
    score = run("import time\ntime.sleep(60)", "", wall_s=0.5)
    assert score.reward == 0.0
    assert "still running" in score.reason


def test_a_program_that_takes_too_much_memory_fails() -> None:
    score = run("x = bytearray(1 << 30)", "", memory_bytes=1 << 28)
    assert "MemoryError" in score.reason


def test_a_program_that_prints_without_end_is_stopped() -> None:
    score = run("while True: print('x' * 1000)", "", output_bytes=10_000)
    assert score.reason == "printed more than 10000 bytes"


def test_a_program_that_prints_faster_than_we_read_is_stopped() -> None:
    """The pipe is full at every look, so asyncio has stopped reading it when the child is killed."""

    async def hold_the_loop() -> None:
        while True:
            time.sleep(0.003)
            await asyncio.sleep(0)

    async def score() -> Score:
        busy = asyncio.create_task(hold_the_loop())
        try:
            program = "while True: print('x' * 1000)"
            return await asyncio.wait_for(run_program(program, "", Limits(output_bytes=10_000)), 60)
        finally:
            busy.cancel()

    assert asyncio.run(score()).reason == "printed more than 10000 bytes"


def test_printing_a_line_of_success_is_not_a_pass() -> None:
    assert run("print('all tests passed'); raise SystemExit", "assert False").reward == 0.0


def test_the_program_is_the_last_fenced_block() -> None:
    assert extract_program("```python\na = 1\n```\ntext\n```py\nb = 2\n```") == "b = 2\n"
    assert extract_program("c = 3") == "c = 3"


def test_children_run_in_a_bounded_number_of_processes() -> None:
    async def score() -> list[Score]:
        verifier = ProgramVerifier(max_processes=2)
        response = "```python\ndef f(): return 1\n```"
        return await score_rollouts(verifier, [rollout_of(response, "assert f() == 1", number=n) for n in range(5)])

    assert [score.reward for score in asyncio.run(score())] == [1.0] * 5


def test_every_kind_of_the_experiment_file_has_a_verifier() -> None:
    from typing import get_args

    from hotloop.experiment.sections import FormatReward, Reward

    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Reward)[0])}
    assert kinds <= set(KINDS)
    assert open_verifier(FormatReward(pattern="a")).judge(rollout_of("a")).reward == 1.0


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"reward_kind.*exact"):
        build_verifier("bleu")
