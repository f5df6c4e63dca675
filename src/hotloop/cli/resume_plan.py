"""`hotloop resume-plan`: what a run that starts from a checkpoint will do, before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hotloop.cli.planner_input import exit_bad_input, experiment_options, open_catalog, open_experiment, print_errors
from hotloop.errors import InputError

RESUME_CODES = frozenset({"resume", "resume_runs_nothing"})


@click.command(name="resume-plan")
@experiment_options
@click.option(
    "--latest", type=click.IntRange(min=0), help="The newest iteration, when the checkpoint folder is elsewhere."
)
@click.option("--json", "as_json", is_flag=True, help="Print the arithmetic as JSON.")
def command(
    file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    catalogs: tuple[Path, ...],
    latest: int | None,
    as_json: bool,
) -> None:
    """Show where a resumed run starts, how many rounds are left and when it saves.

    The folder is the experiment's `resume_from`; without one, `save_path`. Exit 2 when the resume would run nothing.
    """
    from hotloop.cli.planner_input import read_resume_facts
    from hotloop.experiment.plan import build_plan
    from hotloop.experiment.records import to_plain
    from hotloop.experiment.resolve import resolve
    from hotloop.experiment.rules import ResumeFacts

    experiment = open_experiment(file, preset, settings)
    catalog = open_catalog(catalogs)
    if not experiment.resume_from:
        folder = resolve(experiment, catalog).save_path or ""
        experiment = experiment.model_copy(update={"resume_from": folder})
    facts = ResumeFacts(latest) if latest is not None else read_resume_facts(experiment)
    if facts is None:
        raise InputError(
            "resume_unread",
            "is not on this machine, so its newest iteration is unknown",
            where=f"resume_from = {experiment.resume_from}",
            do="Run this where the folder is, or give --latest.",
        )
    plan = build_plan(experiment, catalog=catalog, resume=facts)
    assert plan.resume is not None
    errors = [error for error in plan.errors if error.code in RESUME_CODES]
    if as_json:
        click.echo(json.dumps({"resume": to_plain(plan.resume), "errors": to_plain(errors)}, indent=2))
    else:
        click.echo(plan.resume.render())
        for note in plan.notes:
            if note.code.startswith("resume"):
                click.echo(f"note: {note.message}")
        print_errors(errors)
    if errors:
        exit_bad_input()
