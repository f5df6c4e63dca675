"""The numpy step of small policies: attention by either way, every architecture, weights written in place."""

from __future__ import annotations

from typing import Any

import engine_policies as policies
import numpy as np
import pytest
import torch

from hotloop.engines.torch import small
from hotloop.engines.torch.foreign import ForeignRunner
from hotloop.engines.torch.runner import NativeRunner, Prefill
from hotloop.models.config import parse_config
from hotloop.models.weights import Arena


def make_runners(arena: Arena) -> list[Any]:
    return [make(arena.config, arena, num_slots=6, max_context=64) for make in (NativeRunner, ForeignRunner)]


def compare_steps(arena: Arena, num_rows: int, steps: int = 3) -> None:
    """Prefill uneven prompts, decode, and hold the numpy step against the plain forward pass."""
    rng = np.random.default_rng(num_rows)
    prompts = [rng.integers(0, policies.VOCAB, size=5 + 3 * row).tolist() for row in range(num_rows)]
    fast, plain = make_runners(arena)
    assert fast._small is not None
    for one in (fast, plain):
        one.prefill([Prefill(row, 0, ids) for row, ids in enumerate(prompts)])
    lengths = np.array([len(ids) for ids in prompts])
    for step in range(steps):
        tokens = rng.integers(0, policies.VOCAB, size=num_rows)
        ours, theirs = (one.decode(tokens, lengths + step)[0] for one in (fast, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("limit", [0, 10**9])
def test_both_ways_of_attention_equal_the_plain_forward(
    num_rows: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "FEW_CELLS", limit)
    compare_steps(policies.make_arena(), num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"num_attention_heads": 2},
    ],
    ids=["no head norms", "biases everywhere", "biases of q, k and v", "one query head per key head"],
)
def test_every_native_architecture_equals_the_plain_forward(changes: dict[str, Any], num_rows: int) -> None:
    hf = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": policies.VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 96,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    arena = Arena(parse_config(hf | changes))
    generator = torch.Generator().manual_seed(3)
    arena.flat.copy_(torch.randn(arena.flat.shape, generator=generator) * 0.3)
    compare_steps(arena, num_rows)


def test_a_write_into_the_arena_is_seen_after_refresh() -> None:
    arena = policies.make_arena()
    fast, plain = make_runners(arena)
    for one in (fast, plain):
        one.prefill([Prefill(0, 0, [1, 2, 3])])
    before = fast.decode(np.array([4]), np.array([3]))[0].clone()
    arena.flat.mul_(1.25)
    fast.refresh()
    after = fast.decode(np.array([4]), np.array([3]))[0]
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, plain.decode(np.array([4]), np.array([3]))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "columns", "fold", "head_dim", "by_numpy"),
    [
        (1, 64, 2, 32, True),
        (16, 64, 2, 32, True),
        (17, 64, 2, 32, False),  # 1088 rows x columns, 2048 columns x head size
        (17, 64, 2, 16, True),  # 1024 columns x head size
        (500, 32, 2, 32, True),
        (500, 33, 2, 32, False),
        (1, 512, 2, 32, True),  # 32 768 multiplications
        (1, 1024, 16, 32, False),  # 524 288 multiplications: a BLAS with threads would use them
        (1, 288, 1, 32, True),  # 9216 elements
        (1, 289, 1, 32, False),
    ],
)
def test_numpy_attends_only_where_it_is_cheaper_and_starts_no_thread(
    num_rows: int, columns: int, fold: int, head_dim: int, by_numpy: bool
) -> None:
    assert small.choose_numpy_attention(num_rows, columns, fold, head_dim) is by_numpy
