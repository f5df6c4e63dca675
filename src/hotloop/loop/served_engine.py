"""A deployment behind its HTTP address, seen through the Engine port.

Owns: turning a group's request into one HTTP request, pinned to the newest version that was loaded, and its answer into
completions with the versions and logprobs that the deployment declared.
Promises: tokens of an older version than the one that was waited for never come back (the pin refuses them); the
siblings of a group share an affinity key, so that they share a prefix.
Does not do: moving weights (served_sync.py), starting processes (deployment_process.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from hotloop.engines.base import Chunk, EngineInfo, GenerateRequest, WeightUpdate
from hotloop.errors import ServiceError
from hotloop.service.client import Client


@dataclass(slots=True)
class ServedEngine:
    """An engine that somebody else runs."""

    info: EngineInfo
    client: Client | None = None
    """Set once the deployment answers."""
    policy_version: int = -1
    """The newest version that every replica serves."""

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Ask for all completions of a group in one request; chunks come whole."""
        assert self.client is not None, "weights are pushed before anything is sampled"
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
        completions = await self.client.complete(
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
        """Refuse: weights travel through a bucket."""
        raise ServiceError("engine_error", "a deployment takes its weights from a bucket, not from a call")

    async def close(self) -> None:
        """Do nothing: the connection belongs to the sync."""
