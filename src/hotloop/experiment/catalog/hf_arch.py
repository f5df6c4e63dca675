"""Read an architecture's dimensions out of a Hugging Face config.json.

Owns: `parse_arch` and `has_mtp_head`. It goes by the keys that a config has (latent ranks, experts, linear heads), not
by a
list of model names, so a new size or a new member of a known family needs no code.

Promises: every dimension comes from the config; a config that lacks one, or has a kind of layer that no formula here
covers, is an InputError that names the key. Does not do: parallel sizes (propose.py), comparing with slime's scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotloop.errors import InputError, Problem
from hotloop.experiment.catalog.records import Arch
from hotloop.experiment.parameters import count_active_params, count_layer_params, count_total_params

_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_QK_NORM_TYPES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose queries and keys are normalised without a key in the config that says so."""
_DEFAULT_INTERVAL = 4


class _Config:
    """A config with every missing key collected."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        self.values: Mapping[str, Any] = text if isinstance(text, Mapping) else config
        self.problems: list[Problem] = []

    def need(self, name: str) -> int:
        value = self.values.get(name)
        if type(value) is not int or value < 1:
            why = "is missing" if value is None else f"= {value!r}: must be a whole number above 0"
            self.problems.append(Problem("config_unsupported", why, f"config.json: {name}"))
            return 1
        return value

    def whole(self, *names: str) -> int:
        """First of several spellings that is a whole number, else 0."""
        return next((self.values[name] for name in names if type(self.values.get(name)) is int), 0)

    def number(self, name: str) -> float:
        value = self.values.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    def truth(self, name: str) -> bool:
        return self.values.get(name) is True


def has_mtp_head(config: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint has multi-token prediction layers."""
    found = _Config(config)
    return found.whole("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers") > 0


def get_published_precision(config: Mapping[str, Any]) -> str:
    """Return `fp8` for a checkpoint that says it is quantised so, else `bf16`."""
    quantised = config.get("quantization_config") or _Config(config).values.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    return "fp8" if method == "fp8" else "bf16"


def _read_attention(config: _Config) -> dict[str, Any]:
    heads = config.need("num_attention_heads")
    if config.whole("kv_lora_rank"):
        latent: dict[str, Any] = {
            "attention": "mla",
            "q_lora_rank": config.whole("q_lora_rank"),
            "kv_lora_rank": config.need("kv_lora_rank"),
            "qk_nope_head_dim": config.need("qk_nope_head_dim"),
            "qk_rope_head_dim": config.whole("qk_rope_head_dim"),
            "v_head_dim": config.need("v_head_dim"),
        }
        latent["kv_values_per_token_per_layer"] = latent["kv_lora_rank"] + latent["qk_rope_head_dim"]
        return latent
    head_dim = config.whole("head_dim") or config.need("hidden_size") // heads
    kv_heads = config.whole("num_key_value_heads") or heads
    return {
        "attention": "gqa",
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "attention_output_gate": config.truth("attn_output_gate"),
        "kv_values_per_token_per_layer": 2 * kv_heads * head_dim,
    }


def _read_recurrent(config: _Config, layers: int) -> dict[str, Any]:
    """Read the recurrent layers of a hybrid; empty for a model without."""
    if not config.whole("linear_num_value_heads"):
        kinds = config.values.get("layer_types")
        known = {"full_attention", "sliding_attention"}
        if isinstance(kinds, list) and not set(kinds) <= known:
            other = sorted(str(kind) for kind in set(kinds) - known)
            config.problems.append(
                Problem("config_unsupported", f"has layers of kind {', '.join(other)}", "config.json: layer_types")
            )
        return {}
    interval = config.whole("full_attention_interval") or _DEFAULT_INTERVAL
    value_heads, key_heads = config.need("linear_num_value_heads"), config.need("linear_num_key_heads")
    key_dim, value_dim = config.need("linear_key_head_dim"), config.need("linear_value_head_dim")
    return {
        "attention": "hybrid-gdn",
        "kv_layers": layers // interval,
        "linear_layers": layers - layers // interval,
        "full_attention_interval": interval,
        "attention_output_gate": config.values.get("attn_output_gate") is not False,
        "gdn_value_heads": value_heads,
        "gdn_key_heads": key_heads,
        "gdn_key_dim": key_dim,
        "gdn_value_dim": value_dim,
        "gdn_conv_kernel": config.need("linear_conv_kernel_dim"),
        "gdn_state_values_per_layer": value_heads * key_dim * value_dim,
        "gdn_conv_channels": 2 * key_heads * key_dim + value_heads * value_dim,
    }


def _read_experts(config: _Config, layers: int) -> dict[str, Any]:
    """Read the mixture of experts; empty for a dense model."""
    experts = config.whole(*_EXPERT_KEYS)
    if not experts:
        return {}
    step = config.whole("decoder_sparse_step") or 1
    if step != 1 or config.values.get("mlp_only_layers"):
        config.problems.append(
            Problem("config_unsupported", "mixes dense and MoE layers in a pattern", "config.json: decoder_sparse_step")
        )
    dense = config.whole("first_k_dense_replace")
    width = config.whole("moe_intermediate_size") or config.need("intermediate_size")
    shared = config.whole("shared_expert_intermediate_size") or config.whole("n_shared_experts") * width
    return {
        "moe": True,
        "dense_layers": dense,
        "moe_layers": layers - dense,
        "experts": experts,
        "experts_per_token": config.need("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": shared,
        "router_score": str(config.values.get("scoring_func") or "softmax"),
        "router_scaling": config.number("routed_scaling_factor"),
    }


def parse_arch(config: Mapping[str, Any]) -> Arch:
    """Turn a config.json into an architecture; parameter counts are worked out from the dimensions.

    Raises: InputError `config_unsupported` with every key that is missing or of a kind that no formula covers.
    """
    read = _Config(config)
    layers = read.need("num_hidden_layers")
    model_type = str(read.values.get("model_type", ""))
    values: dict[str, Any] = {
        "layers": layers,
        "hidden_size": read.need("hidden_size"),
        "vocab_size": read.need("vocab_size"),
        "attention_heads": read.need("num_attention_heads"),
        "tied_embeddings": read.truth("tie_word_embeddings") or config.get("tie_word_embeddings") is True,
        "norm_epsilon": read.number("rms_norm_eps"),
        "rotary_base": int(read.number("rope_theta")),
        "rotary_percent": read.number("partial_rotary_factor") or 1.0,
        "qk_layernorm": read.truth("use_qk_norm") or model_type in _QK_NORM_TYPES,
        "qkv_bias": read.truth("attention_bias") or model_type == "qwen2",
        "max_position_embeddings": read.whole("max_position_embeddings"),
        "kv_layers": layers,
        "params_total": 0,
        "params_active": 0,
        "params_expert": 0,
    }
    values |= _read_attention(read)
    values |= _read_recurrent(read, layers)
    values |= _read_experts(read, layers)
    values["ffn_hidden_size"] = read.whole("intermediate_size") or values.get("moe_ffn_hidden_size", 0)
    if not values["ffn_hidden_size"]:
        read.need("intermediate_size")
    if read.problems:
        raise InputError.of(read.problems)
    values["kv_bytes_per_token_bf16"] = 2 * values["kv_values_per_token_per_layer"] * values["kv_layers"]
    arch = Arch(**values)
    return arch._replace(
        params_total=count_total_params(arch),
        params_active=count_active_params(arch),
        params_expert=arch.moe_layers * count_layer_params(arch).experts,
    )
