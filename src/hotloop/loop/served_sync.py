"""New weights to a deployment: published into a bucket, then hot-loaded by every replica.

    trainer.weights() -> anchor | delta -> bucket -> POST -> every replica done -> sampling goes on

Owns: the order of these steps for the layouts `separate` (the run starts the deployment) and `external` (it exists).
Promises: when `push` returns, every replica serves the pushed version; a push that fails ends the run with the
replica's reason.
Does not do: the snapshot's format (snapshots/), the requests (served_engine.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hotloop.loop.deployment_process import DeploymentProcess
from hotloop.loop.served_engine import ServedEngine
from hotloop.loop.weight_sync import Publish, make_identity
from hotloop.service.client import Client
from hotloop.trainers.base import Trainer

LOAD_TIMEOUT_S = 600.0


@dataclass(slots=True)
class ServedSync:
    """The weight sync of a run whose rollouts come over HTTP."""

    trainer: Trainer
    engine: ServedEngine
    publish: Publish
    deployment: DeploymentProcess | None
    """None: somebody else's deployment at `url`."""
    url: str = ""
    needs_anchor: bool = True

    async def push(self, policy_version: int) -> Mapping[str, float]:
        """Publish, load everywhere, and pin sampling to the new version."""
        identity = make_identity(policy_version)
        began = time.perf_counter()
        published = await asyncio.to_thread(
            self.publish, self.trainer.weights(), identity, policy_version, self.needs_anchor
        )
        uploaded = time.perf_counter()
        self.needs_anchor = False
        if self.engine.client is None:
            if self.deployment is not None:
                self.url = await self.deployment.start()
            self.engine.client = await Client(self.url).__aenter__()
        await self.engine.client.load(identity, wait=True, timeout_s=LOAD_TIMEOUT_S, allow_rewind=True)
        self.engine.policy_version = policy_version
        return {
            "perf/update_weights_density": published.changed_frac,
            "perf/update_weights_wire_bytes": published.stored_bytes,
            "perf/publish_time": uploaded - began,
            "perf/hot_load_time": time.perf_counter() - uploaded,
        }

    async def close(self) -> None:
        """Hang up, and end the deployment if the run started it."""
        if self.engine.client is not None:
            await self.engine.client.__aexit__(None, None, None)
            self.engine.client = None
        if self.deployment is not None:
            await self.deployment.stop()
