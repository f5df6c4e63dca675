"""An exchange of weights lies directly between two steps: after one, ahead of its deliveries, before the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import engine_policies as policies
import pytest
import torch

from hotloop.engines.base import EngineSettings, GenerateRequest, PreparesWeights, TensorRange, WeightUpdate
from hotloop.engines.torch import driver as driver_module
from hotloop.engines.torch.driver import InlineDriver, ThreadDriver
from hotloop.engines.torch.engine import TorchEngine
from hotloop.engines.torch.install import InstallPlan
from hotloop.errors import HotloopError
from hotloop.types import SamplingParams


class ScriptedCore:
    """Two steps; the first waits until something is to be exchanged."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.num_steps = 0
        self.is_first_running, self.may_end = threading.Event(), threading.Event()

    @property
    def has_work(self) -> bool:
        return self.num_steps < 2

    def step(self) -> list[Any]:
        self.num_steps += 1
        if self.num_steps == 1:
            self.is_first_running.set()
            assert self.may_end.wait(30)
        self.log.append(f"step {self.num_steps}")
        return [f"events {self.num_steps}"]


class Clock:
    """Stands still unless somebody moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


async def exchange_during_first_step(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], log: list[str]
) -> tuple[float, Clock]:
    clock = Clock()
    monkeypatch.setattr(driver_module, "time", clock)
    core = ScriptedCore(log)
    is_delivered = threading.Event()

    def deliver(events: list[Any]) -> None:
        log.append(f"deliver {events[0]}")
        is_delivered.set()

    def fail(error: BaseException) -> None:
        raise error

    driver = ThreadDriver(core, deliver, fail, lambda: True)  # type: ignore[arg-type]  # scripted

    def exchange() -> None:
        # The event loop is free: what was delivered before would be seen by now.
        log.append("exchange, " + ("late" if is_delivered.wait(0.3) else "first"))
        clock.now += 0.25
        work()

    driver.post(lambda: None)
    await asyncio.to_thread(core.is_first_running.wait, 30)
    driver.post(lambda: log.append("posted"))
    asking = asyncio.create_task(driver.exchange(exchange))
    await asyncio.sleep(0)
    core.may_end.set()
    try:
        return await asyncio.wait_for(asking, 30), clock
    finally:
        await driver.close()


def test_an_exchange_goes_ahead_of_deliveries_and_posted_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    held_s, _ = asyncio.run(exchange_during_first_step(monkeypatch, lambda: None, log))
    on_worker = [line for line in log if not line.startswith("deliver")]
    assert on_worker[:3] == ["step 1", "exchange, first", "posted"]
    assert held_s == 0.25, "from the end of step 1 to the start of step 2, and nothing else"


def test_an_exchange_that_fails_reaches_its_caller_and_the_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def fail() -> None:
        raise ValueError("the memory is gone")

    with pytest.raises(ValueError, match="the memory is gone"):
        asyncio.run(exchange_during_first_step(monkeypatch, fail, log))
    assert "posted" in log


def test_an_idle_worker_exchanges_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(), []
    monkeypatch.setattr(driver_module, "time", clock)
    core = ScriptedCore([])
    core.num_steps = 2

    def work() -> None:
        log.append("exchange")
        clock.now += 0.5

    async def ask(make: type[ThreadDriver] | type[InlineDriver]) -> float:
        driver = make(core, lambda events: None, lambda error: None, lambda: True)  # type: ignore[arg-type]  # scripted
        try:
            return await driver.exchange(work)
        finally:
            await driver.close()

    assert asyncio.run(ask(ThreadDriver)) == 0.5
    assert asyncio.run(ask(InlineDriver)) == 0.5
    assert log == ["exchange", "exchange"]


# ---- the engine


def open_torch_engine(driver: Any) -> TorchEngine:
    arena = policies.make_arena()
    return TorchEngine(arena.config, arena, EngineSettings(max_slots=4, driver=driver))


def ask(tokens: int = 40) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=5)
    return GenerateRequest("r", [1, 2, 3], params)


@pytest.mark.parametrize("driver", ["inline", "thread"])
def test_prepared_weights_are_swapped_under_a_running_request(driver: Any) -> None:
    new = policies.make_arena(seed=1)

    async def scenario() -> tuple[set[int], bool]:
        engine = open_torch_engine(driver)
        assert isinstance(engine, PreparesWeights)
        versions = set()
        count = 0
        async for chunk in engine.generate(ask(), stream=True):
            versions |= {span.policy_version for span in chunk.completion.version_spans}
            count += 1
            if count == 3:
                prepared = await engine.prepare_weights(WeightUpdate(4, "step000004", tensors=new.tensors()))
                assert engine.policy_version == 0
                held_s = await engine.swap_weights(prepared)
                assert held_s > 0 and engine.policy_version == 4
        await engine.close()
        return versions, torch.equal(engine.arena.flat, new.flat)

    assert asyncio.run(scenario()) == ({0, 4}, True)


def test_the_plan_is_complete_before_steps_are_held_and_only_written_then(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def noting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            log.append(f"{name} begins")
            try:
                return inner(*args, **kwargs)
            finally:
                log.append(f"{name} ends")

        return noted

    engine_module = "hotloop.engines.torch.engine"
    monkeypatch.setattr(
        f"{engine_module}.plan_install", noting("plan", TorchEngine.install.__globals__["plan_install"])
    )
    monkeypatch.setattr(InstallPlan, "write", noting("write", InstallPlan.write))

    async def scenario() -> None:
        engine = open_torch_engine("thread")
        inner = engine._driver.exchange
        engine._driver.exchange = lambda work: inner(noting("exchange", work))  # type: ignore[method-assign]  # noted
        update = WeightUpdate(1, tensors=policies.make_arena(seed=1).tensors())
        await engine.swap_weights(await engine.prepare_weights(update))
        await engine.close()

    asyncio.run(scenario())
    assert log == ["plan begins", "plan ends", "exchange begins", "write begins", "write ends", "exchange ends"]


def test_an_update_without_bytes_needs_no_pause_and_counts_from_the_next_token() -> None:
    async def scenario() -> tuple[set[int], bool]:
        engine = open_torch_engine("thread")
        before = engine.arena.flat.clone()
        versions = set()
        async for chunk in engine.generate(ask(), stream=True):
            if not versions:
                await engine.swap_weights(await engine.prepare_weights(WeightUpdate(9, "step000009")))
            versions |= {span.policy_version for span in chunk.completion.version_spans}
        await engine.close()
        return versions, torch.equal(engine.arena.flat, before)

    assert asyncio.run(scenario()) == ({0, 9}, True)


def test_a_plan_of_weights_that_were_replaced_meanwhile_is_made_again() -> None:
    name = "model.norm.weight"

    def update(version: int, value: float, count: int) -> WeightUpdate:
        data = torch.full((count,), value).numpy().tobytes()
        return WeightUpdate(version, ranges=[TensorRange(name, [0], [4 * count], data)])

    async def scenario() -> list[float]:
        engine = open_torch_engine("thread")
        engine.install(update(1, 2.0, 32))
        stale = await engine.prepare_weights(update(3, 2.0, 1))  # nothing to write: it is 2.0 already
        engine.install(update(2, 7.0, 32))
        await engine.swap_weights(stale)
        await engine.close()
        return list(engine.arena.view(name)[:2].tolist())

    assert asyncio.run(scenario()) == [2.0, 7.0]


def test_after_a_write_that_broke_off_no_token_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(plan: InstallPlan, arena: Any) -> None:
        arena.flat[: len(arena.flat) // 2] = 0
        raise MemoryError("half of it is written")

    monkeypatch.setattr(InstallPlan, "write", break_off)

    async def scenario() -> None:
        engine = open_torch_engine("thread")
        reader = engine.generate(ask(90), stream=True)
        await anext(reader)
        prepared = await engine.prepare_weights(WeightUpdate(1, tensors=policies.make_arena(seed=1).tensors()))
        with pytest.raises(MemoryError):
            await engine.swap_weights(prepared)
        assert engine.policy_version == 0
        steps = engine.counters.steps
        asking = asyncio.create_task(engine._driver.call(lambda: engine.counters.steps))
        assert await asking == steps, "the worker is alive and steps no more"
        await engine.close()
        with pytest.raises(HotloopError):
            async for _ in reader:
                pass

    asyncio.run(scenario())


def test_an_update_that_does_not_fit_is_refused_before_anything_is_held() -> None:
    async def scenario() -> None:
        engine = open_torch_engine("thread")
        before = engine.arena.flat.clone()
        with pytest.raises(HotloopError) as caught:
            await engine.prepare_weights(WeightUpdate(1, tensors={"nobody": torch.ones(1)}))
        assert caught.value.code == "install_failed" and torch.equal(engine.arena.flat, before)
        assert [len(one.token_ids) for one in engine.run([ask(5)])[0]] == [5]
        await engine.close()

    asyncio.run(scenario())
