"""What the planner's commands share: reading an experiment, asking for its plan, and asking git about this package.

Owns: the options `--set`, `--preset`, `--catalog` and `--host-ram`, `open_experiment`, `open_plan`, `read_build`.
Whatever touches a disk or a process for the planner happens here, because `experiment/` is pure.
"""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from hotloop.errors import EXIT_BAD_INPUT, InputError

if TYPE_CHECKING:
    from hotloop.experiment.catalog.records import Catalog
    from hotloop.experiment.choices import Experiment
    from hotloop.experiment.plan import Plan
    from hotloop.experiment.provenance import BuildInfo
    from hotloop.experiment.records import Finding
    from hotloop.experiment.rules import ResumeFacts

_F = TypeVar("_F", bound=Callable[..., Any])

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest checkpoint of a folder (Megatron)."""


def short_lived(function: _F) -> _F:
    """Let a command that ends in a moment run and exit without garbage collection, a tenth of its time each.

    At exit everything that is still alive is set aside, so that the interpreter's last collections have nothing to
    walk; it is freed with the process.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        atexit.register(gc.freeze)
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return cast(_F, run)


@dataclass(frozen=True)
class Opened:
    """A plan, and the catalogue that it was made with."""

    plan: Plan
    catalog: Catalog


def experiment_options(command: _F) -> _F:
    """Add FILE, `--preset`, `--set` and `--catalog` to a command."""
    for add in (
        click.option(
            "--catalog",
            "catalogs",
            multiple=True,
            type=click.Path(path_type=Path, dir_okay=False),
            help="A TOML file with more models or GPUs, as `hotloop catalog add` writes it. Repeatable.",
        ),
        click.option(
            "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one choice after reading. Repeatable."
        ),
        click.option(
            "--preset", metavar="NAME", help="Start from a preset (start, scale, agent, laptop) without a file."
        ),
        click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False)),
    ):
        command = add(command)
    return command


def host_ram_option(command: _F) -> _F:
    """Add `--host-ram` to a command whose answer depends on what fits into a node."""
    return click.option(
        "--host-ram",
        "host_ram_gb",
        type=click.FloatRange(min=0, min_open=True),
        default=1500.0,
        show_default=True,
        metavar="GB",
        help="Host memory of one node, in 10^9 bytes.",
    )(command)


def open_experiment(file: Path | None, preset: str | None, settings: Sequence[str] = ()) -> Experiment:
    """Read FILE, or a preset, or the defaults, and apply the settings.

    Raises: InputError with every problem; `two_inputs` when a file and a preset are both given.
    """
    from hotloop.experiment.load import load_experiment
    from hotloop.experiment.presets import find_preset

    if file is not None and preset is not None:
        raise InputError(
            "two_inputs", "a file and a preset are both given", where=str(file), do="Leave one of them out."
        )
    base = find_preset(preset) if preset is not None else None
    return load_experiment(file, settings, base=base, base_name=f"preset {preset}").experiment


def open_catalog(catalogs: Sequence[Path]) -> Catalog:
    """Return the packaged catalogue with the user's tables."""
    from hotloop.experiment.catalog.load import load_catalog

    return load_catalog(catalogs)


def open_plan(experiment: Experiment, catalogs: Sequence[Path], host_ram_gb: float) -> Opened:
    """Plan an experiment; a resumed one is planned with what its folder says, if the folder is here."""
    from hotloop.experiment.plan import build_plan

    catalog = open_catalog(catalogs)
    resume, host_ram_bytes = read_resume_facts(experiment), round(host_ram_gb * 10**9)
    return Opened(build_plan(experiment, catalog=catalog, resume=resume, host_ram_bytes=host_ram_bytes), catalog)


def read_resume_facts(experiment: Experiment) -> ResumeFacts | None:
    """Read the tracker file of `resume_from`, or return None where there is no such folder on this machine."""
    from hotloop.experiment.rules import ResumeFacts

    if not experiment.resume_from:
        return None
    folder = Path(experiment.resume_from)
    if not folder.is_dir():
        return None
    tracker = folder / TRACKER
    if not tracker.is_file():
        return ResumeFacts(None)
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal():
        raise InputError(
            "tracker_invalid",
            f"holds {text[:40]!r}, and a tracker holds the number of an iteration",
            where=str(tracker),
            do="Restore the file, or set resume_from to a whole checkpoint folder.",
        )
    return ResumeFacts(int(text))


def read_json(path: Path, *, do: str) -> Any:
    """Read a JSON file. Raises: InputError `bad_json`, `duplicate_key`."""
    from hotloop.experiment.json_text import parse_json

    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("bad_json", f"is not UTF-8 text ({error.reason})", where=str(path), do=do) from None
    return parse_json(text, where=str(path), do=do)


def read_build() -> BuildInfo:
    """Ask git for the state of the package, where it lies in a repository that tracks it."""
    from hotloop.experiment.provenance import read_build_info

    return read_build_info(_run_git)


def _run_git(args: Sequence[str]) -> str | None:
    import subprocess

    package = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(package), *args], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def print_errors(errors: Sequence[Finding]) -> None:
    """Write every error to standard error, one line each."""
    for error in errors:
        click.echo(f"error: {error.message}", err=True)


def exit_bad_input() -> None:
    """End the command with the exit code of bad input, after its errors were printed."""
    click.get_current_context().exit(EXIT_BAD_INPUT)
