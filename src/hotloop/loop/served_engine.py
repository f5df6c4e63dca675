"""A deployment behind its HTTP address, seen through the Engine port.

Owns: turning a group's request into one HTTP request, pinned to the newest version that was loaded, and its answer into
completions with the versions and logprobs that the deployment declared; the connection, and the deployment itself when
the run started it.
Promises: tokens of an older version than the one that was waited for never come back (the pin refuses them); the
siblings of a group share an affinity key, so that they share a prefix.
Does not do: publishing (publishing.py), deciding when to load (weight_sync.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from hotloop.engines.base import Chunk, EngineInfo, GenerateRequest, WeightUpdate
from hotloop.errors import ServiceError
from hotloop.loop.deployment_process import DeploymentProcess
from hotloop.service.client import Client

LOAD_TIMEOUT_S = 600.0


@dataclass(slots=True)
class ServedEngine:
    """An engine that a deployment runs."""

    info: EngineInfo
    deployment: DeploymentProcess | None
    """Started at the first load; None: somebody else's deployment at `url`."""
    url: str = ""
    policy_version: int = -1
    """The newest version that every replica serves; -1 before the first."""
    _client: Client | None = None

    async def load(self, identity: str, policy_version: int) -> None:
        """Let every replica serve a published snapshot, and pin what is sampled from now on to it.

        Raises:
            ServiceError: a replica cannot load it; the message is the replica's.
            RunError: code `deployment_failed`.
        """
        if self._client is None:
            if self.deployment is not None:
                self.url = await self.deployment.start()
            self._client = await Client(self.url).__aenter__()
        await self._client.load(identity, wait=True, timeout_s=LOAD_TIMEOUT_S, allow_rewind=True)
        self.policy_version = policy_version

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Ask for all completions of a group in one request; chunks come whole."""
        assert self._client is not None, "a snapshot is loaded before anything is sampled"
        params = request.params
        fields: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
        }
        if params.stop:
            fields["stop"] = list(params.stop)
        if params.stop_token_ids:
            fields["stop_token_ids"] = list(params.stop_token_ids)
        seed = request.seeds[0] if request.seeds else params.seed
        if seed is not None:
            fields["seed"] = seed % 2**63
        completions = await self._client.complete(
            request.prompt_ids,
            n=request.n,
            session_id=request.request_id,
            min_version=max(0, self.policy_version),
            **fields,
        )
        for index, completion in enumerate(completions):
            yield Chunk(request.request_id, index, completion, True, completion.finish_reason)

    async def abort(self, request_id: str) -> None:
        """Do nothing: a request that nobody waits for is aborted when its connection closes."""

    async def pause(self) -> None:
        """Do nothing: replicas pause themselves around an install."""

    async def resume(self) -> None:
        """Do nothing; see `pause`."""

    async def write_weights(self, update: WeightUpdate) -> None:
        """Refuse: weights travel through a bucket.

        Raises:
            ServiceError: `engine_error`, always.
        """
        raise ServiceError("engine_error", "a deployment takes its weights from a bucket, not from a call")

    async def close(self) -> None:
        """Hang up, and end the deployment if the run started it."""
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
        if self.deployment is not None:
            await self.deployment.stop()
