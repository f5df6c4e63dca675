"""New weights on their way to whoever samples with them.

Owns: the WeightSync port and its colocated form, which copies the trainer's parameters into the engine in place.

    trainer.weights() --+--> engine.pause -> write_weights -> resume
                        +--> publisher (a bucket), when the run publishes

Promises: when `push` returns, every token sampled from then on carries the new policy version; a failed push leaves the
engine at the version it had.
Does not do: deciding when (controller.py), the formats in a bucket (snapshots/).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hotloop.engines.base import Engine, WeightUpdate
from hotloop.trainers.base import Trainer

IDENTITY_FORMAT = "step{:06d}"


def make_identity(policy_version: int) -> str:
    """Name of a policy version's snapshot."""
    return IDENTITY_FORMAT.format(policy_version)


class WeightSync(Protocol):
    """Brings the trainer's weights to the sampler."""

    async def push(self, policy_version: int) -> Mapping[str, float]:
        """Install the current weights under a version and return `perf/` numbers of the transfer."""
        ...


@dataclass(slots=True)
class InMemorySync:
    """Trainer and engine in one process: a copy from one parameter arena to the other."""

    trainer: Trainer
    engine: Engine

    async def push(self, policy_version: int) -> Mapping[str, float]:
        update = WeightUpdate(policy_version, make_identity(policy_version), tensors=self.trainer.weights())
        await self.engine.pause()
        try:
            await self.engine.write_weights(update)
        finally:
            await self.engine.resume()
        return {}


@dataclass(frozen=True, slots=True)
class Pushed:
    """One published version."""

    identity: str
    kind: str
    """`anchor` or `delta`."""
    stored_bytes: int
    """Bytes in the bucket."""
    changed_frac: float
    """Share of bytes that differ from the version before."""


Publish = Callable[[Mapping[str, Any], str, int, bool], Pushed]
"""Publishes (tensors, identity, policy version, as an anchor)."""


@dataclass(slots=True)
class NoCopy:
    """The sampler takes its weights from a bucket: nothing is copied to it."""

    async def push(self, policy_version: int) -> Mapping[str, float]:
        return {}


@dataclass(slots=True)
class HotLoadSync:
    """Another sync that publishes, and then every replica of a deployment moves to what it published."""

    inner: WeightSync
    load: Callable[[str, int], Awaitable[None]]
    """Loads (identity, policy version) everywhere and returns when it is served."""

    async def push(self, policy_version: int) -> Mapping[str, float]:
        numbers = dict(await self.inner.push(policy_version))
        began = time.perf_counter()
        await self.load(make_identity(policy_version), policy_version)
        numbers["perf/hot_load_time"] = time.perf_counter() - began
        return numbers


@dataclass(slots=True)
class PublishingSync:
    """Another sync, and then the same weights into a bucket: an anchor first, then deltas."""

    inner: WeightSync
    trainer: Trainer
    publish: Publish
    on_published: Callable[[int, Pushed], None]
    needs_anchor: bool = True

    async def push(self, policy_version: int) -> Mapping[str, float]:
        numbers = dict(await self.inner.push(policy_version))
        # Trainer and engine wait meanwhile, so the weights do not change under the publisher's thread.
        pushed = await asyncio.to_thread(
            self.publish, self.trainer.weights(), make_identity(policy_version), policy_version, self.needs_anchor
        )
        self.needs_anchor = False
        self.on_published(policy_version, pushed)
        numbers["perf/update_weights_density"] = pushed.changed_frac
        numbers["perf/update_weights_wire_bytes"] = pushed.stored_bytes
        return numbers
