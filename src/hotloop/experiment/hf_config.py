"""A checkpoint's config.json against the catalogue: the comparison that slime makes before it loads weights.

Owns: `check_hf_config`. Pure: the caller reads the file. The catalogue holds the values of slime's model script, so a
difference here is the difference that slime would stop on, seen before a GPU is rented.

Source: slime 624b824a, `_hf_validate_args`: hidden size, heads, layers, ffn (unless no dense layer), MoE ffn, shared
ffn, tied embeddings, norm epsilon, rope theta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotloop.errors import render_message
from hotloop.experiment.catalog.records import Arch, Model
from hotloop.experiment.records import Finding


def check_hf_config(config: Mapping[str, Any], model: Model) -> list[Finding]:
    """Compare a Hugging Face config with the model that the experiment names.

    Args:
        config: parsed config.json; a multimodal one is read through its `text_config`.

    Returns: one `hf_config` finding for each value that differs; a value that either side leaves out is not
            compared. One finding when the config holds none of the values.
    """
    text = config.get("text_config")
    fields = dict(text) if isinstance(text, Mapping) else dict(config)
    findings = []
    pairs = _pairs(fields, model.arch)
    if all(found is None for _, found, _ in pairs):
        why = f"holds none of the values that are compared: {', '.join(name for name, _, _ in pairs)}"
        do = "Give the config.json of a whole checkpoint."
        message = render_message("hf_config", why, where="config.json", do=do)
        return [Finding("hf_config", message, ("model", "hf_path"))]
    for name, found, expected in pairs:
        if found is None or expected is None or found == expected:
            continue
        why = f"the checkpoint has {found}, and {model.model_script or 'the catalogue'} has {expected}"
        do = "Choose the model that this checkpoint is, or correct the path."
        message = render_message("hf_config", why, where=f"config.json: {name}", do=do)
        findings.append(Finding("hf_config", message, ("model", "hf_path")))
    return findings


def _pairs(fields: Mapping[str, Any], arch: Arch) -> list[tuple[str, Any, Any]]:
    rope = fields.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    has_dense_ffn = not arch.moe or arch.dense_layers > 0
    return [
        ("hidden_size", fields.get("hidden_size"), arch.hidden_size),
        ("num_attention_heads", fields.get("num_attention_heads"), arch.attention_heads),
        ("num_hidden_layers", fields.get("num_hidden_layers"), arch.layers),
        ("intermediate_size", fields.get("intermediate_size") if has_dense_ffn else None, arch.ffn_hidden_size),
        ("moe_intermediate_size", fields.get("moe_intermediate_size"), arch.moe_ffn_hidden_size or None),
        ("shared expert size", _shared_size(fields), arch.shared_expert_ffn_hidden_size or None),
        ("tie_word_embeddings", fields.get("tie_word_embeddings"), arch.tied_embeddings),
        ("rms_norm_eps", fields.get("rms_norm_eps"), arch.norm_epsilon or None),
        ("rope_theta", theta if theta is not None else fields.get("rope_theta"), arch.rotary_base or None),
    ]


def _shared_size(fields: Mapping[str, Any]) -> Any:
    if fields.get("shared_expert_intermediate_size") is not None:
        return fields["shared_expert_intermediate_size"]
    count, size = fields.get("n_shared_experts"), fields.get("moe_intermediate_size")
    return count * size if isinstance(count, int) and isinstance(size, int) else None
