"""`hotloop lab`: the page where an experiment is designed, understood and rehearsed.

Owns: the socket, the token of this start, the first line on stdout (the address, for people and for tests).
Does not do: routes (lab/server.py).
"""

from __future__ import annotations

import secrets
import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.lab_address import DEFAULT_PORT
from hotloop.errors import EXIT_ENVIRONMENT, HotloopError

if TYPE_CHECKING:
    from types import FrameType

    from hotloop.experiment.choices import Experiment
    from hotloop.experiment.rehearsal import Rehearsal


@click.command(name="lab")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs") / "lab",
    show_default=True,
    help="Folder that rehearsals are kept in.",
)
def command(port: int, no_open: bool, runs: Path) -> None:
    """Open the page where an experiment is designed and rehearsed.

    The server answers only on this machine. The first line printed is the address; it carries a token that is made
    anew at every start.
    """
    import uvicorn

    from hotloop.cli.planner_input import read_build, read_resume_facts
    from hotloop.lab.answers import set_resume_reader
    from hotloop.lab.runs import RunShelf
    from hotloop.lab.server import create_app

    listener = _listen(port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    app = create_app(token=token, port=port, shelf=RunShelf(runs.resolve()), build=read_build(), rehearse=_rehearse)
    set_resume_reader(read_resume_facts)
    address = f"http://127.0.0.1:{port}/?token={token}"
    click.echo(address)
    if not no_open:
        webbrowser.open(address)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Let open event streams end by themselves before uvicorn waits for them."""
            app.state.runs.is_closing = True
            super().handle_exit(sig, frame)

    with listener:
        Server(config).run(sockets=[listener])


def _rehearse(experiment: Experiment) -> Rehearsal:
    """Make the laptop form that `hotloop run` makes here."""
    from hotloop.experiment.rehearsal import laptop_form
    from hotloop.loop.support import is_supported

    return laptop_form(experiment, is_supported=is_supported, has_file=lambda path: Path(path).is_file())


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise HotloopError(
            "port_taken",
            f"port {port} cannot be used ({error.strerror})",
            where=f"--port {port}",
            do="Give another port, or 0 for any free one.",
            exit_code=EXIT_ENVIRONMENT,
        ) from error
    listener.listen(128)
    return listener
