"""The reward sanity check: each finding, and silence when all is well."""

from __future__ import annotations

import asyncio

import pytest
from verifier_samples import rollout_of

from hotloop.types import Task
from hotloop.verifiers.registry import build_verifier
from hotloop.verifiers.sanity import SanityFinding, check_hooks, check_references, check_rollouts, wrap_answer

TASKS = [Task(f"t{n}", f"1 + {n}?", str(n + 1)) for n in range(4)]
THINKING_TEMPLATE = "{{ '<think>' }} ... {{ '</think>' }}"


def check(kind: str, template: str = "", tasks: list[Task] | None = None, **settings: str) -> list[SanityFinding]:
    verifier = build_verifier(kind, **settings)
    return asyncio.run(check_references(verifier, kind, TASKS if tasks is None else tasks, chat_template=template))


@pytest.mark.parametrize("kind", ["exact", "math"])
def test_a_reward_that_fits_its_labels_has_no_finding(kind: str) -> None:
    assert check(kind) == []


def test_deepscaler_never_pays_a_policy_without_thinking_or_marker() -> None:
    [finding] = check("deepscaler", "{{ messages }}")
    assert (finding.code, finding.level) == ("reward_never_positive", "error")
    assert "all 4 correct boxed answers score 0" in finding.why


@pytest.mark.parametrize("template", [THINKING_TEMPLATE, "### ###Response"])
def test_deepscaler_pays_a_policy_whose_template_has_a_marker(template: str) -> None:
    assert check("deepscaler", template) == []


def test_a_label_that_its_own_reward_rejects_is_an_error() -> None:
    [finding] = check("python", function="verifier_samples.length_reward", tasks=[Task("a", "p", "xy")])[:1]
    assert (finding.code, finding.level) == ("reward_rejects_reference", "note")
    assert "'xy'" in finding.where


def test_a_reward_that_pays_everything_is_found() -> None:
    codes = [f.code for f in check("python", function="verifier_samples.length_reward", tasks=[Task("a", "p", "x")])]
    assert codes == ["reward_accepts_wrong"]


def test_labels_that_math_cannot_tell_from_a_wrong_answer_are_an_error() -> None:
    findings = check("math", tasks=[Task("a", "p", "not the answer")])
    assert [(f.code, f.level) for f in findings] == [("reward_accepts_wrong", "error")]


@pytest.mark.parametrize("function", ["no_reward", "nan_reward", "dict_reward"])
def test_a_reward_that_is_no_number_is_an_error_naming_the_sample(function: str) -> None:
    [finding] = check("python", function=f"verifier_samples.{function}")
    assert (finding.code, finding.level) == ("reward_invalid", "error")
    assert "task t0" in finding.where


def test_equal_rewards_over_eight_prompts_are_a_note() -> None:
    rollouts = [rollout_of("wrong", number=n) for n in range(8)]
    [finding] = asyncio.run(check_rollouts(build_verifier("exact"), rollouts))
    assert (finding.code, finding.level) == ("zero_variance", "note")


def test_equal_rewards_over_fewer_prompts_say_nothing() -> None:
    assert asyncio.run(check_rollouts(build_verifier("exact"), [rollout_of("wrong", number=n) for n in range(7)])) == []


def test_differing_rewards_say_nothing() -> None:
    rollouts = [rollout_of("42" if n == 3 else "no", number=n) for n in range(9)]
    assert asyncio.run(check_rollouts(build_verifier("exact"), rollouts)) == []


def test_hooks_are_imported_and_bound_before_the_run() -> None:
    hooks = {
        "good": "verifier_samples.length_reward",
        "absent": "verifier_samples.nothing",
        "other": "verifier_samples.one_argument",
    }
    findings = check_hooks(hooks, dict.fromkeys(hooks, ("task", "response")))
    assert [(f.code, f.where.split(" ")[0]) for f in findings] == [
        ("function_not_found", "absent"),
        ("function_signature", "other"),
    ]


def test_references_are_wrapped_as_the_template_would() -> None:
    assert wrap_answer("7", "exact", THINKING_TEMPLATE) == "7"
    assert wrap_answer("7", "math", "") == "The answer is \\boxed{7}."
    assert wrap_answer("7", "deepscaler", THINKING_TEMPLATE).endswith("</think>\n\nThe answer is \\boxed{7}.")
