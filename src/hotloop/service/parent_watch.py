"""A child that must not outlive its parent: it ends when its standard input closes.

Owns: the environment variable that asks for it. Promises: works after a kill -9 of the parent, since the kernel closes
the pipe.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "HOTLOOP_EXIT_WITH_STDIN"


def end_with_stdin() -> None:
    """If the environment asks for it, send this process SIGTERM once its standard input ends."""
    if os.environ.get(VARIABLE):
        threading.Thread(target=_wait, name="parent-watch", daemon=True).start()


def _wait() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
