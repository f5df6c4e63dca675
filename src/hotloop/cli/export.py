"""`hotloop export FILE --out DIR`: write the files that launch an experiment on a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from hotloop.cli.planner_input import (
    Opened,
    exit_bad_input,
    experiment_options,
    host_ram_option,
    open_experiment,
    open_plan,
    print_errors,
    read_build,
)

SCRIPTS = ("experiment.sh", "serving-reference.sh")


@click.command(name="export")
@experiment_options
@host_ram_option
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write into.")
@click.option("--target", type=click.Choice(["v0.4.0", "624b824a"]), help="Which slime to write for.")
@click.option(
    "--slime-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A slime checkout whose model scripts are compared with the ones that the recipe was read from.",
)
def command(
    file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    catalogs: tuple[Path, ...],
    host_ram_gb: float,
    out: Path,
    target: str | None,
    slime_dir: Path | None,
) -> None:
    """Write experiment.sh, serving-reference.sh and experiment.json.

    An error in the experiment holds both scripts back; experiment.json is written all the same.
    """
    from hotloop.experiment.export.bundle import build_bundle

    experiment = open_experiment(file, preset, settings)
    if target is not None:
        experiment = experiment.model_copy(update={"slime_target": target})
    opened = open_plan(experiment, catalogs, host_ram_gb)
    bundle = build_bundle(opened.plan, opened.catalog, read_build())
    out.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        if name not in bundle.files and (out / name).exists():
            (out / name).unlink()
            click.echo(f"removed {out / name}, which belongs to an earlier export")
    for name, text in bundle.files.items():
        path = out / name
        path.write_bytes(text.encode("utf-8"))
        if name.endswith(".sh"):
            path.chmod(0o755)
        click.echo(f"wrote {path}")
    for note in opened.plan.notes:
        click.echo(f"note: {note.message}", err=True)
    if slime_dir is not None:
        _report_changed_scripts(opened, slime_dir)
    if bundle.blocked_by:
        print_errors(opened.plan.errors)
        click.echo("The scripts are not written while there are errors.", err=True)
        exit_bad_input()


def _report_changed_scripts(opened: Opened, slime_dir: Path) -> None:
    """Say which of the model's slime scripts differ from the ones that the recipe was read from."""
    from hotloop.experiment.catalog.load import find_model
    from hotloop.experiment.provenance import find_changed_slime_files

    def read(path: str) -> bytes | None:
        file = slime_dir / path
        return file.read_bytes() if file.is_file() else None

    model = find_model(opened.catalog, opened.plan.resolved.model)
    for path in find_changed_slime_files(model, read):
        click.echo(
            f"note: {slime_dir / path} differs from the one that the recipe was read from [recipe_differs].", err=True
        )
