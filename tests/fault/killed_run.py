"""A child process that runs an experiment and can be made to die at an exact moment inside a save.

Usage: killed_run.py DIE_AT ARGUMENTS...   DIE_AT: `never`, or `POINT:N` to die the N-th time that point is reached.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

POINTS = ("policy_saved", "optimizer_saved", "file_synced", "folder_synced", "before_tracker", "after_tracker", "line")


def arm(point: str, count: int) -> None:
    """Wrap the functions that a save goes through, so that the process kills itself at one of them."""
    import hotloop.loop.checkpoint as checkpoint
    from hotloop.telemetry.jsonl import JsonLines
    from hotloop.trainers.torch.trainer import TorchTrainer

    left = count

    def reached(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            reached(before)
            result = inner(*arguments, **named)
            reached(after)
            return result

        setattr(owner, name, wrapped)

    wrap(TorchTrainer, "save_policy", after="policy_saved")
    wrap(TorchTrainer, "save_optimizer", after="optimizer_saved")
    wrap(checkpoint, "_sync_file", after="file_synced")
    wrap(checkpoint, "sync_directory", after="folder_synced")
    wrap(checkpoint, "write_bytes", before="before_tracker", after="after_tracker")
    wrap(JsonLines, "append", after="line")


if __name__ == "__main__":
    die_at, *arguments = sys.argv[1:]
    if die_at != "never":
        name, _, number = die_at.partition(":")
        assert name in POINTS
        arm(name, int(number))
    from hotloop.cli.main import main

    main(arguments)
