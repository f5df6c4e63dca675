"""Weights that are no numbers, or too large: the engine says so instead of answering."""

from __future__ import annotations

import asyncio

import engine_policies as policies
import pytest

from hotloop.engines.base import EngineSettings, GenerateRequest, collect
from hotloop.engines.torch.engine import TorchEngine
from hotloop.errors import HotloopError
from hotloop.models.weights import Arena
from hotloop.types import SamplingParams


def build(arena: Arena) -> TorchEngine:
    return TorchEngine(arena.config, arena, EngineSettings(max_slots=16))


@pytest.mark.parametrize("fold", [1, 3])
@pytest.mark.parametrize(
    "shape", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str
)
@pytest.mark.filterwarnings("error")
def test_weights_that_are_no_numbers_are_one_clear_error(shape: dict[str, float], fold: int) -> None:
    arena = policies.make_arena()
    arena.view("model.embed_tokens.weight")[7] = float("nan")

    async def ask() -> None:
        engine = build(arena)
        try:
            params = SamplingParams(max_new_tokens=4, **shape)
            await asyncio.gather(*(collect(engine, GenerateRequest(str(n), [1, 2], params, n=fold)) for n in range(2)))
        finally:
            await engine.close()

    with pytest.raises(HotloopError) as caught:
        asyncio.run(ask())
    assert caught.value.code == "logits_not_finite" and not caught.value.retryable


@pytest.mark.filterwarnings("error")
def test_weights_that_overflow_are_one_clear_error() -> None:
    arena = policies.make_arena()
    arena.flat.mul_(1e30)

    async def ask() -> None:
        engine = build(arena)
        try:
            await collect(engine, GenerateRequest("a", [1, 2], SamplingParams(max_new_tokens=4)))
        finally:
            await engine.close()

    with pytest.raises(HotloopError, match="logits_not_finite"):
        asyncio.run(ask())
