"""What happens before a rehearsal starts, and what is shown beside a running one.

Owns: `answer_rehearsal` (the three lists and what would be imported), `prepare_run` (may this experiment run here, and
did the user agree to what it brings), `add_uncertainty`.

Promises: an experiment that brings hooks, a policy directory or data files is not run until the request names exactly
those; without torch the answer says what to install. Nothing of the experiment is imported here.

Does not do: the child process (runs.py), the laptop form itself (experiment/rehearsal.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from hotloop.errors import InputError, MissingExtra
from hotloop.experiment.choices import Experiment
from hotloop.experiment.records import to_plain
from hotloop.experiment.rehearsal import Rehearsal
from hotloop.lab.answers import as_experiment_file, hash_experiment, plan_for, read_experiment
from hotloop.lab.rollouts import compute_wilson, measure_round

Rehearse = Callable[[Experiment], Rehearsal]
"""Makes the laptop form; given by the command, which knows what the loop carries out and which files are here."""

TORCH_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """An experiment that may start."""

    document: dict[str, Any]
    experiment_hash: str
    title: str


def list_foreign_code(experiment: Experiment) -> list[str]:
    """List what a run of this experiment would import or read that is not hotloop's own: hooks, directories, files."""
    laptop = experiment.laptop
    found = [
        experiment.generate_hook if experiment.task == "custom" else "",
        experiment.reward_hook if experiment.task == "custom" else "",
        getattr(experiment.reward, "function", ""),
        getattr(experiment.reward, "url", ""),
        *laptop.hooks.values(),
        laptop.policy if laptop.policy not in ("", "dense", "moe") else "",
        experiment.data_path or "",
        experiment.data.held_out_path,
        laptop.service_url,
        laptop.publish,
    ]
    return list(dict.fromkeys(text for text in found if text))


def answer_rehearsal(body: Mapping[str, Any], rehearse: Rehearse) -> dict[str, Any]:
    """Say what a rehearsal keeps, replaces and leaves out, and what it would import."""
    experiment = read_experiment(body.get("experiment"))
    form = rehearse(experiment)
    return {
        "kept": to_plain(form.kept),
        "replaced": to_plain(form.replaced),
        "not_rehearsed": to_plain(form.not_rehearsed),
        "rounds": form.experiment.rounds,
        "foreign": list_foreign_code(experiment),
        "errors": [error.code for error in plan_for(experiment).errors],
    }


def prepare_run(body: Mapping[str, Any]) -> ReadyRun:
    """Check that an experiment may run here.

    Raises:
        MissingExtra: torch or transformers is not installed.
        InputError: `foreign_code` when what it imports was not agreed to; the list is in its details.
    """
    missing = [name for name in TORCH_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra("a rehearsal", " and ".join(missing), "torch")
    experiment = read_experiment(body.get("experiment"))
    foreign = list_foreign_code(experiment)
    agreed = body.get("agreed", [])
    if foreign and agreed != foreign:
        raise InputError(
            "foreign_code",
            f"the experiment imports or reads {', '.join(foreign)}",
            do="Agree to it on the page first.",
            details={"foreign": foreign},
        )
    label = plan_for(experiment).resolved.model
    return ReadyRun(as_experiment_file(experiment), hash_experiment(experiment), label)


def add_uncertainty(run: Path, line: str) -> str:
    """Add to a metrics line what a curve is drawn with: the reward's standard error, the held-out share's bounds."""
    record = orjson.loads(line)
    error = measure_round(run, int(record["round"])) if isinstance(record.get("round"), int) else None
    if error is not None:
        record["lab/reward_se"] = error
    held_out = record.get("eval/sampled")
    if isinstance(held_out, float | int):
        low, high = compute_wilson(float(held_out), _count_eval_rows(run))
        record["lab/held_out_low"], record["lab/held_out_high"] = low, high
    return orjson.dumps(record).decode()


@lru_cache(maxsize=16)
def _count_eval_rows(run: Path) -> int:
    document = orjson.loads((run / "experiment.json").read_bytes())
    return int(document["choices"]["laptop"]["eval_rows"])
