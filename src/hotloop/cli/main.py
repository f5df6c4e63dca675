"""The command line: finds a command's module by its name and prints errors the same way everywhere.

Owns: the `hotloop` group, lazy loading (a module under `cli/` is imported only when its command is called or its
help is shown), exit codes, `--traceback`.
Does not do: anything that a command does.
"""

from __future__ import annotations

import importlib
import io
import os
import sys

import click

from hotloop import __version__
from hotloop.cli.pydantic_start import leave_out_plugins
from hotloop.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_INTERRUPTED, HotloopError, InputError, render_message

leave_out_plugins()

COMMANDS: dict[str, str] = {
    "run": "Run an experiment here, for real, at laptop size.",
    "eval": "Measure held-out accuracy of a run's checkpoint.",
    "policy": "Make a small built-in policy, or describe a policy directory.",
    "plan": "Show everything that follows from an experiment.",
    "check": "Check an experiment; exit 2 if it has errors.",
    "export": "Write the files that launch an experiment on a cluster.",
    "compare": "Compare two experiments.",
    "link": "Make a share link of an experiment, or read one.",
    "repair": "List or apply repairs of an experiment's errors.",
    "resume-plan": "Show what a resumed run will do.",
    "catalog": "List the models and GPUs the planner knows, or add one.",
    "schema": "Print the JSON schema of an experiment file.",
    "publish": "Publish snapshots into a bucket and look after them.",
    "snapshots": "Encode, apply and inspect deltas on plain directories.",
    "serve": "Serve rollouts from replicas with hot-loaded weights.",
    "hot-load": "Ask a deployment for a snapshot and watch it load.",
    "lab": "Open the page where an experiment is designed and rehearsed.",
}


class LazyGroup(click.Group):
    """A group whose commands live in modules of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if _module_exists(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or not _module_exists(cmd_name):
            return None
        module = importlib.import_module(_module_name(cmd_name))
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, COMMANDS[name]) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _module_name(command: str) -> str:
    return "hotloop.cli." + command.replace("-", "_")


def _module_exists(command: str) -> bool:
    return os.path.exists(os.path.join(os.path.dirname(__file__), command.replace("-", "_") + ".py"))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hotloop")
@click.option("--traceback", is_flag=True, help="Show where in the code an error arose.")
def root(traceback: bool) -> None:
    """Design, rehearse, launch and serve reinforcement-learning post-training of language models."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the code of docs/reference/cli.md."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wants_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the characters of a message shows ? for them
    try:
        outcome = root.main(args=arguments, prog_name="hotloop", standalone_mode=False)
    except HotloopError as error:
        if wants_traceback:
            raise
        problems = error.problems if isinstance(error, InputError) else ()
        for line in [str(problem) for problem in problems] or [str(error)]:
            click.echo(f"error: {line}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if wants_traceback:
            raise
        do = "Check the path, its rights and the free space."
        why = error.strerror or type(error).__name__
        click.echo(f"error: {render_message('io_failed', why, where=str(error.filename or ''), do=do)}", err=True)
        sys.exit(EXIT_ENVIRONMENT)
    sys.exit(outcome if isinstance(outcome, int) else 0)


if __name__ == "__main__":
    main()
