"""`hotloop plan FILE`: everything that follows from an experiment, as a page of text or as JSON."""

from __future__ import annotations

from pathlib import Path

import click

from hotloop.cli.planner_input import experiment_options, host_ram_option, open_experiment, open_plan, short_lived


@click.command(name="plan")
@experiment_options
@host_ram_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@short_lived
def command(
    file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    catalogs: tuple[Path, ...],
    host_ram_gb: float,
    as_json: bool,
) -> None:
    """Show layout, memory, findings, estimates and the launch guide of an experiment.

    Exits 0 even when the experiment has errors; `hotloop check` is the command that fails.
    """
    opened = open_plan(open_experiment(file, preset, settings), catalogs, host_ram_gb)
    if as_json:
        import orjson

        click.echo(orjson.dumps(opened.plan.to_json(), option=orjson.OPT_INDENT_2).decode())
        return
    from rich.console import Console

    from hotloop.cli.plan_page import print_plan

    print_plan(opened.plan, Console())
