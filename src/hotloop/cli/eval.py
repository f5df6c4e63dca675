"""`hotloop eval`: held-out accuracy of a run's checkpoint, measured as the run measures it.

Owns: the command. The items, the seed and the number of samples are the run's, so the numbers equal its own record.
Does not do: training; nothing in the run folder changes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hotloop.loop.run_folder import RunFolder


@click.command(name="eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=int, metavar="ROUND", help="Round of the checkpoint; default the latest.")
@click.option("--samples", type=click.IntRange(min=1), help="Sampled answers per item; default the run's eval_samples.")
@click.option("--rows", type=click.IntRange(min=1), help="Held-out items; default the run's eval_rows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every number.")
def command(run: Path, checkpoint: int | None, samples: int | None, rows: int | None, as_json: bool) -> int:
    """Measure held-out accuracy of a run's checkpoint, greedy and sampled.

    RUN is the folder that `hotloop run` wrote. The policy that training started from is `--checkpoint -1`.
    """
    import orjson

    from hotloop.experiment.load import load_experiment
    from hotloop.loop.assembly import open_evaluator
    from hotloop.loop.dataset import open_dataset
    from hotloop.loop.run_folder import RunFolder

    folder = RunFolder.open(run)
    settings = [f"eval_samples={samples}"] if samples else []
    settings += [f"laptop.eval_rows={rows}"] if rows else []
    experiment = load_experiment(folder.experiment, settings).experiment
    round_, policy_version, directory = _find_policy(folder, checkpoint)
    evaluator = open_evaluator(experiment, open_dataset(experiment), directory)

    async def evaluate() -> dict[str, float]:
        try:
            return await evaluator.evaluate()
        finally:
            await evaluator.close()

    metrics = asyncio.run(evaluate())
    metrics["eval/policy_version"] = policy_version
    if as_json:
        click.echo(orjson.dumps({"round": round_, **metrics}).decode())
        return 0
    where = "before training" if round_ < 0 else f"after round {round_}"
    click.echo(f"{len(evaluator.tasks)} held-out items, {where} (policy version {policy_version}):")
    for name, value in metrics.items():
        if name != "eval/policy_version":
            click.echo(f"  {name.removeprefix('eval/'):<28} {value:.3f}")
    return 0


def _find_policy(folder: RunFolder, checkpoint: int | None) -> tuple[int, int, Path]:
    """Return round, policy version and directory of the weights to measure."""
    from hotloop.errors import InputError
    from hotloop.loop.checkpoint import find_latest, read_state

    latest = find_latest(folder) if checkpoint is None else checkpoint
    if latest == -1:
        return -1, 0, folder.policy
    if latest is None:
        raise InputError(
            "checkpoint_missing",
            "the run has saved no checkpoint",
            where=str(folder.root),
            do="Measure the policy that it started from with --checkpoint -1.",
        )
    state, directory = read_state(folder, latest)
    return latest, state.policy_version, directory
