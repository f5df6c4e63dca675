"""Which policies a vLLM server can reload whole, and the worker method that packs a tied head again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotloop.engines.vllm import find_stale_part
from hotloop.engines.vllm_worker import HEAD_RELOAD_METHOD, HeadReload


def info(device: str) -> dict[str, Any]:
    return {"vllm_config": {"device_config": {"device": device}}}


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "xpu"])
def test_an_accelerator_reloads_every_policy(device: str) -> None:
    assert find_stale_part(info(device), True, 8) == ""


@pytest.mark.parametrize("answer", [info("cpu"), {}, {"vllm_config": "text"}, "text", None])
def test_on_a_cpu_or_on_what_nobody_knows_only_a_dense_policy_with_its_own_head_is_trusted(answer: Any) -> None:
    assert find_stale_part(answer, False, 0) == ""
    assert "tied" in find_stale_part(answer, True, 0)
    assert "experts" in find_stale_part(answer, False, 4)


class Layer:
    """A layer as vLLM's CPU backend leaves it: a packed copy, and the matrix beside it unless it was given up."""

    def __init__(self, weight: Any, *, keeps: bool = True) -> None:
        self.weight = SimpleNamespace(array=weight, numel=lambda: weight.size if keeps else 0)
        self.quant_method = self
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: Layer) -> None:
        packed = layer.weight.array.copy()
        layer.cpu_linear = lambda x: packed @ x  # type: ignore[attr-defined]  # set as vLLM sets it


def test_a_reload_reaches_a_head_that_shares_the_embeddings_matrix() -> None:
    shared = np.ones((2, 2))
    embedding, head, linear = Layer(shared), Layer(shared), Layer(np.ones((2, 2)), keeps=False)
    linear.quant_method = None  # type: ignore[assignment]  # a matrix that is gone cannot be packed again
    paths = []

    class Worker(HeadReload):
        model_runner = SimpleNamespace(
            get_model=lambda: SimpleNamespace(modules=lambda: [SimpleNamespace(), embedding, head, linear])
        )

        def reload_weights(self, weights_path: str) -> None:
            paths.append(weights_path)
            shared[:] = 3.0
            embedding.process_weights_after_loading(embedding)

    getattr(Worker(), HEAD_RELOAD_METHOD)(weights_path="somewhere")
    assert paths == ["somewhere"]
    assert head.cpu_linear(np.array([1.0, 0.0])).tolist() == [3.0, 3.0]  # type: ignore[attr-defined]  # as above
