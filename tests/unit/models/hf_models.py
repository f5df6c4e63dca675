"""Small transformers models with random weights: the references that our decoder and engine are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(kind: str) -> Any:
    """Build a model whose weights are large enough to make its distributions uneven."""
    import transformers as t

    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    moe = {**SIZES, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    makers = {
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
        "qwen3_bias_untied": lambda: t.Qwen3ForCausalLM(
            t.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False, attention_bias=True)
        ),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**moe, norm_topk_prob=True)),
        "qwen3_moe_mixed": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**moe, norm_topk_prob=False, mlp_only_layers=[1])
        ),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
        "llama3_rope": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, rope_parameters=llama3)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**SIZES, sliding_window=None)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**SIZES)),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"})
        ),
    }
    torch.manual_seed(0)
    model = makers[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def save(kind: str, directory: Path) -> Any:
    """Build a model and save it as a Hugging Face directory."""
    model = build(kind)
    model.save_pretrained(directory)
    return model


NATIVE = (
    "qwen3",
    "qwen3_bias_untied",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen2",
    "llama",
    "llama3_rope",
    "mistral",
)
FOREIGN = ("phi3", "gpt_neox")
