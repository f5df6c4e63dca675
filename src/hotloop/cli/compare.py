"""`hotloop compare A B`: what differs between two experiments, and what each comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.planner_input import open_catalog, open_experiment

if TYPE_CHECKING:
    from hotloop.experiment.compare import Report


@click.command(name="compare")
@click.argument("a", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("b", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--catalog", "catalogs", multiple=True, type=click.Path(path_type=Path, dir_okay=False), help="More models."
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(a: Path, b: Path, catalogs: tuple[Path, ...], as_json: bool) -> None:
    """Compare two experiments: values, GPUs, memory, errors and notes."""
    from hotloop.experiment.compare import compare_experiments
    from hotloop.experiment.records import to_plain

    report = compare_experiments(open_experiment(a, None), open_experiment(b, None), open_catalog(catalogs))
    if as_json:
        click.echo(json.dumps(to_plain(report), indent=2))
    else:
        _print(report)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hotloop.units import format_bytes

    console = Console(highlight=False)
    table = Table("choice", "A", "B", box=None, pad_edge=False)
    for difference in report.differences:
        name = f"{difference.field} (follows)" if difference.is_followed else difference.field
        table.add_row(escape(name), escape(json.dumps(difference.a)), escape(json.dumps(difference.b)))
    console.print(table if report.differences else "no differences")
    console.print()
    outcome = Table("outcome", "A", "B", box=None, pad_edge=False)
    for key in ("train", "rollout", "ray"):
        outcome.add_row(f"{key} GPUs", str(report.a.gpus[key]), str(report.b.gpus[key]))
    for phase in report.a.memory:
        outcome.add_row(f"{phase} memory", *(format_bytes(side.memory[phase]) for side in (report.a, report.b)))
    outcome.add_row("memory verdict", report.a.verdict, report.b.verdict)
    outcome.add_row("errors", *(", ".join(side.errors) or "none" for side in (report.a, report.b)))
    outcome.add_row("notes", *(", ".join(side.notes) or "none" for side in (report.a, report.b)))
    console.print(outcome)
