"""The prompts of an experiment: training tasks, gate, held-out tasks, the longest answer.

Owns: `Dataset` and `open_dataset`, which reads a built-in task or the experiment's JSONL files.

Promises: everything wrong with the data is found before a run folder exists; held-out rows are never trained on.
Does not do: the cursor (source.py), tokens (sampling.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from hotloop.errors import InputError
from hotloop.experiment.choices import Experiment
from hotloop.loop.source import DrawSource, PromptSource, RowSource, read_tasks
from hotloop.loop.tasks import Judge, load_task_set
from hotloop.types import Task


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a run asks."""

    name: str
    train: tuple[Task, ...]
    gate: tuple[Task, ...]
    """Items that only the warm-up of a built-in policy looks at."""
    held_out: tuple[Task, ...]
    """Empty when the run is not evaluated."""
    max_new_tokens: int
    judge: Judge | None = None
    suggestion: str = ""
    is_builtin: bool = False


def open_dataset(experiment: Experiment) -> Dataset:
    """Read the experiment's prompts.

    Raises:
        InputError: an unknown task, a missing or empty file, malformed rows, too few rows to hold some out.
    """
    laptop, data = experiment.laptop, experiment.data
    if laptop.task:
        task_set = load_task_set(laptop.task)
        return Dataset(
            name=task_set.name,
            train=task_set.train,
            gate=task_set.gate,
            held_out=task_set.held_out[: laptop.eval_rows],
            max_new_tokens=min(experiment.response_tokens, task_set.max_new_tokens),
            judge=task_set.judge,
            suggestion=task_set.suggestion,
            is_builtin=True,
        )
    path = experiment.data_path or ""
    keys = {"prompt_key": data.prompt_key, "label_key": data.label_key}
    tasks = read_tasks(path, **keys, rows=data.slice)
    held_out: list[Task] = []
    if data.held_out_path:
        held_out = read_tasks(data.held_out_path, **keys)
    elif data.held_out_rows:
        if data.held_out_rows >= len(tasks):
            raise InputError(
                "data_empty",
                f"{data.held_out_rows} rows held out of {len(tasks)} leave none to train on",
                where=f"data.held_out_rows = {data.held_out_rows}",
                do="Hold out fewer rows.",
            )
        tasks, held_out = tasks[: -data.held_out_rows], tasks[-data.held_out_rows :]
    return Dataset(path, tuple(tasks), (), tuple(held_out[: laptop.eval_rows]), experiment.response_tokens)


def make_source(experiment: Experiment, dataset: Dataset) -> PromptSource:
    """Choose how training tasks are drawn: with replacement for a built-in task, by epochs for files."""
    if dataset.is_builtin:
        return DrawSource(dataset.train, experiment.laptop.seed)
    return RowSource(dataset.train, experiment.laptop.seed, shuffle=experiment.data.shuffle)
