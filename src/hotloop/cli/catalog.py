"""`hotloop catalog`: the models and GPUs that the planner knows, and `catalog add` for one more."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hotloop.cli.planner_input import open_catalog, read_json
from hotloop.errors import InputError


@click.group(name="catalog", invoke_without_command=True)
@click.option(
    "--catalog", "catalogs", multiple=True, type=click.Path(path_type=Path, dir_okay=False), help="More tables."
)
@click.option("--json", "as_json", is_flag=True, help="Print every record as JSON.")
@click.pass_context
def command(ctx: click.Context, catalogs: tuple[Path, ...], as_json: bool) -> None:
    """List models and GPUs with their sizes and sources."""
    if ctx.invoked_subcommand is not None:
        return
    catalog = open_catalog(catalogs)
    if as_json:
        from hotloop.experiment.records import to_plain

        click.echo(json.dumps({"models": to_plain(catalog.models), "gpus": to_plain(catalog.gpus)}, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    from hotloop.units import format_bytes, format_count

    console = Console(highlight=False, markup=False)
    models = Table(
        Column("model", no_wrap=True),
        "name",
        "parameters",
        "active",
        "recipe",
        "engine",
        "exports",
        box=None,
        pad_edge=False,
    )
    for model in catalog.models.values():
        recipe = model.recipe
        models.add_row(
            model.id,
            model.label,
            format_count(model.arch.params_total),
            format_count(model.arch.params_active),
            f"{recipe.nodes} x 8, TP {recipe.tp} PP {recipe.pp} CP {recipe.cp} EP {recipe.ep}",
            f"{recipe.engine_gpus} GPUs",
            "no" if model.rollout_only else "yes",
        )
    console.print(models)
    console.print()
    gpus = Table(Column("gpu", no_wrap=True), "name", "memory", "BF16 FLOP/s", "FP8 FLOP/s", box=None, pad_edge=False)
    for gpu in catalog.gpus.values():
        rates = [f"{rate:.3g}" if rate else "-" for rate in (gpu.bf16_dense_flops, gpu.fp8_dense_flops)]
        gpus.add_row(gpu.id, gpu.label, format_bytes(gpu.memory_bytes), *rates)
    console.print(gpus)


@command.command(name="add")
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--name", required=True, help="Name of the model in experiments.")
@click.option("--repo", "hf_repo", required=True, help="Hugging Face repository, owner/name.")
@click.option("--model-script", default="", help="slime's script of the model; without one it cannot be exported.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="TOML file to write or extend."
)
def add(config: Path, name: str, hf_repo: str, model_script: str, out: Path) -> None:
    """Make a catalogue entry from a Hugging Face config.json, with parallel sizes proposed.

    Use it with `--catalog FILE` of plan, check, export and repair.
    """
    from hotloop.experiment.catalog.load import load_catalog
    from hotloop.experiment.catalog.propose import propose_entry

    fields = read_json(config, do="Give a config.json.")
    if not isinstance(fields, dict):
        raise InputError("bad_json", "does not hold an object", where=str(config), do="Give a config.json.")
    known = load_catalog([out] if out.exists() else [])
    if name in known.models:
        raise InputError(
            "catalog_entry", "is already in the catalogue", where=f"model name {name}", do="Choose another name."
        )
    entry = propose_entry(name, fields, hf_repo, model_script)
    before = out.read_text(encoding="utf-8") if out.exists() else ""
    text = f"{before.rstrip()}\n\n{entry}" if before.strip() else entry
    out.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    recipe = load_catalog([out]).models[name].recipe
    click.echo(f"wrote {out}: {name}, TP {recipe.tp} PP {recipe.pp} EP {recipe.ep} on {recipe.nodes} nodes")
