"""Keeps replica processes alive: starts them, follows their status, restarts them with backoff.

    per replica: start -> follow its status stream -> it ends or falls silent -> stop -> wait -> start again

One task a replica; produces membership updates and tells the deployment who joined, changed and was lost.
Promises: a replica that hangs (no status within its limit of silence) is killed; the wait between restarts doubles up
to a bound and is short again after a minute of health.
Does not do: what a replica loads (deployment.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from hotloop.errors import HotloopError, ReplicaLost
from hotloop.service.launchers.base import Launcher, ReplicaSpec, RunningReplica
from hotloop.service.membership import Member
from hotloop.service.replica_client import ReplicaClient

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
HEALTHY_AFTER_S = 60.0
STOP_GRACE_S = 5.0

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs one replica after another in one member's place."""

    def __init__(
        self,
        member: Member,
        spec: ReplicaSpec,
        launcher: Launcher,
        client_of: Callable[[Member], ReplicaClient],
        *,
        on_join: Callable[[Member], None],
        on_status: Callable[[Member], None],
        on_lost: Callable[[Member], None],
        on_restart: Callable[[Member], None],
    ) -> None:
        self._member = member
        self._spec = spec
        self._launcher = launcher
        self._client_of = client_of
        self._on_join = on_join
        self._on_status = on_status
        self._on_lost = on_lost
        self._on_restart = on_restart
        self._running: RunningReplica | None = None

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running is not None else None

    async def run(self) -> None:
        """Keep the replica alive until cancelled."""
        loop = asyncio.get_running_loop()
        wait_s = FIRST_WAIT_S
        try:
            while True:
                began = loop.time()
                try:
                    reason = await self._run_once()
                except Exception as error:  # a bug, or a machine without processes: the replica must still come back
                    logger.exception("replica %s", self._member.replica_id)
                    reason = f"{type(error).__name__}: {error}"
                self._member.lose("replica_lost", reason)
                self._on_lost(self._member)
                if loop.time() - began >= HEALTHY_AFTER_S:
                    wait_s = FIRST_WAIT_S
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)
                self._member.restarts += 1
                self._on_restart(self._member)
        finally:
            await self._stop()

    async def _run_once(self) -> str:
        """Start it and follow it; return why it is over."""
        try:
            self._running = await self._launcher.start(self._spec)
        except HotloopError as error:
            return str(error)
        member = self._member
        member.url = self._running.url
        ended = asyncio.ensure_future(self._running.wait())
        following = asyncio.ensure_future(self._follow())
        try:
            await asyncio.wait((ended, following), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"its process ended with {ended.result()}"
            return following.result()
        finally:
            for task in (ended, following):
                task.cancel()
            await asyncio.gather(ended, following, return_exceptions=True)
            await self._stop()

    async def _follow(self) -> str:
        loop = asyncio.get_running_loop()
        has_joined = False
        try:
            async for status in self._client_of(self._member).statuses():
                self._member.update(status, loop.time())
                if not has_joined:
                    has_joined = True
                    self._on_join(self._member)
                self._on_status(self._member)
        except ReplicaLost as error:
            return str(error)
        return "its status stream ended"

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                await running.stop(STOP_GRACE_S)
