"""`hotloop policy make` and `hotloop policy info`: small policies made here, and what a policy directory holds.

Owns: the command line, and joining a built-in task's items to the warm-up.
Does not do: training (models/builtin.py), tasks (loop/tasks.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.group()
def command() -> None:
    """Make a small built-in policy, or describe a policy directory."""


@command.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the policy.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the weights, the batches and the samples.",
)
@click.option("--kind", type=click.Choice(["dense", "moe"]), default="dense", show_default=True)
@click.option(
    "--task", default="sort5", show_default=True, help="Built-in task of the warm-up: sortN, addition, countdown."
)
@click.option(
    "--accuracy",
    type=click.FloatRange(0, 1),
    default=0.4,
    show_default=True,
    help="Sampled accuracy that ends the warm-up.",
)
@click.option(
    "--max-steps",
    type=click.IntRange(min=0),
    default=400,
    show_default=True,
    help="Most warm-up steps; 0 leaves random weights.",
)
@click.option(
    "--max-positions", type=click.IntRange(min=1), default=512, show_default=True, help="Longest context in tokens."
)
def make(out: Path, seed: int, kind: str, task: str, accuracy: float, max_steps: int, max_positions: int) -> None:
    """Make a small policy and warm it up on a built-in task; the result is kept in the cache."""
    from hotloop.errors import MissingExtra
    from hotloop.loop.tasks import load_task_set
    from hotloop.units import format_seconds

    try:
        from hotloop.models.builtin import make_policy
    except ImportError as error:
        raise MissingExtra('"hotloop policy make"', "torch", "torch") from error
    items = load_task_set(task)

    def show(step: int, most: int, measured: float | None) -> None:
        if measured is not None:
            click.echo(f"step {step:3d} of at most {most}: sampled accuracy {measured:.3f}, wanted {accuracy:.2f}")

    report = make_policy(
        out,
        kind="moe" if kind == "moe" else "dense",
        seed=seed,
        items=[(str(one.prompt), one.label or "") for one in items.train] if max_steps else (),
        gate=[(str(one.prompt), one.label or "") for one in items.gate] if max_steps else (),
        warmup_accuracy=accuracy,
        warmup_max_steps=max_steps,
        max_positions=max_positions,
        progress=show,
    )
    how = "from the cache" if report.from_cache else f"made in {format_seconds(report.warmup_s)}"
    click.echo(f"{out}: {kind} policy of {report.num_params:,} parameters, seed {seed}, {how}")
    if max_steps:
        outcome = "reached" if report.reached_gate else f"NOT reached in {report.warmup_steps} steps"
        click.echo(f"sampled accuracy {report.gate_accuracy:.3f} on {task}: {accuracy:.2f} {outcome}")


@command.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(directory: Path, as_json: bool) -> None:
    """Describe a policy directory without loading its weights."""
    facts = _describe(directory)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):{width}s}  {value}")


def _describe(directory: Path) -> dict[str, Any]:
    from hotloop.models.config import iter_slots, read_config
    from hotloop.models.tokenizer import open_tokenizer
    from hotloop.units import format_count

    config = read_config(directory)
    facts: dict[str, Any] = {"architecture": config.model_type}
    if config.is_native:
        count = 0
        for _, shape in iter_slots(config):
            size = 1
            for length in shape:
                size *= length
            count += size
        facts["parameters"] = f"{count:,} ({format_count(count)})"
        facts["runs_on"] = "the lean decoder"
    else:
        facts["runs_on"] = f"transformers, because {config.unsupported}"
    facts |= {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for keys and values",
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "tied_embeddings": config.tied_embeddings,
    }
    if config.num_experts:
        facts["experts"] = (
            f"{config.num_experts} of width {config.moe_intermediate_size}, {config.experts_per_token} per token"
        )
    files = sorted(directory.glob("*.safetensors"))
    facts["weights"] = f"{len(files)} safetensors, {sum(path.stat().st_size for path in files):,} bytes"
    if (directory / "tokenizer.json").is_file():
        tokenizer = open_tokenizer(directory)
        facts["tokenizer"] = (
            f"{tokenizer.vocab_size} ids, stop ids {list(tokenizer.stop_ids)}, "
            f"{'a' if tokenizer.has_chat_template else 'no'} chat template"
        )
    else:
        facts["tokenizer"] = "none"
    made = directory / "policy.json"
    if made.is_file():
        report = json.loads(made.read_text(encoding="utf-8"))
        facts["made_here"] = (
            f"seed {report['seed']}, {report['warmup_steps']} warm-up steps, "
            f"sampled accuracy {report['gate_accuracy']:.3f}"
        )
    return facts
