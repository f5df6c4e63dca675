"""Records of the catalogue: what is known about a model, a GPU and the published image. Facts, no derived sizes.

Owns: the shape of one TOML table of `models.toml`, `gpus.toml` and `images.toml`. `load.py` fills the records and
refuses a key that they do not have, so a misspelt fact is an error and not a silent default.

Promises: immutable; every size in single units (tokens, layers, values, bytes); 0 for a field that the architecture
does not have. Does not do: parameter counts of a layer or a stage (layout.py), bytes (memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

AttentionKind = Literal["gqa", "mla", "hybrid-gdn", "hybrid_mla_kda"]


class Arch(NamedTuple):
    """Dimensions of an architecture, as slime's model scripts give them."""

    layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    attention_heads: int
    tied_embeddings: bool
    attention: AttentionKind
    kv_values_per_token_per_layer: int
    """K and V values (or latent values) that one attention layer keeps for a token."""
    kv_layers: int
    """Layers with a KV cache; fewer than `layers` in a hybrid."""
    kv_bytes_per_token_bf16: int
    params_total: int
    """Without norms, biases, MTP layers and the sparse indexer."""
    params_active: int
    params_expert: int
    moe: bool = False
    dense_layers: int = 0
    """Layers of a MoE model whose feed-forward is dense; they come first."""
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    shared_experts: int = 0
    router_score: str = ""
    router_scaling: float = 0.0
    router_groups: int = 0
    router_groups_kept: int = 0
    norm_epsilon: float = 0.0
    rotary_base: int = 0
    rotary_percent: float = 0.0
    qk_layernorm: bool = False
    qkv_bias: bool = False
    max_position_embeddings: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    attention_output_gate: bool = False
    q_lora_rank: int = 0
    """0: MLA without a low-rank query."""
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    linear_layers: int = 0
    full_attention_interval: int = 0
    """Every n-th layer has full attention, the others are recurrent."""
    gdn_value_heads: int = 0
    gdn_key_heads: int = 0
    gdn_key_dim: int = 0
    gdn_value_dim: int = 0
    gdn_conv_kernel: int = 0
    gdn_state_values_per_layer: int = 0
    gdn_conv_channels: int = 0
    linear_heads: int = 0
    linear_head_dim: int = 0
    linear_conv_kernel: int = 0
    state_bytes_per_request_fp32: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_kpool: int = 0
    index_layers: tuple[int, ...] = ()
    """1-based layers that compute a sparse index; a pipeline stage must start on one. Empty: no such rule."""
    hyper_connection_streams: int = 0
    megatron_spec: tuple[str, ...] = ()

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state in place of a KV cache."""
        return self.linear_layers > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention layers cache one latent vector in place of heads."""
        return self.kv_lora_rank > 0


class Recipe(NamedTuple):
    """Parallel sizes and settings that a model is trained and served with."""

    nodes: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    engine_gpus: int
    max_tokens_per_gpu: int
    cpu_adam: bool
    source: str
    layout: str = "colocate"
    gpus_per_node: int = 8
    first_stage_layers: int = 0
    """0: as many as a middle stage."""
    last_stage_layers: int = 0
    engine_dp: int = 1
    engine_ep: int = 1
    mem_fraction_static: float = 0.7
    rollout_gpus: int = 0
    """0: as many as trainer GPUs."""
    cp_layout: str = "zigzag"
    kv_cache_dtype: str = "auto"
    moe_dispatcher: str = "flex"
    serving_precision: str = ""
    extra: Mapping[str, Any] = MappingProxyType({})
    """Facts of slime's own run script that the planner shows and does not use, such as its batch sizes."""


class Convert(NamedTuple):
    """How the Hugging Face directory is turned into a Megatron checkpoint."""

    nodes: int
    processes_per_node: int
    auto_pp: bool
    source: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    note: str = ""


class Deployment(NamedTuple):
    """A published serving configuration of a model without a training recipe."""

    gpu: str
    gpus: int
    tp: int
    precision: str
    source: str


class Model(NamedTuple):
    """One architecture with its checkpoint, recipe and sources."""

    id: str
    label: str
    hf_repo: str
    source: str
    arch: Arch
    recipe: Recipe
    """For a rollout-only model: sizes proposed from the architecture, so that a plan can still be drawn."""
    convert: Convert
    published_precision: str = "bf16"
    has_mtp: bool = False
    default_eagle_steps: int = 3
    in_lab: bool = False
    rollout_only: bool = False
    """Has no slime model script: it can be deployed and rehearsed, not exported for training."""
    model_script: str = ""
    run_script: str = ""
    hf_repo_source: str = ""
    served_model_name: str = ""
    notes: tuple[str, ...] = ()
    script_recipe: Recipe | None = None
    """What slime's own run script sets, where the recipe differs from it."""
    rollout: Deployment | None = None

    @property
    def hf_name(self) -> str:
        """Last part of the Hugging Face repository name."""
        return self.hf_repo.rsplit("/", 1)[-1]


class Gpu(NamedTuple):
    """One GPU part. Rates are peak dense FLOP/s; 0.0 means not available or not published."""

    id: str
    label: str
    vendor: str
    memory_label_gb: int
    memory_bytes: int
    hbm_bytes_per_s: float
    bf16_dense_flops: float
    fp8_dense_flops: float
    interconnect: str
    interconnect_bytes_per_s: float
    """Both directions together."""
    source: str
    notes: str = ""
    is_blackwell: bool = False
    """Its driver needs no CUDA_DEVICE_MAX_CONNECTIONS=1 for TP or CP."""
    has_fp8: bool = True


class Catalog(NamedTuple):
    """Everything that the planner knows about the outside world."""

    models: Mapping[str, Model]
    gpus: Mapping[str, Gpu]
    images: Mapping[str, Any]
    data: Mapping[str, Any]
    slime_commit: str
    slime_docs_version: str
