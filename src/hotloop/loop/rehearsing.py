"""A cluster experiment on its way to a run here: its laptop form, and the account that is printed and kept.

Owns: `prepare_rehearsal` and `render_account`.

Promises: a setting given on the command line is applied to the experiment before it takes its laptop form and again
after, so `--set rounds=3` holds; what is not rehearsed stays so. Every choice that says something is named as kept,
replaced or not rehearsed.
Does not do: the laptop form itself (experiment/rehearsal.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hotloop.experiment.load import Loaded, flatten, load_experiment, parse_setting
from hotloop.experiment.rehearsal import Kept, Rehearsal, laptop_form
from hotloop.loop.support import is_supported


def prepare_rehearsal(loaded: Loaded, settings: Sequence[str], aliases: Mapping[str, str]) -> tuple[Loaded, Rehearsal]:
    """Return what runs here in place of a cluster experiment, and the account of it.

    Raises:
        InputError: code `unknown_model`, or a setting that the laptop form cannot take.
    """
    rehearsal = laptop_form(loaded.experiment, is_supported=is_supported, has_file=lambda path: Path(path).is_file())
    skipped = {choice.name for choice in rehearsal.not_rehearsed}
    again = [setting for setting in settings if _name_of(setting, aliases) not in skipped]
    form = load_experiment(
        None, again, base=rehearsal.experiment, base_name=f"laptop form of {loaded.source}", aliases=aliases
    )
    values = dict(flatten(form.experiment.model_dump(mode="json")))
    named = {_name_of(setting, aliases) for setting in again}
    held = {
        choice.name for choice in rehearsal.replaced if choice.name in named and values[choice.name] == choice.before
    }
    kept = [Kept(choice.name, choice.before) for choice in rehearsal.replaced if choice.name in held]
    return form, replace(
        rehearsal,
        kept=(*rehearsal.kept, *kept),
        replaced=tuple(choice for choice in rehearsal.replaced if choice.name not in held),
    )


def _name_of(setting: str, aliases: Mapping[str, str]) -> str:
    parsed = parse_setting(setting, [])
    return "" if parsed is None else aliases.get(parsed[0], parsed[0])


def render_account(rehearsal: Rehearsal) -> str:
    """Say what a rehearsal keeps, replaces and leaves out, one choice a line."""
    lines = ["kept as chosen:"]
    lines += [f"  {choice.name} = {choice.value!r}" for choice in rehearsal.kept] or ["  nothing"]
    lines.append("replaced by what a laptop can do:")
    lines += [f"  {choice.name}: {choice.before!r} -> {choice.after!r} ({choice.why})" for choice in rehearsal.replaced]
    if rehearsal.not_rehearsed:
        lines.append("not rehearsed:")
        lines += [f"  {choice.name} = {choice.value!r} ({choice.why})" for choice in rehearsal.not_rehearsed]
    return "\n".join(lines)


def describe_account(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the account as plain JSON values, for the run's experiment.json."""
    return {
        "kept": [asdict(choice) for choice in rehearsal.kept],
        "replaced": [asdict(choice) for choice in rehearsal.replaced],
        "not_rehearsed": [asdict(choice) for choice in rehearsal.not_rehearsed],
    }
