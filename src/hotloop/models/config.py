"""What a decoder looks like: read from a Hugging Face `config.json`, and written back.

Owns: `DecoderConfig`, which architectures the lean decoder covers (Qwen3, Qwen3-MoE, Qwen2, Llama, Mistral without a
sliding window), and the layout of its parameters (`iter_slots`): checkpoint name and shape in arena order, so that
q, k, v of a layer are adjacent, gate and up are adjacent, and the fused matrices are views that cost nothing.

Promises: no torch, no remote code. A config that the decoder would get wrong is never accepted silently: its
`is_native` is False and `unsupported` says why; such a policy runs through transformers (models/fallback.py).

Source of names and defaults: the published config.json and safetensors files of these model families.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.errors import InputError

NATIVE_MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2", "llama", "mistral")
_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, and the frequency scaling of two published variants."""

    base: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Every number that the forward pass depends on. Sizes are counts of elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    tied_embeddings: bool = True
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    num_experts: int = 0
    """0 for a dense policy."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    normalizes_top_k: bool = True
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture-of-experts policy that have a plain MLP."""
    unsupported: str = ""
    """Why the lean decoder cannot run this policy; empty when it can."""
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False, repr=False)
    """The config.json this came from; written back unchanged."""

    @property
    def is_native(self) -> bool:
        """True when models/decoder.py runs this policy itself."""
        return not self.unsupported

    def is_moe_layer(self, layer: int) -> bool:
        """True when the MLP of this layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


def parse_config(hf: Mapping[str, Any], *, where: str = "config.json") -> DecoderConfig:
    """Read a Hugging Face config.

    Raises:
        InputError: code `policy_config` when a needed number is missing or the shape is impossible.
    """
    model_type = str(hf.get("model_type", ""))
    text = hf
    missing = [
        name
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        if not isinstance(text.get(name), int)
    ]
    if missing:
        if model_type in NATIVE_MODEL_TYPES or not model_type:
            raise InputError(
                "policy_config",
                f"{', '.join(missing)} missing or not a whole number",
                where=where,
                do="Use the config.json that was saved with the weights.",
            )
        return _foreign(hf, model_type)
    num_heads = int(hf["num_attention_heads"])
    num_kv_heads = int(hf.get("num_key_value_heads") or num_heads)
    hidden = int(hf["hidden_size"])
    if num_heads % num_kv_heads:
        raise InputError(
            "policy_config",
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            where=where,
        )
    num_layers = int(hf["num_hidden_layers"])
    is_moe = model_type == "qwen3_moe"
    num_experts = int(hf.get("num_experts") or hf.get("num_local_experts") or 0) if is_moe else 0
    attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        model_type=model_type,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(hf.get("head_dim") or hidden // num_heads),
        intermediate_size=int(hf.get("intermediate_size") or 4 * hidden),
        max_positions=int(hf.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(hf),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
        has_qkv_bias=model_type == "qwen2" or attention_bias,
        has_o_bias=attention_bias and model_type != "qwen2",
        num_experts=num_experts,
        experts_per_token=int(hf.get("num_experts_per_tok") or 0) if num_experts else 0,
        moe_intermediate_size=int(hf.get("moe_intermediate_size") or 0) if num_experts else 0,
        normalizes_top_k=bool(hf.get("norm_topk_prob", False)) if num_experts else True,
        dense_layers=_dense_layers(hf, num_layers) if num_experts else (),
        unsupported=_find_unsupported(hf, model_type),
        hf=dict(hf),
    )


def read_config(directory: Path) -> DecoderConfig:
    """Read `config.json` of a policy directory.

    Raises:
        InputError: code `policy_not_found` (no directory or no config.json) or `policy_config`.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise InputError(
            "policy_not_found",
            "there is no config.json",
            where=str(directory),
            do="Give a Hugging Face directory: config.json, *.safetensors, tokenizer files.",
        )
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError("policy_config", f"not valid JSON ({error})", where=str(path)) from error
    except OSError as error:
        raise InputError("policy_config", f"it cannot be read ({error.strerror})", where=str(path)) from error
    if not isinstance(hf, dict):
        raise InputError("policy_config", "not a JSON object", where=str(path))
    return parse_config(hf, where=str(path))


def iter_slots(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield checkpoint name and shape of every parameter of a native policy, in arena order."""
    hidden, d = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        for name, count in rows.items():
            yield f"{at}self_attn.{name}.weight", (count, hidden)
        if config.has_qkv_bias:
            for name, count in rows.items():
                yield f"{at}self_attn.{name}.bias", (count,)
        if config.has_qk_norm:
            yield at + "self_attn.q_norm.weight", (d,)
            yield at + "self_attn.k_norm.weight", (d,)
        yield at + "self_attn.o_proj.weight", (hidden, q_rows)
        if config.has_o_bias:
            yield at + "self_attn.o_proj.bias", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if config.is_moe_layer(layer):
            width = config.moe_intermediate_size
            yield at + "mlp.gate.weight", (config.num_experts, hidden)
            for expert in range(config.num_experts):
                yield f"{at}mlp.experts.{expert}.gate_proj.weight", (width, hidden)
                yield f"{at}mlp.experts.{expert}.up_proj.weight", (width, hidden)
            for expert in range(config.num_experts):
                yield f"{at}mlp.experts.{expert}.down_proj.weight", (hidden, width)
        else:
            yield at + "mlp.gate_proj.weight", (config.intermediate_size, hidden)
            yield at + "mlp.up_proj.weight", (config.intermediate_size, hidden)
            yield at + "mlp.down_proj.weight", (hidden, config.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _parse_rope(hf: Mapping[str, Any]) -> Rope:
    """Read both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`; `rope_scaling` wins."""
    scaling = _read_rope_section(hf)
    base = scaling.get("rope_theta", hf.get("rope_theta", 10_000.0))
    return Rope(
        base=float(base),
        kind=str(scaling.get("rope_type") or scaling.get("type") or "default"),
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(
            scaling.get("original_max_position_embeddings", hf.get("max_position_embeddings", 8192))
        ),
    )


def _read_rope_section(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join the two spellings: `rope_scaling` replaces `rope_parameters`, as in transformers, but for the base."""
    older, newer = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    for name, section in (("rope_scaling", older), ("rope_parameters", newer)):
        if not isinstance(section, Mapping):
            raise InputError("policy_config", f"{name} is not a JSON object", where=f"{name} = {section!r}"[:200])
    if not older or not newer:
        return older or newer
    kept = ("rope_theta", "partial_rotary_factor")
    return {**{name: newer[name] for name in kept if name in newer}, **older}


def _dense_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    only = set(hf.get("mlp_only_layers") or ())
    every = int(hf.get("decoder_sparse_step") or 1)
    return tuple(layer for layer in range(num_layers) if layer in only or (layer + 1) % every)


def _find_unsupported(hf: Mapping[str, Any], model_type: str) -> str:
    if model_type not in NATIVE_MODEL_TYPES:
        return f"model_type {model_type!r} is not one of {', '.join(NATIVE_MODEL_TYPES)}"
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"hidden_act {hf.get('hidden_act')!r} is not silu"
    if hf.get("mlp_bias"):
        return "mlp_bias is set"
    rope = _parse_rope(hf)
    if rope.kind not in _ROPE_KINDS:
        return f"rope type {rope.kind!r} is not one of {', '.join(_ROPE_KINDS)}"
    slides = bool(hf.get("use_sliding_window", model_type == "mistral")) and hf.get("sliding_window") is not None
    if slides or any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        return "attention uses a sliding window"
    if float(_read_rope_section(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))) != 1:
        return "partial_rotary_factor is not 1"
    return ""


def _foreign(hf: Mapping[str, Any], model_type: str) -> DecoderConfig:
    """Describe a config whose numbers have other names, as far as the engine and the trainer need them."""

    def number(*names: str, default: int) -> int:
        return next((int(hf[name]) for name in names if isinstance(hf.get(name), int)), default)

    heads = number("num_attention_heads", "n_head", "num_heads", default=1)
    hidden = number("hidden_size", "n_embd", "d_model", default=heads)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=number("vocab_size", default=1),
        hidden_size=hidden,
        num_layers=number("num_hidden_layers", "n_layer", "num_layers", default=1),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        intermediate_size=number("intermediate_size", "n_inner", default=4 * hidden),
        max_positions=number("max_position_embeddings", "n_positions", default=2048),
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
        unsupported=_find_unsupported(hf, model_type) or "its config has other names for its sizes",
        hf=dict(hf),
    )
