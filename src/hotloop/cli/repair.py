"""`hotloop repair FILE`: the repairs of an experiment's errors, and the experiment with one of them applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.planner_input import experiment_options, host_ram_option, open_experiment, open_plan
from hotloop.errors import InputError

if TYPE_CHECKING:
    from hotloop.experiment.records import Repair


@click.command(name="repair")
@experiment_options
@host_ram_option
@click.option("--apply", "code", metavar="CODE", help="Apply the first repair of this error and print the experiment.")
@click.option("--choice", type=click.IntRange(min=1), default=1, show_default=True, help="Which repair of that error.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the experiment to a file.")
@click.option("--json", "as_json", is_flag=True, help="List the repairs as JSON.")
def command(
    file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    catalogs: tuple[Path, ...],
    host_ram_gb: float,
    code: str | None,
    choice: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """List the edits that clear an error, each proved by checking the edited experiment. Listing applies nothing.

    With `--apply` the edited experiment is printed as JSON, or written to `--out`.
    """
    from hotloop.experiment.apply import apply_edit
    from hotloop.experiment.records import to_plain

    experiment = open_experiment(file, preset, settings)
    opened = open_plan(experiment, catalogs, host_ram_gb)
    repairs = opened.plan.repairs
    if code is None:
        if as_json:
            click.echo(json.dumps(to_plain(repairs), indent=2))
        else:
            _list(repairs, [error.code for error in opened.plan.errors])
        return
    fitting = [repair for repair in repairs if repair.code == code]
    if len(fitting) < choice:
        listed = ", ".join(dict.fromkeys(repair.code for repair in repairs)) or "none"
        raise InputError(
            "no_repair",
            f"there are {len(fitting)} repairs of it",
            where=f"--apply {code} --choice {choice}",
            do=f"Errors with a repair here: {listed}.",
        )
    applied = apply_edit(experiment, fitting[choice - 1].edit, opened.catalog)
    text = json.dumps(applied.experiment.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    for change in (*applied.edited, *applied.followed):
        rule = f" ({change.rule})" if change.rule else ""
        click.echo(f"{change.field}: {json.dumps(change.before)} -> {json.dumps(change.after)}{rule}", err=True)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        click.echo(f"wrote {out}", err=True)


def _list(repairs: tuple[Repair, ...], errors: list[str]) -> None:
    counts: dict[str, int] = {}
    for repair in repairs:
        counts[repair.code] = counts.get(repair.code, 0) + 1
        click.echo(f"{repair.code} {counts[repair.code]}: {repair.title}")
        for change in repair.changes:
            rule = f" ({change.rule})" if change.rule else ""
            click.echo(f"    {change.field}: {json.dumps(change.before)} -> {json.dumps(change.after)}{rule}")
        click.echo(f"    GPUs after: {', '.join(f'{name} {count}' for name, count in repair.gpus_after.items())}")
        for remaining in repair.remaining:
            click.echo(f"    still to supply: {remaining}")
    for error in dict.fromkeys(errors):
        if error not in counts:
            click.echo(f"{error}: no tested edit clears it")
    if not errors:
        click.echo("no errors, so nothing to repair")
