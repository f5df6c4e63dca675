"""Replicas as child processes of the gateway, on loopback.

Owns: the command line, the environment (the token travels there), the first stdout line, and the end: SIGTERM, then
SIGKILL. A child also ends by itself when its standard input closes, so that a killed gateway leaves no replica behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import orjson

from hotloop.errors import ServiceError
from hotloop.service.launchers.base import ReplicaSpec, RunningReplica

START_TIMEOUT_S = 120.0
LAST_WORDS_BYTES = 2000


@dataclass(slots=True)
class LocalReplica:
    """One child process."""

    process: asyncio.subprocess.Process
    _url: str
    _reading: asyncio.Task[None]
    """Its further output, read and dropped: `wait` ends only when the pipe does, and a full one never ends."""

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> int:
        return await self.process.wait()

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, then end it."""
        if self.process.returncode is not None:
            return
        try:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), grace_s)
        except ProcessLookupError:
            pass  # it ended by itself between the look and the signal
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


class LocalLauncher:
    """Starts replicas with this interpreter."""

    async def start(self, spec: ReplicaSpec) -> RunningReplica:
        """Start one child and read its first line.

        Raises:
            ServiceError: `replica_start_failed`.
        """
        log: IO[bytes] | None = None
        if spec.log_path:
            Path(spec.log_path).parent.mkdir(parents=True, exist_ok=True)
            log = open(spec.log_path, "ab")  # noqa: SIM115  # the child writes to it; closed below once it is inherited
        environment = {
            **os.environ,
            **spec.secrets,
            "HOTLOOP_REPLICA_TOKEN": spec.token,
            "HOTLOOP_EXIT_WITH_STDIN": "1",
        }
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "hotloop.service.replica_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        finally:
            if log is not None:
                log.close()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(orjson.dumps(spec.settings) + b"\n")
        try:
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
            url = orjson.loads(line)["url"]
        except (TimeoutError, ValueError, KeyError, TypeError, ConnectionError) as error:
            if process.returncode is None:
                process.kill()
            await _drop(process.stdout)
            code = await process.wait()
            raise ServiceError(
                "replica_start_failed",
                f"replica {spec.replica_id} did not start (exit code {code}, {type(error).__name__})"
                + _last_words(spec.log_path),
                do="See its log.",
            ) from None
        except BaseException:  # a cancelled start too must leave no child behind
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        return LocalReplica(process, url, asyncio.create_task(_drop(process.stdout)))


def _last_words(log_path: str) -> str:
    if not log_path or not Path(log_path).exists():
        return ""
    tail = Path(log_path).read_bytes()[-LAST_WORDS_BYTES:].decode("utf-8", "replace").strip()
    return f"; its last words: {tail}" if tail else ""


async def _drop(stream: asyncio.StreamReader) -> None:
    """Read to the end and keep nothing."""
    while await stream.read(1 << 16):
        pass
