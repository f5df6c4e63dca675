"""Where prompts come from: draws from a fixed item set, or the rows of a JSONL file.

Owns: the PromptSource port, `DrawSource` (with replacement, for built-in tasks), `RowSource` (epochs, each in its own
order) and `read_tasks`, which turns a JSONL file into tasks.

Promises: what a source gives is a function of the run's seed and its cursor alone, so `restore(state())` continues
exactly. Every malformed row of a file is named with its line, all of them together.
Does not do: tokens, groups (sampling.py).
"""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from hotloop.errors import InputError, Problem
from hotloop.loop.seeds import derive_seed
from hotloop.types import Task

MAX_PROBLEMS_SHOWN = 20


class PromptSource(Protocol):
    """An endless stream of tasks with a cursor."""

    def take(self, count: int) -> list[Task]:
        """Give the next tasks and move the cursor past them."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the cursor as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor.

        Raises:
            InputError: code `cursor_mismatch`: the cursor belongs to other data.
        """
        ...


class DrawSource:
    """Draws with replacement: draw number k is the same item in every run with this seed."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._drawn = 0

    def take(self, count: int) -> list[Task]:
        first = self._drawn
        self._drawn += count
        size = len(self._tasks)
        return [self._tasks[derive_seed(self._seed, "draw", k) % size] for k in range(first, first + count)]

    def state(self) -> dict[str, Any]:
        return {"kind": "draw", "items": len(self._tasks), "drawn": self._drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_cursor(state, "draw", len(self._tasks))
        self._drawn = int(state["drawn"])


class RowSource:
    """Goes through the rows once an epoch, in file order or in an order shuffled anew for each epoch."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffle: bool) -> None:
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._offset = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Task]:
        taken: list[Task] = []
        while len(taken) < count:
            if self._offset == len(self._tasks):
                self._epoch, self._offset = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            end = min(len(self._tasks), self._offset + count - len(taken))
            taken.extend(self._tasks[row] for row in self._order[self._offset : end])
            self._offset = end
        return taken

    def state(self) -> dict[str, Any]:
        return {"kind": "rows", "items": len(self._tasks), "epoch": self._epoch, "offset": self._offset}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_cursor(state, "rows", len(self._tasks))
        self._epoch, self._offset = int(state["epoch"]), int(state["offset"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


def _check_cursor(state: Mapping[str, Any], kind: str, items: int) -> None:
    if state.get("kind") != kind or state.get("items") != items:
        raise InputError(
            "cursor_mismatch",
            f"the checkpoint's prompt cursor is for {state.get('items')} items ({state.get('kind')}), "
            f"the data now holds {items} ({kind})",
            do="Resume with the data that the run started with, or start a new run.",
        )


def split_slice(path: str) -> tuple[str, str]:
    """Split slime's `path@[a:b]` into path and slice; the slice is empty when there is none."""
    match = re.fullmatch(r"(.+)@(\[-?\d*:-?\d*\])", path)
    return (match[1], match[2]) if match else (path, "")


def read_tasks(path: str, *, prompt_key: str, label_key: str, rows: str = "") -> list[Task]:
    """Read tasks from a JSONL file, one object per line; other keys become the task's metadata.

    Args:
        path: may end in a slice, as in `train.jsonl@[0:1000]`.
        rows: a slice `[a:b]` of the rows; used when the path has none.

    Raises:
        InputError: `data_not_found`, `bad_slice`, `data_empty`, or all `bad_row` of the file together.
    """
    file, own_slice = split_slice(path)
    if not Path(file).is_file():
        raise InputError("data_not_found", "there is no such file", where=file, do="Check data_path.")
    tasks: list[Task] = []
    problems: list[Problem] = []
    wanted = own_slice or rows
    with open(file, "rb") as lines:
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if numbered and numbered[0][0] == 1:
        numbered[0] = (1, numbered[0][1].removeprefix(codecs.BOM_UTF8))  # as editors on Windows write it
    for number, line in numbered[_parse_slice(wanted)]:
        found = _read_row(line, number, file, prompt_key, label_key)
        if isinstance(found, Task):
            tasks.append(found)
        else:
            problems.append(found)
    if problems:
        rest = len(problems) - MAX_PROBLEMS_SHOWN
        if rest > 0:
            problems[MAX_PROBLEMS_SHOWN:] = [Problem("bad_row", f"and {rest} more rows are malformed", file)]
        raise InputError.of(problems)
    if not tasks:
        raise InputError(
            "data_empty",
            f"no rows are left of {len(numbered)}" if wanted else "there are no rows",
            where=f"{file}@{wanted}" if wanted else file,
            do="Give a file with one JSON object per line.",
        )
    return tasks


def _parse_slice(text: str) -> slice:
    if not text:
        return slice(None)
    match = re.fullmatch(r"\[(-?\d*):(-?\d*)\]", text)
    if match is None:
        raise InputError(
            "bad_slice", "is not a slice", where=f"data.slice = {text!r}", do="Write [a:b], as in [0:1000]."
        )
    return slice(*(int(part) if part not in ("", "-") else None for part in match.groups()))


def _read_row(line: bytes, number: int, file: str, prompt_key: str, label_key: str) -> Task | Problem:
    where = f"{file}:{number}"
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Problem("bad_row", f"is not a JSON object ({error})", where)
    if not isinstance(row, dict):
        return Problem("bad_row", "is not a JSON object", where)
    if prompt_key not in row:
        return Problem("bad_row", f"has no key {prompt_key!r}", where, f"Keys here: {', '.join(map(str, row))}.")
    prompt = row.pop(prompt_key)
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        return Problem("bad_row", f"{prompt_key!r} must be text or a list of chat messages", where)
    label = row.pop(label_key, None)
    if label is not None and not isinstance(label, str | int | float):
        return Problem("bad_row", f"{label_key!r} must be text or a number", where)
    return Task(
        task_id=f"{Path(file).name}:{number}",
        prompt=prompt,
        label=None if label is None else str(label),
        metadata=row,
    )


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
