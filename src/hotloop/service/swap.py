"""One install into a serving engine: made ready while tokens are drawn, then written in one pause.

    prepare(engine, staged) ......................... Swap.run()
    ranges, positions, casts: in threads               pause, write, resume
    old weights serve, nothing changes                 nothing else: no file, no decoding

Owns: turning staged content into an engine's update, and the order of pause, write and resume.
Promises: an update that does not fit is refused by `prepare`, when nothing has been touched; an update without bytes
pauses nothing; `run` says whether an engine that failed still has its old weights.
Does not do: staging, drains, journals, identities (reconciler.py).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotloop.engines.base import Engine, PreparesWeights, TensorRange, WeightUpdate
from hotloop.errors import HotloopError, ServiceError
from hotloop.snapshots.materialize import StagedSnapshot


@dataclass(frozen=True, slots=True)
class Swap:
    """Everything that an install needs, ready."""

    engine: Engine
    update: WeightUpdate
    prepared: Any = None
    """What an engine of kind `PreparesWeights` made of the update."""

    async def run(self) -> float:
        """Pause, write and go on.

        Returns: seconds that generation was held, from the end of the running step on; 0.0 for an update without bytes.

        Raises:
            ServiceError: `engine_error` when the engine refused and still runs on its old weights.
            HotloopError: anything else leaves weights that cannot be trusted.
        """
        has_bytes = bool(self.update.ranges)
        if isinstance(self.engine, PreparesWeights):
            held_s = await self.engine.swap_weights(self.prepared)
            return held_s if has_bytes else 0.0
        if not has_bytes:
            await self.engine.write_weights(self.update)
            return 0.0
        return await _pause_and_write(self.engine, self.update)


async def prepare(engine: Engine, staged: StagedSnapshot, policy_version: int) -> Swap:
    """Make an install ready; the engine goes on drawing tokens from its old weights.

    Raises:
        HotloopError: `install_failed`, the content does not fit the engine; nothing changed.
    """
    ranges = await asyncio.to_thread(list_ranges, staged)
    update = WeightUpdate(policy_version, staged.identity, ranges=ranges)
    if isinstance(engine, PreparesWeights):
        return Swap(engine, update, await engine.prepare_weights(update))
    return Swap(engine, update)


async def _pause_and_write(engine: Engine, update: WeightUpdate) -> float:
    await engine.pause()
    began = time.perf_counter()
    try:
        await engine.write_weights(update)
    except ServiceError as error:
        if error.code == "engine_error":
            try:
                await engine.resume()
            except HotloopError as silent:
                raise ServiceError("install_failed", f"{error}; it does not go on either: {silent}") from error
        raise
    try:
        await engine.resume()
    except ServiceError as error:
        raise ServiceError("install_failed", f"the engine does not go on after the write: {error}") from error
    return time.perf_counter() - began


def list_ranges(staged: StagedSnapshot) -> list[TensorRange]:
    """Turn staged content into byte ranges for an engine; whole tensors are one range."""
    if staged.base is None:
        zero = np.zeros(1, np.int64)
        return [
            TensorRange(name, zero, np.array([tensor.nbytes], np.int64), tensor.data)
            for name, tensor in staged.tensors.items()
            if tensor.nbytes
        ]
    return [
        TensorRange(change.name, change.ranges[:, 0], change.ranges[:, 1] - change.ranges[:, 0], change.data)
        for change in staged.changes
    ]
