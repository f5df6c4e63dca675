"""Dotted paths: what is found, and what an error names when it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from verifier_samples import rollout_of

from hotloop.errors import InputError, RunError
from hotloop.types import Score
from hotloop.verifiers.base import score_rollouts
from hotloop.verifiers.python import PythonVerifier, resolve_function


def score(function: str, *responses: str) -> list[Score]:
    verifier = PythonVerifier(f"verifier_samples.{function}")
    return asyncio.run(score_rollouts(verifier, [rollout_of(text, number=n) for n, text in enumerate(responses)]))


def test_a_plain_function_and_an_async_one_score_in_order() -> None:
    assert [s.reward for s in score("length_reward", "a", "bbb")] == [1.0, 3.0]
    assert [s.reward for s in score("slow_length_reward", "a", "bbb")] == [1.0, 3.0]
    assert score("slow_length_reward", "ab")[0].parts == {"chars": 2.0}


@pytest.mark.parametrize(
    ("function", "shown"), [("no_reward", "None"), ("nan_reward", "nan"), ("dict_reward", "{'score': 1.0}")]
)
def test_a_reward_that_is_no_number_names_the_rollout_and_the_value(function: str, shown: str) -> None:
    with pytest.raises(RunError) as caught:
        score(function, "hello")
    assert caught.value.code == "reward_invalid"
    assert shown in str(caught.value)
    assert "task t0, rollout 0 (response 'hello')" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "shown"), [("broken_reward", "ZeroDivisionError"), ("broken_async_reward", "KeyError")]
)
def test_a_reward_that_raises_names_the_rollout_and_the_exception(function: str, shown: str) -> None:
    with pytest.raises(RunError) as caught:
        score(function, "hello", "again")
    assert caught.value.code == "reward_raised"
    assert shown in str(caught.value)
    assert caught.value.details == {"rollout_id": 0, "task_id": "t0"}


@pytest.mark.parametrize(
    ("dotted", "words"),
    [
        ("length_reward", "a dotted path has a module and a function"),
        ("no_such_module.f", "there is no module 'no_such_module'"),
        ("hotloop.no_such.f", "there is no module 'hotloop.no_such'"),
        ("verifier_samples.length_rewards", "Did you mean verifier_samples.length_reward?"),
        ("verifier_samples.zzz", "it has Any, Completion, Rollout"),
        ("verifier_samples.NOT_A_FUNCTION", "it is a int, which cannot be called"),
    ],
)
def test_a_path_that_leads_nowhere_names_what_exists(dotted: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_function(dotted, where="reward.function")
    assert caught.value.code == "function_not_found"
    assert words in str(caught.value)


def test_a_colon_before_the_function_is_understood() -> None:
    assert resolve_function("verifier_samples:length_reward", where="x").__name__ == "length_reward"


def test_a_function_that_takes_something_else_is_refused_before_anything_is_sampled() -> None:
    with pytest.raises(InputError, match=r"\(task, response\).*\(task: .*function_signature"):
        PythonVerifier("verifier_samples.one_argument")


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_here.py").write_text("def f(task, response):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    assert PythonVerifier("my_reward_here.f").judge(rollout_of("x")) == 0.25


def test_a_module_whose_import_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_absent.py").write_text("import package_that_is_absent\n")
    (tmp_path / "raises_early.py").write_text("raise RuntimeError('no key')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    with pytest.raises(InputError, match="needs 'package_that_is_absent', which is not installed"):
        resolve_function("needs_absent.f", where="x")
    with pytest.raises(InputError, match="raised RuntimeError: no key"):
        resolve_function("raises_early.f", where="x")
