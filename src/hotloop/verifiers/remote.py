"""A reward service: POST {prompt, response, label, task_id, metadata} to a URL, which answers {reward}.

Owns: the verifier and its one HTTP session.

Promises: connection errors, 429 and 5xx are tried again with growing pauses; what still fails is an error that names
the address and the rollout, never a reward of zero.
Does not do: batching; each rollout is one request, at most `max_connections` at a time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from hotloop.errors import RunError
from hotloop.types import Rollout, Score
from hotloop.verifiers.base import describe

DEFAULT_PAUSES_S = (0.5, 1.0, 2.0)
"""Pauses before the second, third and fourth try."""


class RemoteVerifier:
    """Asks a service."""

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        max_connections: int = 64,
        pauses_s: tuple[float, ...] = DEFAULT_PAUSES_S,
    ) -> None:
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        self._max_connections = max_connections
        self._pauses_s = pauses_s
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, rollout: Rollout) -> Score:
        """Ask for the reward of one rollout.

        Raises:
            RunError: code `reward_unreachable` or `reward_invalid`.
        """
        body = {
            "prompt": _plain(rollout.task.prompt),
            "response": rollout.response,
            "label": rollout.task.label,
            "task_id": rollout.task.task_id,
            "metadata": dict(rollout.task.metadata),
        }
        failure = ""
        for pause_s in (*self._pauses_s, None):
            try:
                async with self._open().post(self._url, json=body) as reply:
                    if reply.status == 200:
                        return self._read(await reply.json(content_type=None), rollout)
                    failure = f"HTTP {reply.status}: {(await reply.text())[:200]}"
                    if reply.status != 429 and reply.status < 500:
                        break
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise RunError(
            "reward_unreachable",
            f"{self._url} gave no reward ({failure})",
            where=describe(self.name, rollout),
            do="Start the reward service, or correct reward.url.",
            retryable=True,
        )

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._session

    def _read(self, answer: Any, rollout: Rollout) -> Score:
        reward = answer.get("reward") if isinstance(answer, dict) else answer
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise RunError(
                "reward_invalid",
                f"{self._url} answered {answer!r}, and a reward is one finite number under the key reward",
                where=describe(self.name, rollout),
                do='Answer {"reward": 0.5}.',
            )
        reason = str(answer.get("reason", "")) if isinstance(answer, dict) else ""
        return Score(float(reward), reason)


def _plain(prompt: Any) -> Any:
    """Give chat messages as plain JSON."""
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
