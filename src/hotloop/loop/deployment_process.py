"""The deployment that a `separate` run starts for itself: `hotloop serve` as a child process.

Owns: its file, its first line, its end. Promises: it ends with the run, also when the run is killed (its standard input
closes); what it says goes to `deployment/serve.log` in the run folder.
Does not do: weights (served_sync.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.errors import RunError

SERVED_NAME = "policy"
START_TIMEOUT_S = 60.0
STOP_GRACE_S = 15.0
LAST_WORDS_BYTES = 2000


@dataclass(slots=True)
class DeploymentProcess:
    """One child running `hotloop serve`."""

    folder: Path
    """Its config, state and log."""
    bucket: str
    replicas: int
    engine: dict[str, Any] = field(default_factory=dict)
    """The keys of `engine:` in the deployment's file."""
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None
    """Its further output, read and dropped: `wait` ends only when the pipe does, and a full one never ends."""

    async def start(self) -> str:
        """Start it and return its address.

        Raises:
            RunError: code `deployment_failed`, with its last words.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        config = {
            "bucket": self.bucket,
            "served_model_name": SERVED_NAME,
            "replicas": self.replicas,
            "state_dir": str((self.folder / "state").absolute()),
            "cache_dir": str((self.folder / "cache").absolute()),
            "engine": self.engine,
        }
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(config, indent=2) + "\n")  # JSON is YAML
        log = self.folder / "serve.log"
        with log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "hotloop.cli.main", "serve", str(path), "--port", "0"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=out,
                env={**os.environ, "HOTLOOP_EXIT_WITH_STDIN": "1"},
                start_new_session=True,  # Ctrl-C is for the run, which then stops the deployment in order
            )
        out_pipe = self._process.stdout
        assert out_pipe is not None
        try:
            try:
                line = await asyncio.wait_for(out_pipe.readline(), START_TIMEOUT_S)
            finally:
                self._reading = asyncio.create_task(_drop(out_pipe))
            url = json.loads(line)["url"]
        except (TimeoutError, ValueError, KeyError, TypeError) as error:
            await self.stop()
            words = log.read_bytes()[-LAST_WORDS_BYTES:].decode("utf-8", "replace").strip()
            raise RunError(
                "deployment_failed", f"the deployment did not start: {words or type(error).__name__}", where=str(log)
            ) from None
        return str(url)

    async def stop(self) -> None:
        """Ask it to end, then end it."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _drop(stream: asyncio.StreamReader) -> None:
    """Read to the end and keep nothing."""
    while await stream.read(1 << 16):
        pass
