"""How many parameters an architecture has, by part, and how many of them one trainer GPU or one engine GPU holds.

Owns: `LayerParams`, `count_layer_params`, `count_stage_params` (after TP, PP, EP) and `count_engine_params`.

Promises: exact integers; the whole model's count equals the catalogue's `params_total` (norms, biases, MTP layers and
the sparse indexer are left out, as there). Does not do: bytes.

Source: shapes of the model scripts of slime 624b824a; delta attention from the fields of the glm5_next configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hotloop.experiment.catalog.records import Arch, Recipe

if TYPE_CHECKING:
    from hotloop.experiment.layout import Stage

_DELTA_RANK = 128
"""Rank of the two low-rank gates of a delta-attention layer (glm5_next)."""


class LayerParams(NamedTuple):
    """Parameters of one layer's parts; 0 where the architecture lacks the part."""

    attention: int
    """A full-attention layer."""
    recurrent: int
    """A recurrent layer of a hybrid."""
    dense_ffn: int
    experts: int
    """All routed experts of one MoE layer."""
    shared_expert: int
    router: int
    embedding: int
    """One embedding matrix; the head has the same shape."""


class LocalParams(NamedTuple):
    """Parameters resident on one GPU."""

    dense: int
    """Everything but routed experts; its optimizer state shards over DP x CP."""
    experts: int
    """Routed experts; their optimizer state shards over the expert replicas."""
    head: int
    """The part of `dense` that is the output head, 0 where the stage has none."""

    @property
    def total(self) -> int:
        """All parameters on the GPU."""
        return self.dense + self.experts


def _count_attention(arch: Arch) -> int:
    hidden, heads = arch.hidden_size, arch.attention_heads
    if arch.is_mla:
        key = arch.qk_nope_head_dim + arch.qk_rope_head_dim
        query = hidden * arch.q_lora_rank + arch.q_lora_rank * heads * key if arch.q_lora_rank else hidden * heads * key
        latent = hidden * (arch.kv_lora_rank + arch.qk_rope_head_dim)
        expand = arch.kv_lora_rank * heads * (arch.qk_nope_head_dim + arch.v_head_dim)
        return query + latent + expand + heads * arch.v_head_dim * hidden
    query = hidden * heads * arch.head_dim * (2 if arch.attention_output_gate else 1)
    return query + 2 * hidden * arch.kv_heads * arch.head_dim + heads * arch.head_dim * hidden


def _count_recurrent(arch: Arch) -> int:
    hidden = arch.hidden_size
    if arch.gdn_value_heads:
        key, value = arch.gdn_key_heads * arch.gdn_key_dim, arch.gdn_value_heads * arch.gdn_value_dim
        gates = 2 * hidden * arch.gdn_value_heads
        conv = arch.gdn_conv_channels * arch.gdn_conv_kernel
        return hidden * (2 * key + 2 * value) + gates + conv + value * hidden
    if arch.linear_heads:
        width = arch.linear_heads * arch.linear_head_dim
        gates = 2 * (hidden * _DELTA_RANK + _DELTA_RANK * width) + hidden * arch.linear_heads
        return 4 * hidden * width + 3 * width * arch.linear_conv_kernel + gates
    return 0


def count_layer_params(arch: Arch) -> LayerParams:
    """Count the parameters of each part of a layer."""
    hidden = arch.hidden_size
    return LayerParams(
        attention=_count_attention(arch),
        recurrent=_count_recurrent(arch),
        dense_ffn=3 * hidden * arch.ffn_hidden_size,
        experts=3 * hidden * arch.moe_ffn_hidden_size * arch.experts,
        shared_expert=3 * hidden * arch.shared_expert_ffn_hidden_size,
        router=hidden * arch.experts,
        embedding=arch.vocab_size * hidden,
    )


def count_total_params(arch: Arch) -> int:
    """Count the whole model; equals `arch.params_total` of every catalogue model."""
    part = count_layer_params(arch)
    num_dense = arch.dense_layers if arch.moe else arch.layers
    num_attention = arch.kv_layers if arch.is_hybrid else arch.layers
    layers = num_attention * part.attention + arch.linear_layers * part.recurrent + num_dense * part.dense_ffn
    moe = arch.moe_layers * (part.experts + part.shared_expert + part.router)
    return layers + moe + part.embedding * (1 if arch.tied_embeddings else 2)


def count_active_params(arch: Arch) -> int:
    """Count the parameters that one token uses: all but the experts that it is not sent to."""
    experts = arch.moe_layers * count_layer_params(arch).experts
    used = experts * arch.experts_per_token // arch.experts if arch.experts else 0
    return count_total_params(arch) - experts + used


def _split(count: int, parts: int) -> int:
    return -(-count // parts)


def count_norm_params(arch: Arch, num_layers: int, *, has_head: bool = True) -> int:
    """Count norms and biases of layers with grouped-query attention: two norms each, head norms and biases if any."""
    per_layer = 2 * arch.hidden_size
    if arch.qk_layernorm:
        per_layer += 2 * arch.head_dim
    if arch.qkv_bias:
        per_layer += (arch.attention_heads + 2 * arch.kv_heads) * arch.head_dim
    return num_layers * per_layer + (arch.hidden_size if has_head else 0)


def count_stage_params(arch: Arch, recipe: Recipe, stage: Stage, *, with_norms: bool = False) -> LocalParams:
    """Count what one GPU of a pipeline stage holds.

    Formula: embeddings / TP on the first and the last stage; attention, dense and shared feed-forward / TP; routed
        experts / (ETP x EP); the router whole; norms ignored unless asked for. Tied embeddings on two stages are two
        copies.
    Source: algorithms.md 10.
    """
    part = count_layer_params(arch)
    recurrent = stage.num_layers - stage.num_attention
    split = stage.num_attention * part.attention + recurrent * part.recurrent + stage.num_dense * part.dense_ffn
    split += stage.num_moe * part.shared_expert
    dense = _split(split, recipe.tp) + stage.num_moe * part.router
    matrix = _split(part.embedding, recipe.tp)
    head = 0
    if stage.has_embedding:
        dense += matrix
    if stage.has_head and not (arch.tied_embeddings and stage.has_embedding):
        dense += matrix
        head = matrix
    if with_norms:
        dense += count_norm_params(arch, stage.num_layers, has_head=stage.has_head)
    experts = _split(stage.num_moe * part.experts, recipe.etp * recipe.ep)
    return LocalParams(dense, experts, head)


class EngineParams(NamedTuple):
    """Parameters that one GPU of an engine holds, by the precision that they can be served in."""

    quantised: int
    """Linear layers of attention, feed-forward and experts."""
    kept: int
    """Embedding, head and router: served in BF16 whatever the precision."""


def count_engine_params(arch: Arch, recipe: Recipe, *, with_norms: bool = False) -> EngineParams:
    """Count what one GPU of an engine holds.

    Formula: with DP attention d, attention and head / (TP / d), embedding and dense feed-forward whole; else all / TP.
        Experts / TP in either grid. A shared expert is whole on each rank when the experts are spread by EP.
    Source: the flags of experiment.md 2 (`--sglang-moe-dense-tp-size 1`, `--sglang-enable-dp-lm-head`).
    """
    part = count_layer_params(arch)
    tp = recipe.engine_gpus
    has_dp_attention = recipe.engine_dp > 1
    attention_tp = max(1, tp // recipe.engine_dp)
    dense_tp = 1 if has_dp_attention else tp
    shared_tp = 1 if recipe.engine_ep > 1 or has_dp_attention else tp
    num_attention = arch.kv_layers if arch.is_hybrid else arch.layers
    num_dense = arch.dense_layers if arch.moe else arch.layers
    mixers = num_attention * part.attention + arch.linear_layers * part.recurrent
    quantised = _split(mixers, attention_tp) + _split(num_dense * part.dense_ffn, dense_tp)
    quantised += _split(arch.moe_layers * part.experts, tp) + _split(arch.moe_layers * part.shared_expert, shared_tp)
    kept = _split(part.embedding, dense_tp) + arch.moe_layers * part.router
    if not arch.tied_embeddings:
        kept += _split(part.embedding, attention_tp)
    if with_norms:
        kept += count_norm_params(arch, arch.layers)
    return EngineParams(quantised, kept)
