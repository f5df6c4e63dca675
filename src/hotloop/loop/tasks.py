"""Built-in procedural tasks: sorting, addition, countdown. Fixed item sets: every run is judged on the same items.

Owns: `TaskSet` (train, gate and held-out items of one task, its longest answer, its judge) and `load_task_set`.

Promises: items do not depend on a run's seed; the three sets share no prompt string (they may share the same problem
written differently: 99% of sort5's held-out items have the digits of some training item in another order).
Everything a task writes is in the alphabet of the built-in character tokenizer.

Does not do: tokens (`<bos>` is the tokenizer's affair), drawing items for a round (source.py).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from hotloop.errors import InputError
from hotloop.types import Score, Task

SORT_DRAWS = 20_000
SORT_DRAW_SEED = 7
SHUFFLE_SEED = 1234
HELD_OUT_ITEMS = 512
GATE_ITEMS = 512
MIN_SORT_DIGITS, MAX_SORT_DIGITS = 4, 12
ADDITION_DIGITS = 2
COUNTDOWN_MAX_TARGET = 99

Item = TypeVar("Item")
Judge = Callable[[Task, str], Score]


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The items of one built-in task."""

    name: str
    train: tuple[Task, ...]
    gate: tuple[Task, ...]
    """Used only to decide when a policy's supervised warm-up is over."""
    held_out: tuple[Task, ...]
    max_new_tokens: int
    """Tokens of the longest right answer, end token included, for a tokenizer with one token per character."""
    judge: Judge | None = None
    """Set where more than one answer is right; empty: the answer must equal the label."""
    suggestion: str = ""
    """What to try after this task, as a command line."""


def load_task_set(name: str) -> TaskSet:
    """Return a built-in task by name: `sortN` with N digits, `addition` or `countdown`.

    Raises:
        InputError: code `unknown_task`.
    """
    match = re.fullmatch(r"sort(\d+)", name)
    if match and MIN_SORT_DIGITS <= int(match[1]) <= MAX_SORT_DIGITS:
        return _sorting(int(match[1]))
    if name == "addition":
        return _addition()
    if name == "countdown":
        return _countdown()
    raise InputError(
        "unknown_task",
        "there is no built-in task of this name",
        where=f"laptop.task = {name!r}",
        do=f"Take sort5 (or sortN, N = {MIN_SORT_DIGITS} to {MAX_SORT_DIGITS}), addition or countdown; "
        "or leave laptop.task empty and set data_path to a JSONL file.",
    )


@lru_cache(maxsize=4)
def _sorting(digits: int) -> TaskSet:
    """`s52813=` -> `12358`: N random digits, rising."""
    draw = random.Random(SORT_DRAW_SEED)
    distinct = {tuple(draw.randint(0, 9) for _ in range(digits)) for _ in range(SORT_DRAWS)}
    pairs = [(f"s{''.join(map(str, item))}=", "".join(map(str, sorted(item)))) for item in _shuffled(sorted(distinct))]
    after = "hotloop run --set laptop.task=sort8 --set rounds=800 --set laptop.warmup_accuracy=0.2"
    return _divide(f"sort{digits}", pairs, max_new_tokens=digits + 1, suggestion=after if digits < 8 else "")


@lru_cache(maxsize=1)
def _addition() -> TaskSet:
    """`07+45=` -> `052`: two numbers of two digits, the sum written with three."""
    numbers = range(10**ADDITION_DIGITS)
    pairs = [
        (f"{left:0{ADDITION_DIGITS}d}+{right:0{ADDITION_DIGITS}d}=", f"{left + right:0{ADDITION_DIGITS + 1}d}")
        for left, right in _shuffled(list(itertools.product(numbers, numbers)))
    ]
    return _divide("addition", pairs, max_new_tokens=ADDITION_DIGITS + 2)


@lru_cache(maxsize=1)
def _countdown() -> TaskSet:
    """`c372:23=` -> `3*7+2`: reach the target with three digits, each used once, and + - *."""
    solutions: dict[str, str] = {}
    for numbers in itertools.product(range(1, 10), repeat=3):
        for order in sorted(set(itertools.permutations(numbers))):
            for operators in itertools.product("*+-", repeat=2):
                expression = f"{order[0]}{operators[0]}{order[1]}{operators[1]}{order[2]}"
                target = evaluate_expression(expression)
                if target is not None and 0 <= target <= COUNTDOWN_MAX_TARGET:
                    solutions.setdefault(f"c{''.join(map(str, numbers))}:{target:02d}=", expression)
    pairs = _shuffled(sorted(solutions.items()))
    return _divide("countdown", pairs, max_new_tokens=6, judge=judge_countdown)


def judge_countdown(task: Task, response: str) -> Score:
    """Score 1 if the response uses exactly the prompt's three digits and reaches its target."""
    prompt = str(task.prompt)
    match = re.fullmatch(r"c(\d{3}):(\d{2})=", prompt)
    if match is None:
        return Score(0.0, f"{prompt!r} is not a countdown prompt")
    value = evaluate_expression(response)
    if value is None:
        return Score(0.0, "not an expression of digits and + - *")
    if sorted(re.findall(r"\d", response)) != sorted(match[1]):
        return Score(0.0, f"uses other digits than {match[1]}")
    if value != int(match[2]):
        return Score(0.0, f"gives {value}, not {int(match[2])}")
    return Score(1.0, "reaches the target")


def evaluate_expression(text: str) -> int | None:
    """Evaluate single digits joined by `+ - *` with the usual precedence; None if the text is anything else."""
    if not re.fullmatch(r"[0-9](?:[-+*][0-9])*", text):
        return None
    total, term, sign = 0, int(text[0]), 1
    for operator, digit in zip(text[1::2], text[2::2], strict=True):
        if operator == "*":
            term *= int(digit)
        else:
            total += sign * term
            term, sign = int(digit), (1 if operator == "+" else -1)
    return total + sign * term


def _shuffled(items: Sequence[Item]) -> list[Item]:
    shuffled = list(items)
    random.Random(SHUFFLE_SEED).shuffle(shuffled)
    return shuffled


def _divide(
    name: str,
    pairs: Sequence[tuple[str, str]],
    *,
    max_new_tokens: int,
    judge: Judge | None = None,
    suggestion: str = "",
) -> TaskSet:
    """Cut the shuffled items into held-out, gate and training items, in this order."""
    items = tuple(Task(task_id=f"{name}/{prompt}", prompt=prompt, label=label) for prompt, label in pairs)
    gate_end = HELD_OUT_ITEMS + GATE_ITEMS
    return TaskSet(
        name=name,
        train=items[gate_end:],
        gate=items[HELD_OUT_ITEMS:gate_end],
        held_out=items[:HELD_OUT_ITEMS],
        max_new_tokens=max_new_tokens,
        judge=judge,
        suggestion=suggestion,
    )
