"""Built-in tasks: the item sets are fixed, disjoint and right."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError
from hotloop.loop.tasks import evaluate_expression, judge_countdown, load_task_set
from hotloop.models.tokenizer import CHARACTERS
from hotloop.types import Task


def test_sort5_has_the_published_sizes() -> None:
    task_set = load_task_set("sort5")
    assert (len(task_set.train), len(task_set.gate), len(task_set.held_out)) == (17_105, 512, 512)


def test_sort5_draws_what_the_flat_reference_draws() -> None:
    import random

    draw = random.Random(7)
    items = sorted({tuple(draw.randint(0, 9) for _ in range(5)) for _ in range(20000)})
    random.Random(1234).shuffle(items)
    task_set = load_task_set("sort5")
    assert [task.prompt for task in task_set.held_out] == [f"s{''.join(map(str, x))}=" for x in items[:512]]
    assert [task.label for task in task_set.train] == ["".join(map(str, sorted(x))) for x in items[1024:]]


@pytest.mark.parametrize("name", ["sort5", "sort8", "addition", "countdown"])
def test_the_three_sets_share_no_prompt_and_use_known_characters(name: str) -> None:
    task_set = load_task_set(name)
    sets = [{task.prompt for task in items} for items in (task_set.train, task_set.gate, task_set.held_out)]
    assert sum(len(prompts) for prompts in sets) == len(set().union(*sets))
    assert len(sets[0]) >= 1000
    for task in task_set.train:
        assert set(f"{task.prompt}{task.label}") <= set(CHARACTERS)
        assert task.label is not None and len(task.label) + 1 <= task_set.max_new_tokens


def test_addition_labels_are_sums() -> None:
    for task in load_task_set("addition").held_out:
        left, right = str(task.prompt).rstrip("=").split("+")
        assert int(task.label or "") == int(left) + int(right)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3*7+2", 23), ("2+3*7", 23), ("9-2*4", 1), ("8-3-2", 3), ("7", 7), ("3*", None), ("", None), ("1+__", None)],
)
def test_expressions_follow_the_usual_precedence(text: str, value: int | None) -> None:
    assert evaluate_expression(text) == value


def test_every_countdown_label_satisfies_its_judge() -> None:
    for task in load_task_set("countdown").held_out:
        assert judge_countdown(task, task.label or "").reward == 1.0


@pytest.mark.parametrize(
    ("response", "reward", "reason"),
    [
        ("2+3*7", 1.0, "reaches the target"),
        ("3*7+1", 0.0, "uses other digits than 372"),
        ("3+7+2", 0.0, "gives 12, not 23"),
        ("3*7+", 0.0, "not an expression of digits and + - *"),
    ],
)
def test_countdown_says_why_an_answer_is_wrong(response: str, reward: float, reason: str) -> None:
    score = judge_countdown(Task("t", "c372:23=", "3*7+2"), response)
    assert (score.reward, score.reason) == (reward, reason)


@pytest.mark.parametrize("name", ["sort3", "sort99", "sudoku", "sort"])
def test_an_unknown_task_names_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match=r"unknown_task.*addition or countdown"):
        load_task_set(name)
