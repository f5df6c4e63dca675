"""`hotloop run`: an experiment, here, for real, at laptop size.

Owns: the order in which a run is set up (read, check, folder, policy, parts), what is printed around it, the interrupt.
Does not do: rounds (loop/controller.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.errors import EXIT_INTERRUPTED, HotloopError, InputError, Problem

if TYPE_CHECKING:
    from hotloop.experiment.choices import Experiment
    from hotloop.experiment.load import Loaded
    from hotloop.experiment.rehearsal import Rehearsal
    from hotloop.loop.checkpoint import LoopState
    from hotloop.loop.controller import Controller
    from hotloop.loop.dataset import Dataset
    from hotloop.loop.progress import Progress
    from hotloop.loop.run_folder import RunFolder

ALIASES = {"publish": "laptop.publish", "seed": "laptop.seed"}
"""Short spellings of settings."""


@click.command(name="run")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one setting; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run; it must be new or empty.")
@click.option("--seed", type=click.IntRange(min=0), help="Short for --set laptop.seed=N.")
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="DIR", help="Continue a run from its last checkpoint."
)
@click.option("--explain", is_flag=True, help="Print every value and where it came from, and run nothing.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def command(
    file: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    seed: int | None,
    resume: Path | None,
    explain: bool,
    quiet: bool,
) -> int:
    """Run an experiment here, for real, at laptop size.

    FILE is an experiment in TOML or JSON. Without it the preset `laptop` runs: a small language model learns to sort
    five digits.
    """
    began = time.perf_counter()
    if seed is not None:
        settings = (*settings, f"laptop.seed={seed}")
    if resume is not None:
        if file is not None or out is not None:
            raise InputError(
                "bad_setting", "--resume goes on in its own folder", where="--resume", do="Leave out FILE and --out."
            )
        return _resume(resume, settings, explain=explain, quiet=quiet, began=began)
    loaded, rehearsal = _load(file, settings)
    if rehearsal is not None and not quiet:
        from hotloop.loop.rehearsing import render_account

        _say(f"{loaded.source}\n{render_account(rehearsal)}")
    if explain:
        from hotloop.loop.explain import render_explanation

        click.echo(render_explanation(loaded))
        return 0
    return _start(loaded, rehearsal, out, quiet=quiet, began=began)


def _load(file: Path | None, settings: tuple[str, ...]) -> tuple[Loaded, Rehearsal | None]:
    """Read what is to run; a cluster experiment is read as its laptop form."""
    from hotloop.experiment.load import load_experiment
    from hotloop.experiment.presets import LAPTOP_PRESET, make_laptop_preset

    base = make_laptop_preset()
    loaded = load_experiment(file, settings, base=base, base_name=LAPTOP_PRESET, aliases=ALIASES)
    if loaded.experiment.laptop.policy:
        return loaded, None
    from hotloop.loop.rehearsing import prepare_rehearsal

    return prepare_rehearsal(loaded, settings, ALIASES)


def _start(loaded: Loaded, rehearsal: Rehearsal | None, out: Path | None, *, quiet: bool, began: float) -> int:
    from hotloop.loop.dataset import open_dataset
    from hotloop.loop.resuming import plan_run
    from hotloop.loop.run_folder import RunFolder
    from hotloop.loop.support import check_support

    experiment = loaded.experiment
    check_support(experiment)
    dataset = open_dataset(experiment)
    root = out or _choose_folder(dataset.name, experiment.laptop.seed)
    was_there = root.exists()
    folder = RunFolder.create(root)
    lock = folder.lock()
    is_set_up = False
    try:
        _write_experiment(folder, experiment, rehearsal)
        say = _silence if quiet else _say
        say(f"run folder: {folder.root}")
        if experiment.reward.kind == "python":
            say(f"imports {experiment.reward.function.rpartition('.')[0]} for the reward")
        _prepare_policy(experiment, dataset, folder, say)
        _check_reward(experiment, dataset, folder, say)
        say(plan_run(experiment, None).render())
        progress = _choose_progress(quiet)
        controller = _assemble(experiment, dataset, folder, None, progress, began)
        is_set_up = True
        return _run(experiment, dataset, folder, controller, progress, first_round=0, quiet=quiet)
    except HotloopError:
        if not is_set_up:  # nothing has run: the corrected experiment may have the folder
            folder.discard(keeps_root=was_there)
        raise
    except KeyboardInterrupt:
        _say(f"interrupted; nothing was saved yet. Continue with: hotloop run --resume {folder.root}", err=True)
        raise
    finally:
        lock.close()


def _resume(root: Path, settings: tuple[str, ...], *, explain: bool, quiet: bool, began: float) -> int:
    from hotloop.experiment.load import load_experiment
    from hotloop.loop.dataset import open_dataset
    from hotloop.loop.resuming import prepare_resume
    from hotloop.loop.run_folder import RunFolder
    from hotloop.loop.support import check_support

    folder = RunFolder.open(root)
    before = load_experiment(folder.experiment).experiment
    loaded = load_experiment(folder.experiment, settings, aliases=ALIASES)
    if explain:
        from hotloop.loop.explain import render_explanation

        click.echo(render_explanation(loaded))
        return 0
    experiment = loaded.experiment
    check_support(experiment)
    dataset = open_dataset(experiment)
    lock = folder.lock()
    try:
        say = _silence if quiet else _say
        resumption = prepare_resume(folder, before, experiment)
        for note in resumption.notes:
            say(f"note: {note}")
        if experiment != before:
            _write_experiment(folder, experiment)
        _prepare_policy(experiment, dataset, folder, say)
        say(resumption.plan.render())
        progress = _choose_progress(quiet)
        controller = _assemble(experiment, dataset, folder, resumption.checkpoint, progress, began)
        first = resumption.checkpoint[0].round + 1 if resumption.checkpoint else 0
        return _run(experiment, dataset, folder, controller, progress, first_round=first, quiet=quiet)
    finally:
        lock.close()


def _check_reward(experiment: Experiment, dataset: Dataset, folder: RunFolder, say: Any) -> None:
    """Score reference answers before any round: a reward that never says 1 is found now, not after a night.

    A function of the user's own and a remote service are first called by the rounds, which name the sample that fails.
    """
    if dataset.is_builtin or experiment.reward.kind not in ("deepscaler", "math", "exact"):
        return
    from hotloop.loop.assembly import open_verifier
    from hotloop.models.tokenizer import open_tokenizer
    from hotloop.verifiers.sanity import check_references

    template = open_tokenizer(folder.policy).chat_template if experiment.data.apply_chat_template else ""
    verifier = open_verifier(experiment, dataset)
    findings = asyncio.run(check_references(verifier, experiment.reward.kind, dataset.train, chat_template=template))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise InputError.of([Problem(each.code, each.why, each.where, each.do) for each in errors])
    for finding in findings:
        say(f"note: {finding}")


def _choose_folder(name: str, seed: int) -> Path:
    """First free `runs/<task>-seed<seed>[-n]`."""
    base = Path("runs") / f"{Path(name).stem}-seed{seed}"
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def _write_experiment(folder: RunFolder, experiment: Experiment, rehearsal: Rehearsal | None = None) -> None:
    from hotloop.experiment.choices import SCHEMA
    from hotloop.loop.provenance import describe_environment
    from hotloop.loop.run_folder import write_json

    content = {"schema": SCHEMA, "app": "hotloop", "choices": experiment.model_dump(mode="json")}
    content["run"] = describe_environment()
    if rehearsal is not None:
        from hotloop.loop.rehearsing import describe_account

        content["rehearsal"] = describe_account(rehearsal)
    write_json(folder.experiment, content)


def _prepare_policy(experiment: Experiment, dataset: Dataset, folder: RunFolder, say: Any) -> None:
    """Put the policy that training starts from into the run folder: made here, or a link to a directory."""
    laptop = experiment.laptop
    if folder.policy.exists():
        return
    if laptop.policy not in ("dense", "moe"):
        from hotloop.loop.assembly import read_policy_config

        directory = Path(laptop.policy).resolve()
        read_policy_config(directory)
        folder.policy.unlink(missing_ok=True)
        folder.policy.symlink_to(directory, target_is_directory=True)
        return
    from rich.console import Console

    from hotloop.loop.progress import WarmupProgress
    from hotloop.models.builtin import make_policy

    is_warmed = dataset.is_builtin and laptop.warmup_accuracy > 0
    with WarmupProgress(Console() if _is_terminal() and say is not _silence else None) as progress:
        report = make_policy(
            folder.policy,
            kind=laptop.policy,  # type: ignore[arg-type]  # one of the two names, by the test above
            seed=laptop.seed,
            items=[(str(task.prompt), task.label or "") for task in dataset.train] if is_warmed else (),
            gate=[(str(task.prompt), task.label or "") for task in dataset.gate] if is_warmed else (),
            warmup_accuracy=laptop.warmup_accuracy,
            warmup_max_steps=laptop.warmup_max_steps if is_warmed else 0,
            progress=progress,
        )
    how = "random weights"
    if report.warmup_steps:
        how = f"{report.warmup_steps} warm-up steps, sampled accuracy {report.gate_accuracy:.2f}"
        how += ", from the cache" if report.from_cache else f", made in {report.warmup_s:.1f} s"
    say(f"policy: {laptop.policy}, {report.num_params:,} parameters, {how}")


def _assemble(
    experiment: Experiment,
    dataset: Dataset,
    folder: RunFolder,
    checkpoint: tuple[LoopState, Path] | None,
    progress: Progress,
    began: float,
) -> Controller:
    from hotloop.loop.assembly import assemble

    return assemble(experiment, dataset, folder, progress=progress, began=began, checkpoint=checkpoint)


def _run(
    experiment: Experiment,
    dataset: Dataset,
    folder: RunFolder,
    controller: Controller,
    progress: Progress,
    *,
    first_round: int,
    quiet: bool,
) -> int:
    """Run the rounds with an interrupt that saves; print what came out."""

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)

        def interrupt() -> None:
            controller.stop.request()
            for number in numbers:  # a second one ends the process at once
                loop.remove_signal_handler(number)

        for number in numbers:
            loop.add_signal_handler(number, interrupt)
        return await controller.run()

    progress.started(first_round, experiment.rounds)
    try:
        is_finished = asyncio.run(run())
    finally:
        progress.closed()
    if not is_finished:
        from hotloop.loop.checkpoint import find_latest

        saved = find_latest(folder)
        what = "nothing was saved yet" if saved is None else f"saved after round {saved}"
        _say(f"interrupted; {what}. Continue with: hotloop run --resume {folder.root}", err=True)
        return EXIT_INTERRUPTED
    if not quiet:
        _print_summary(folder, experiment, dataset)
    return 0


def _choose_progress(quiet: bool) -> Progress:
    from hotloop.loop.progress import LiveProgress, PlainProgress, SilentProgress, UnbreakableProgress

    if quiet:
        return SilentProgress()
    if _is_terminal():
        from rich.console import Console

        return UnbreakableProgress(LiveProgress(Console()))
    return PlainProgress(_say)


def _print_summary(folder: RunFolder, experiment: Experiment, dataset: Dataset) -> None:
    import orjson

    from hotloop.units import format_seconds

    summary = orjson.loads(folder.summary.read_bytes())
    if summary["eval_greedy_after"] is not None:
        for name in ("greedy", "sampled"):
            before, after = summary[f"eval_{name}_before"], summary[f"eval_{name}_after"]
            _say(f"held-out accuracy, {name}: {before:.3f} -> {after:.3f}")
    _say(
        f"{summary['rounds']} rounds in {format_seconds(summary['wall_s'])}, "
        f"{summary['sampling_tokens_per_s']:,.0f} tokens/s sampled, {summary['train_tokens_per_s']:,.0f} trained"
    )
    _say(f"everything is in {folder.root}: summary.json, metrics.jsonl, rollouts/, checkpoints/")
    if dataset.suggestion and experiment.laptop.policy == "dense":
        _say(f"next: {dataset.suggestion}")
        _say("  or: hotloop run --set laptop.policy=moe")


def _is_terminal() -> bool:
    """Tell whether a person watches; a process that was started without a standard output has none."""
    return sys.stdout is not None and sys.stdout.isatty()


def _say(message: str, *, err: bool = False) -> None:
    """Print a line. An output that is gone (a closed pipe, a full disk) does not end the run: it gets no more."""
    try:
        click.echo(message, err=err)
    except OSError:
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _silence(message: str) -> None:
    """Say nothing."""
