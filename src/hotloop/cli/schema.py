"""`hotloop schema`: print the JSON schema of an experiment file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="schema")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file in place of printing.")
def command(out: Path | None) -> None:
    """Print the JSON schema of an experiment file."""
    from hotloop.experiment.schema_json import render_schema

    text = render_schema()
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        click.echo(f"wrote {out}")
