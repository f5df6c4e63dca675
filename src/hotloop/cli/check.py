"""`hotloop check FILE`: every error and note of an experiment; exit 2 when there is an error."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hotloop.cli.planner_input import (
    exit_bad_input,
    experiment_options,
    host_ram_option,
    open_experiment,
    open_plan,
    print_errors,
    read_json,
    short_lived,
)
from hotloop.errors import InputError


@click.command(name="check")
@experiment_options
@host_ram_option
@click.option("--json", "as_json", is_flag=True, help="Print errors and notes as JSON.")
@click.option(
    "--hf-config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A checkpoint's config.json, compared with the model that the experiment names.",
)
@short_lived
def command(
    file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    catalogs: tuple[Path, ...],
    host_ram_gb: float,
    as_json: bool,
    hf_config: Path | None,
) -> None:
    """Check an experiment. Exit 0 without errors, 2 with errors; notes do not count."""
    from hotloop.experiment.catalog.load import find_model
    from hotloop.experiment.hf_config import check_hf_config
    from hotloop.experiment.records import to_plain

    opened = open_plan(open_experiment(file, preset, settings), catalogs, host_ram_gb)
    errors = list(opened.plan.errors)
    if hf_config is not None:
        errors += check_hf_config(_read_config(hf_config), find_model(opened.catalog, opened.plan.resolved.model))
    if as_json:
        click.echo(json.dumps({"errors": to_plain(errors), "notes": to_plain(opened.plan.notes)}, indent=2))
    else:
        print_errors(errors)
        for note in opened.plan.notes:
            click.echo(f"note: {note.message}")
        if not errors:
            click.echo("no errors")
    if errors:
        exit_bad_input()


def _read_config(path: Path) -> dict[str, object]:
    config = read_json(path, do="Give a checkpoint's config.json.")
    if not isinstance(config, dict):
        raise InputError("bad_json", "does not hold an object", where=str(path), do="Give a checkpoint's config.json.")
    return config
