"""`hotloop link FILE|URL`: make a share link of an experiment, or read one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hotloop.cli.lab_address import DEFAULT_ADDRESS
from hotloop.cli.planner_input import open_experiment
from hotloop.errors import InputError


@click.command(name="link")
@click.argument("source")
@click.option(
    "--compare",
    "reference",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Make an A/B link: this file is A, SOURCE is B.",
)
@click.option("--base", default=DEFAULT_ADDRESS, show_default=True, help="Address of the page that opens the link.")
@click.option(
    "--mine",
    type=click.Path(path_type=Path, dir_okay=False),
    help="When reading a link: the experiment whose private values (paths, addresses, hooks) are kept.",
)
def command(source: str, reference: Path | None, base: str, mine: Path | None) -> None:
    """Print a link for an experiment file, or the experiment of a link as JSON.

    SOURCE is a file, or a link with #experiment= or #compare=. Private values never go into a link.
    """
    from hotloop.experiment.share import COMPARE_KEY, EXPERIMENT_KEY, encode_comparison, encode_experiment, read_link

    if f"#{EXPERIMENT_KEY}=" in source or f"#{COMPARE_KEY}=" in source:
        shared = read_link(source, open_experiment(mine, None) if mine is not None else None)
        document: dict[str, object] = {"schema": 1, "choices": shared.experiment.model_dump(mode="json")}
        if shared.reference is not None:
            document["reference"] = shared.reference.model_dump(mode="json")
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    if not source or "://" in source:
        raise InputError(
            "bad_link",
            f"it has no #{EXPERIMENT_KEY}= or #{COMPARE_KEY}=" if source else "SOURCE is empty",
            where="the link",
            do="Copy it whole, from the first character to the last, or name an experiment file.",
        )
    experiment = open_experiment(Path(source), None)
    if reference is not None:
        fragment = encode_comparison(open_experiment(reference, None), experiment)
    else:
        fragment = encode_experiment(experiment)
    click.echo(f"{base}#{fragment}")
