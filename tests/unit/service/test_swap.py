"""An install into a serving engine: ready beforehand, one pause, and what is said of an engine that fails in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop.engines.base import WeightUpdate
from hotloop.engines.fake import FakeEngine
from hotloop.errors import HotloopError, ServiceError
from hotloop.service.background import Background, choose_workers
from hotloop.service.swap import list_ranges, prepare
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.chain import Held as Name
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.materialize import StagedSnapshot, rebuild, stage
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader


class Held:
    """What a replica holds, as `stage` reads it."""

    def __init__(self, staged: StagedSnapshot) -> None:
        self.held = Name(staged.identity, staged.digest)
        self.tensors = staged.tensors
        assert staged.manifest is not None
        self.adler32 = {name: entry.adler32 for name, entry in staged.manifest.tensors.items()}


def publish(root: Path, *versions: dict[str, np.ndarray[Any, Any]]) -> SnapshotReader:
    bucket = open_bucket(f"file://{root}/bucket")
    publisher = Publisher(bucket, PublishSettings(full_every=0))
    for number, tensors in enumerate(versions, 1):
        records = {name: ("F32", array.shape, array.view(np.uint8).reshape(-1).data) for name, array in tensors.items()}
        publisher.publish(records, f"step{number:06d}", number, extras={"config.json": b"{}"})
    return SnapshotReader(bucket)


def staged_pair(root: Path) -> tuple[StagedSnapshot, StagedSnapshot, np.ndarray[Any, Any]]:
    """An anchor, and a delta of elements 3 and 40 on it; also the new tensor."""
    old = np.arange(64, dtype=np.float32)
    new = old.copy()
    new[[3, 40]] = -1.0
    reader = publish(root, {"w": old}, {"w": new})
    anchor = rebuild("step000001", reader)
    delta = stage("step000002", reader, MemoryFetcher(reader.bucket), held=Held(anchor))
    return anchor, delta, new


def test_a_delta_becomes_the_ranges_around_its_changes(tmp_path: Path) -> None:
    anchor, delta, new = staged_pair(tmp_path)
    (one,) = list_ranges(delta)
    assert (one.name, one.offsets.tolist(), one.lengths.tolist()) == ("w", [8, 160], [8, 8])
    assert bytes(one.data) == new[2:4].tobytes() + new[40:42].tobytes()
    (whole,) = list_ranges(anchor)
    assert (whole.offsets.tolist(), whole.lengths.tolist()) == ([0], [256])


class ScriptedEngine(FakeEngine):
    """Notes what it is asked, and fails where it is told to."""

    def __init__(self, failing: dict[str, HotloopError] | None = None) -> None:
        super().__init__(vocab_size=8)
        self.log: list[str] = []
        self.failing = failing or {}

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.failing:
            raise self.failing[what]

    async def pause(self) -> None:
        self._note("pause")

    async def resume(self) -> None:
        self._note("resume")

    async def write_weights(self, update: WeightUpdate) -> None:
        self._note("write")


class PreparingEngine(ScriptedEngine):
    """The same with work that it does beforehand."""

    async def prepare_weights(self, update: WeightUpdate) -> str:
        self._note("prepare")
        return f"ready for {update.policy_version}"

    async def swap_weights(self, prepared: str) -> float:
        self._note(f"swap, {prepared}")
        return 0.25


def test_an_engine_that_prepares_is_only_told_to_swap_when_it_is_time(tmp_path: Path) -> None:
    engine, (_, delta, _) = PreparingEngine(), staged_pair(tmp_path)

    async def scenario() -> float:
        swap = await prepare(engine, delta, 2)
        assert engine.log == ["prepare"]
        return await swap.run()

    assert asyncio.run(scenario()) == 0.25
    assert engine.log == ["prepare", "swap, ready for 2"]


def test_another_engine_is_paused_for_the_write_alone(tmp_path: Path) -> None:
    engine, (_, delta, _) = ScriptedEngine(), staged_pair(tmp_path)

    async def scenario() -> float:
        swap = await prepare(engine, delta, 2)
        assert engine.log == []
        return await swap.run()

    assert asyncio.run(scenario()) > 0
    assert engine.log == ["pause", "write", "resume"]


@pytest.mark.parametrize("make", [ScriptedEngine, PreparingEngine])
def test_a_delta_without_changes_holds_nothing(tmp_path: Path, make: type[ScriptedEngine]) -> None:
    same = {"w": np.ones(4, np.float32)}
    reader = publish(tmp_path, same, same)
    delta = stage("step000002", reader, MemoryFetcher(reader.bucket), held=Held(rebuild("step000001", reader)))
    engine = make()

    async def scenario() -> float:
        return await (await prepare(engine, delta, 2)).run()

    assert delta.is_empty and asyncio.run(scenario()) == 0.0
    assert "pause" not in engine.log


REFUSED = ServiceError("engine_error", "said no")
LOST = ServiceError("install_failed", "said nothing")


@pytest.mark.parametrize(
    ("failing", "code", "log"),
    [
        ({"write": REFUSED}, "engine_error", ["pause", "write", "resume"]),
        ({"write": REFUSED, "resume": REFUSED}, "install_failed", ["pause", "write", "resume"]),
        ({"write": LOST}, "install_failed", ["pause", "write"]),
        ({"resume": REFUSED}, "install_failed", ["pause", "write", "resume"]),
    ],
)
def test_only_a_refusal_of_an_engine_that_goes_on_leaves_the_old_weights(
    tmp_path: Path, failing: dict[str, HotloopError], code: str, log: list[str]
) -> None:
    engine, (_, delta, _) = ScriptedEngine(failing), staged_pair(tmp_path)

    async def scenario() -> None:
        await (await prepare(engine, delta, 2)).run()

    with pytest.raises(HotloopError) as caught:
        asyncio.run(scenario())
    assert caught.value.code == code and engine.log == log


def test_an_update_that_does_not_fit_is_refused_before_the_pause(tmp_path: Path) -> None:
    misfit = HotloopError("install_failed", "no such tensor")
    engine, (_, delta, _) = PreparingEngine({"prepare": misfit}), staged_pair(tmp_path)
    with pytest.raises(HotloopError) as caught:
        asyncio.run(prepare(engine, delta, 2))
    assert caught.value is misfit and engine.log == ["prepare"]


# ---- the thread of a load


@pytest.mark.parametrize(
    ("cores", "engine_threads", "workers"), [(2, 1, 1), (1, 1, 1), (4, 8, 1), (8, 2, 6), (64, 4, 8)]
)
def test_a_load_leaves_the_engine_its_cores(cores: int, engine_threads: int, workers: int) -> None:
    assert choose_workers(cores, engine_threads) == workers


def test_work_in_the_background_keeps_its_order_and_its_errors() -> None:
    log: list[int] = []

    def note(number: int) -> int:
        log.append(number)
        return -number

    async def scenario() -> list[Any]:
        background = Background()
        return await asyncio.gather(
            *(background.run(note, number) for number in range(5)), background.run(int, "x"), return_exceptions=True
        )

    *values, error = asyncio.run(scenario())
    assert values == [0, -1, -2, -3, -4] and log == [0, 1, 2, 3, 4] and isinstance(error, ValueError)
