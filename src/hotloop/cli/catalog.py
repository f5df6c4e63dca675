"""`hotloop catalog`: the models and GPUs that the planner knows, and one more from a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.errors import InputError
from hotloop.units import GIB, format_count

if TYPE_CHECKING:
    from hotloop.experiment.catalog.records import Catalog


@click.group(invoke_without_command=True)
@click.option(
    "--catalog", "catalogs", multiple=True, type=click.Path(path_type=Path, dir_okay=False), help="More models."
)
@click.option("--json", "as_json", is_flag=True, help="Print every fact as JSON.")
@click.pass_context
def command(context: click.Context, catalogs: tuple[Path, ...], as_json: bool) -> None:
    """List models and GPUs with their sizes; `add` makes an entry for another model."""
    if context.invoked_subcommand is not None:
        return
    from hotloop.experiment.catalog.load import load_catalog
    from hotloop.experiment.records import to_plain

    catalog = load_catalog(catalogs)
    if as_json:
        click.echo(json.dumps({"models": to_plain(catalog.models), "gpus": to_plain(catalog.gpus)}, indent=2))
    else:
        _print_catalog(catalog)


def _print_catalog(catalog: Catalog) -> None:
    click.echo(f"{'model':22} {'parameters':>10} {'active':>9} {'KV/token':>9}  recipe")
    for model in catalog.models.values():
        recipe, arch = model.recipe, model.arch
        sizes = f"{recipe.nodes} x {recipe.gpus_per_node} GPUs, TP {recipe.tp} PP {recipe.pp} CP {recipe.cp}"
        sizes += f" EP {recipe.ep}, engine {recipe.engine_gpus}"
        kind = " (serving only; sizes proposed)" if model.rollout_only else ""
        click.echo(
            f"{model.id:22} {format_count(arch.params_total):>10} {format_count(arch.params_active):>9} "
            f"{arch.kv_bytes_per_token_bf16:>9}  {sizes}{kind}"
        )
    click.echo(f"\n{'gpu':12} {'memory':>10}  bandwidth    interconnect")
    for gpu in catalog.gpus.values():
        memory = f"{gpu.memory_bytes / GIB:.1f} GiB"
        click.echo(f"{gpu.id:12} {memory:>10}  {gpu.hbm_bytes_per_s / 1e12:.2f} TB/s   {gpu.interconnect}")
    click.echo("\nEvery fact with its source: hotloop catalog --json")


@command.command("add")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--name", help="What experiments call it; the folder's name unless given.")
@click.option("--repo", help="Its Hugging Face repository, owner/name.")
@click.option("--model-script", default="", help="slime's script of the model; without one it can only be served.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write in place of printing.")
def add(config: Path, name: str | None, repo: str | None, model_script: str, out: Path | None) -> None:
    """Make a catalogue entry from CONFIG, a model's config.json, with parallel sizes proposed.

    Use the file with `--catalog FILE`. The sizes are proposed from the dimensions: check them before you rent GPUs.
    """
    from hotloop.experiment.catalog.propose import propose_entry

    name = name or config.resolve().parent.name
    text = propose_entry(name, _read_config(config), repo or name, model_script)
    if out is None:
        click.echo(text, nl=False)
        return
    if out.exists():
        raise InputError("file_exists", "is there already", where=str(out), do="Give another name to --out.")
    out.write_text(text, encoding="utf-8")
    click.echo(f"{out}: {name}. Use it with --catalog {out}")


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise InputError("file_unreadable", why, where=str(path), do="Give a model's config.json.") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise InputError(
            "bad_json", f"is not JSON: {error}", where=str(path), do="Give a model's config.json."
        ) from error
    if not isinstance(config, dict):
        raise InputError("bad_json", "does not hold an object", where=str(path), do="Give a model's config.json.")
    return config
