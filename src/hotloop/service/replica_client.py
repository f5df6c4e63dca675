"""The gateway's line to one replica: commands out, a stream of statuses in.

Owns: the internal addresses and their bodies. Promises: every call carries the shared token and has a time limit.
Does not do: rollouts, which the data plane proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from hotloop.errors import ReplicaLost
from hotloop.service.hot_load_api import LoadRequest, ReplicaStatus

COMMAND_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 5.0
"""A replica sends its status at least every second; silence beyond this means that it hangs."""
OPENING_LIMIT_S = 60.0
"""The same for a replica that serves nothing yet: on a busy machine, loading an engine's libraries can stop its event
loop for many seconds, and killing it for that would have it begin again without end. Nobody waits for it meanwhile."""


class ReplicaClient:
    """Calls one replica."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"x-hotloop-replica-token": token}

    async def set_target(
        self,
        load_id: int,
        request: LoadRequest,
        *,
        policy_version: int | None,
        hints: dict[str, Any],
        may_activate: bool,
    ) -> None:
        """Ask for a snapshot, whose version is told where it is known already.

        Raises:
            ReplicaLost: it did not answer.
        """
        body = {
            "load_id": load_id,
            "request": request.to_json(),
            "policy_version": policy_version,
            "hints": hints,
            "may_activate": may_activate,
        }
        await self._post("/internal/target", body)

    async def activate(self, load_id: int) -> None:
        """Let a staged load swap."""
        await self._post("/internal/activate", {"load_id": load_id})

    async def cancel(self, load_id: int) -> None:
        """Give a load up before it swaps."""
        await self._post("/internal/cancel", {"load_id": load_id})

    async def statuses(self) -> AsyncIterator[ReplicaStatus]:
        """Yield every status that the replica sends, until the stream ends or falls silent.

        Raises:
            ReplicaLost: the stream broke or fell silent.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=COMMAND_TIMEOUT_S, sock_read=OPENING_LIMIT_S)
        limit_s = OPENING_LIMIT_S
        try:
            async with self._session.get(
                self._url + "/internal/events", headers=self._headers, timeout=timeout
            ) as answer:
                answer.raise_for_status()
                while True:
                    async with asyncio.timeout(limit_s):
                        line = await answer.content.readline()
                    if not line:
                        return
                    status = ReplicaStatus.from_wire(orjson.loads(line))
                    limit_s = SILENCE_LIMIT_S if status.readiness else OPENING_LIMIT_S
                    yield status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: half a line, or one too long
            raise ReplicaLost(
                "replica_lost", f"its status stream broke ({type(error).__name__})", where=self._url
            ) from None

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(total=COMMAND_TIMEOUT_S)
        try:
            async with self._session.post(
                self._url + path, data=orjson.dumps(body), headers=self._headers, timeout=timeout
            ) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ReplicaLost("replica_lost", f"{path} failed ({type(error).__name__})", where=self._url) from None
