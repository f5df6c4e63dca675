"""A child that must not outlive its parent: it ends when its standard input closes.

Owns: the environment variable that asks for it. Promises: works after a kill -9 of the parent, since the kernel closes
the pipe. A child that is stopped or stuck at that moment reads nothing; where the kernel knows a parent's death signal
(Linux), it is killed all the same, and so leaves the folders that it had locked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
VARIABLE = "HOTLOOP_EXIT_WITH_STDIN"


def end_with_stdin() -> None:
    """If the environment asks for it, send this process SIGTERM once its standard input ends."""
    if os.environ.get(VARIABLE):
        threading.Thread(target=_wait, name="parent-watch", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; without effect beyond Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
