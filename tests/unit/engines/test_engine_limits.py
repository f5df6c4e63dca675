"""Sampling parameters that no fp32 distribution can follow are refused by the engine itself, at every field."""

from __future__ import annotations

import math
from typing import Any

import engine_policies as policies
import pytest
import torch

from hotloop.engines.base import EngineSettings, GenerateRequest
from hotloop.engines.torch.draw import compute_distribution, shape_of
from hotloop.engines.torch.engine import TorchEngine
from hotloop.engines.torch.limits import MAX_BIAS, MIN_TEMPERATURE
from hotloop.errors import InputError
from hotloop.service import rollout_request
from hotloop.types import SamplingParams

NAN, INF, SUBNORMAL = math.nan, math.inf, 1e-320


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (NAN, INF, -INF, -0.1, -SUBNORMAL, SUBNORMAL, 1e-45, 1e-38, 0.99e-5)],
        *[("top_p", value) for value in (NAN, INF, -INF, -0.1, -SUBNORMAL, 0.0, 1.0000001)],
        *[("min_p", value) for value in (NAN, INF, -INF, -0.1, -SUBNORMAL, 1.0000001)],
        *[("top_k", value) for value in (NAN, INF, -INF, 0, -2)],
        *[("logit_bias", {3: value}) for value in (NAN, INF, -INF, 1e300, MAX_BIAS * 1.01, -MAX_BIAS * 1.01)],
    ],
)
def test_a_number_that_cannot_be_followed_exactly_is_refused(field: str, value: Any) -> None:
    arena = policies.make_arena()
    engine = TorchEngine(arena.config, arena, EngineSettings())
    params: dict[str, Any] = {field: value}
    with pytest.raises(InputError, match=field) as caught:
        engine.run([GenerateRequest("a", [1], SamplingParams(1, **params))])
    assert caught.value.code == "sampling_params"
    assert not engine._core.has_work


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1, temperature=MIN_TEMPERATURE),
        SamplingParams(1, temperature=1e30),
        SamplingParams(1, top_p=SUBNORMAL),
        SamplingParams(1, min_p=SUBNORMAL),
        SamplingParams(1, top_k=2**31 - 1),
        SamplingParams(1, logit_bias={3: -MAX_BIAS, 4: MAX_BIAS}),
        SamplingParams(1, temperature=MIN_TEMPERATURE, logit_bias={3: MAX_BIAS}),
    ],
)
def test_the_edges_of_what_is_accepted_give_a_distribution(params: SamplingParams) -> None:
    logits = torch.linspace(-200.0, 200.0, policies.VOCAB)[None]
    arena = policies.make_arena()
    engine = TorchEngine(arena.config, arena, EngineSettings())
    ((answer,),) = engine.run([GenerateRequest("a", [1], params)])
    assert math.isfinite(answer.sampling_logprobs[0])
    probs = compute_distribution(logits, shape_of(params)).sampling.exp()
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_subnormal_top_p_keeps_the_best_token_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    kept = compute_distribution(logits, shape_of(SamplingParams(1, top_p=SUBNORMAL))).kept
    assert kept is not None and kept.tolist() == [[False, True, False]]


def test_the_service_and_the_engine_refuse_the_same_temperatures() -> None:
    assert rollout_request.MIN_TEMPERATURE == MIN_TEMPERATURE
