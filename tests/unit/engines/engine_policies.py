"""Small random policies for engine tests, and the plain forward pass that engines are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hotloop.models.config import DecoderConfig, parse_config
from hotloop.models.decoder import compute_logits, forward
from hotloop.models.tokenizer import build_char_tokenizer
from hotloop.models.weights import Arena, write_policy

VOCAB = 32


def make_arena(kind: str = "dense", seed: int = 0, scale: float = 0.25, max_positions: int = 96) -> Arena:
    """Random weights that are large enough to make distributions uneven and routes varied."""
    hf: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": max_positions,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    if kind == "moe":
        hf |= {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        }
    arena = Arena(parse_config(hf))
    generator = torch.Generator().manual_seed(seed)
    for name in arena.slots:
        view = arena.view(name)
        view.copy_(torch.randn(view.shape, generator=generator) * scale + (1.0 if view.dim() == 1 else 0.0))
    return arena


def save_policy(directory: Path, kind: str = "dense", seed: int = 0, **options: Any) -> Arena:
    """Write such a policy with the character tokenizer."""
    arena = make_arena(kind, seed, **options)
    write_policy(directory, arena.config, arena, build_char_tokenizer())
    return arena


def full_logits(config: DecoderConfig, arena: Arena, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence by one forward pass."""
    with torch.no_grad():
        out = forward(config, arena.params, torch.tensor([ids]), torch.arange(len(ids))[None])
        return compute_logits(config, arena.params, out.hidden_BTD)[0]
