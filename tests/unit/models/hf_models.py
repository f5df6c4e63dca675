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
        "gemma2_capped": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, sliding_window=128)
        ),
        "cohere_scaled": lambda: t.CohereForCausalLM(t.CohereConfig(**SIZES, logit_scale=0.25)),
        "granite_scaled": lambda: t.GraniteForCausalLM(t.GraniteConfig(**SIZES, logits_scaling=4.0)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(
                vocab_size=96,
                hidden_size=32,
                word_embed_proj_dim=16,
                num_hidden_layers=3,
                num_attention_heads=4,
                ffn_dim=48,
                max_position_embeddings=128,
                pad_token_id=1,
                bos_token_id=None,
                eos_token_id=None,
            )
        ),
        "mistral_window": lambda: t.MistralForCausalLM(t.MistralConfig(**SIZES, sliding_window=4)),
        "qwen2_window": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
        ),
        "gemma3_window": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4)),
        "gpt_neo_local": lambda: t.GPTNeoForCausalLM(
            t.GPTNeoConfig(
                vocab_size=96,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                intermediate_size=48,
                max_position_embeddings=128,
                window_size=4,
                attention_types=[[["global", "local"], 1]],
                bos_token_id=None,
                eos_token_id=None,
            )
        ),
    }
    torch.manual_seed(0)
    model = makers[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.25 if kind in SHAPED_HEADS else 0.15))
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
SHAPED_HEADS = ("gemma2_capped", "cohere_scaled", "granite_scaled")
"""Their forward pass changes the logits after the projection; weights are large, or a soft cap would not show."""
FOREIGN = ("phi3", "gpt_neox", "opt", *SHAPED_HEADS)
WINDOWED = ("mistral_window", "qwen2_window", "gemma3_window", "gpt_neo_local")
"""Their attention sees the last 4 tokens in some layers."""
