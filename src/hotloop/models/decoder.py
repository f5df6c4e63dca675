"""The lean decoder: one functional forward pass on tensors it is given, for the trainer and the engine both.

Owns: RMSNorm, rotary embedding, grouped-query attention with and without past keys, SwiGLU, mixture of experts with
recorded or replayed routes, and the output projection.

Promises: logits and gradients equal those of transformers (Qwen3, Qwen3-MoE, Qwen2, Llama) to 1e-5 relative in fp32;
differentiable in every parameter and in `past`, so that a prompt can be computed once and responses branch off it; a
padded position changes no other position.

Does not do: hold parameters (models/weights.py), cache keys in place or draw tokens (engines/torch), losses
(algorithms/, trainers/). Policies that are not `is_native` go through models/fallback.py behind the same call.

Shapes: B rows, T new tokens, S past tokens, D hidden size, Q query heads, K key heads (or experts per token in routes),
d head size, I width of an MLP, L layers, E experts, V vocabulary, N = B x T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotloop.models.config import DecoderConfig, Rope, parse_config, read_config

if TYPE_CHECKING:
    from hotloop.models.fallback import ForeignParams

__all__ = [
    "DecoderConfig",
    "DecoderOutput",
    "DecoderParams",
    "LayerParams",
    "Rope",
    "compute_load_balancing_loss",
    "compute_logits",
    "compute_moe",
    "compute_rope",
    "forward",
    "parse_config",
    "read_config",
    "rms_norm",
]

KV = tuple[Tensor, Tensor]
"""Keys (rotated) and values of one layer, [B, S, K, d] each."""


@dataclass(slots=True)
class LayerParams:
    """Parameters of one layer; matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    """[(Q + 2 K) d, D]: q, k and v rows one after the other."""
    o: Tensor
    post_norm: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up: Tensor | None = None
    """[2 I, D], gate first."""
    down: Tensor | None = None
    router: Tensor | None = None
    """[E, D]"""
    experts_gate_up: Tensor | None = None
    """[E, 2 I, D]"""
    experts_down: Tensor | None = None
    """[E, D, I]"""


@dataclass(slots=True)
class DecoderParams:
    """All parameters of a native policy, as views on one arena."""

    embed: Tensor
    layers: list[LayerParams]
    norm: Tensor
    head: Tensor
    """[V, D]; the embedding itself when tied."""


@dataclass(slots=True)
class DecoderOutput:
    """What a forward pass leaves behind."""

    hidden_BTD: Tensor
    """After the final norm; give it to `compute_logits`."""
    kv: list[KV]
    """Per layer, keys and values of the new tokens, [B, T, K, d]."""
    routes_BTLK: Tensor | None = None
    """int64 expert ids, rows of dense layers zero; only with `record_routes`."""
    router_logits: list[Tensor] | None = None
    """Per mixture layer [B, T, E]; only with `return_router_logits`."""


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * weight, with a backward pass of half the operators that autograd would record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        unit = (wide * scale).to(x.dtype)
        ctx.save_for_backward(unit, weight, scale)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        unit, weight, scale = ctx.saved_tensors
        grad = grads[0]
        inner = (grad * weight).float()
        projected = (inner * unit).mean(-1, keepdim=True)
        grad_x = ((inner - unit * projected) * scale).to(grad.dtype)
        grad_weight = (grad * unit).reshape(-1, weight.shape[-1]).sum(0)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension and scale; the mean is taken in fp32."""
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return normed


def compute_rope(rope: Rope, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and signed sines for `x * cos + roll(x, d / 2) * sin`, fp32 [..., d].

    Formula: frequency_i = base ^ (-2 i / d), both halves alike; the sine of the first half is negated because
    rotating means (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
    Source: Su et al. 2021 (arXiv 2104.09864), in the half-split form of the Llama checkpoints; scaling `llama3` as
    published with Llama 3.1.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / rope.base ** (steps / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = ((rope.original_max_positions / wavelengths - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        frequencies = frequencies * (smooth + (1 - smooth) / rope.factor)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """Attend with grouped heads: q [B, T, Q, d], k and v [B, S, K, d] -> [B, T, Q d]."""
    rows, length, num_heads, d = q.shape
    num_kv = k.shape[2]
    # Query heads that share a key head become extra queries of that head, so keys are never repeated in memory.
    fold = num_heads // num_kv
    queries = q.view(rows, length, num_kv, fold, d).permute(0, 2, 3, 1, 4).reshape(rows, num_kv, fold * length, d)
    scores = torch.matmul(queries, k.permute(0, 2, 3, 1)) * (1.0 / math.sqrt(d))
    if allowed is not None:
        shaped = scores.view(rows, num_kv, fold, length, -1)
        scores = shaped.masked_fill(~allowed[:, None, None], float("-inf")).view_as(scores)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    mixed = torch.matmul(weights, v.permute(0, 2, 1, 3))
    return mixed.view(rows, num_kv, fold, length, d).permute(0, 3, 1, 2, 4).reshape(rows, length, num_heads * d)


def compute_moe(
    config: DecoderConfig, layer: LayerParams, x_ND: Tensor, routes_NK: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one mixture of experts.

    Args:
        routes_NK: expert ids to replay; None lets the router choose. Gate weights are always recomputed from the
            router, with gradient (replay of recorded routes, "R3").

    Returns:
        Output [N, D], expert ids used [N, K] int64, router logits [N, E].
    """
    assert layer.router is not None and layer.experts_gate_up is not None and layer.experts_down is not None
    logits_NE = F.linear(x_ND, layer.router)
    probs_NE = torch.softmax(logits_NE, dim=-1, dtype=torch.float32)
    if routes_NK is None:
        gates_NK, routes_NK = torch.topk(probs_NE, config.experts_per_token, dim=-1)
    else:
        gates_NK = probs_NE.gather(-1, routes_NK)
    if config.normalizes_top_k:
        gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)
    per_token = routes_NK.shape[1]
    flat = routes_NK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    tokens = torch.div(order, per_token, rounding_mode="floor")
    counts: list[int] = torch.bincount(flat, minlength=config.num_experts).tolist()
    sorted_x = x_ND.index_select(0, tokens)
    pieces = []
    for expert, piece in enumerate(torch.split(sorted_x, counts)):
        if counts[expert]:
            gate, up = F.linear(piece, layer.experts_gate_up[expert]).chunk(2, -1)
            pieces.append(F.linear(F.silu(gate) * up, layer.experts_down[expert]))
    weighted = torch.cat(pieces) * gates_NK.reshape(-1).index_select(0, order).to(x_ND.dtype)[:, None]
    return torch.zeros_like(x_ND).index_add(0, tokens, weighted), routes_NK, logits_NE


def forward(
    config: DecoderConfig,
    params: DecoderParams | ForeignParams,
    ids_BT: Tensor,
    positions_BT: Tensor,
    *,
    past: Sequence[KV] | None = None,
    past_mask_BS: Tensor | None = None,
    mask_BT: Tensor | None = None,
    routes: Tensor | None = None,
    record_routes: bool = False,
    return_router_logits: bool = False,
) -> DecoderOutput:
    """Run the decoder over T new tokens per row, after S past ones.

    Args:
        ids_BT: int64 token ids.
        positions_BT: int64 absolute positions (the first prompt token is 0).
        past: per layer keys and values [B, S, K, d], as `DecoderOutput.kv` holds them; gradients flow into them.
        past_mask_BS: True where a past token exists; None means everywhere.
        mask_BT: True where a new token exists; None means everywhere. Output at padding is finite and meaningless.
        routes: int64 [B, T, L, K] expert ids to replay.
        record_routes: fill `routes_BTLK`.
        return_router_logits: fill `router_logits`.

    Raises:
        InputError: code `routes_unsupported` for routes of a policy that runs through transformers.
    """
    if not isinstance(params, DecoderParams):
        from hotloop.models.fallback import forward_foreign

        wants_routes = routes is not None or record_routes or return_router_logits
        return forward_foreign(
            config, params, ids_BT, positions_BT, past, past_mask_BS, mask_BT, wants_routes=wants_routes
        )
    rows, length = ids_BT.shape
    num_heads, num_kv, d = config.num_heads, config.num_kv_heads, config.head_dim
    allowed = _allowed(rows, length, past, past_mask_BS, mask_BT, ids_BT.device)
    x = F.embedding(ids_BT, params.embed)
    cos, sin = (table.to(x.dtype)[:, :, None] for table in compute_rope(config.rope, d, positions_BT))
    kv: list[KV] = []
    chosen: list[Tensor] = []
    router_logits: list[Tensor] = []
    for index, layer in enumerate(params.layers):
        h = rms_norm(x, layer.input_norm, config.rms_norm_eps)
        heads = F.linear(h, layer.qkv, layer.qkv_bias).view(rows, length, num_heads + 2 * num_kv, d)
        q, k, v = torch.split(heads, [num_heads, num_kv, num_kv], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q = q * cos + q.roll(d // 2, -1) * sin
        k = k * cos + k.roll(d // 2, -1) * sin
        kv.append((k, v))
        if past is not None:
            k = torch.cat((past[index][0], k), 1)
            v = torch.cat((past[index][1], v), 1)
        x = x + F.linear(_attend(q, k, v, allowed), layer.o, layer.o_bias)
        h = rms_norm(x, layer.post_norm, config.rms_norm_eps)
        if layer.router is None:
            assert layer.gate_up is not None and layer.down is not None
            gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
            if record_routes and config.num_experts:
                chosen.append(ids_BT.new_zeros(rows * length, config.experts_per_token))
        else:
            wanted = None if routes is None else routes[:, :, index].reshape(rows * length, -1).long()
            mixed, used, logits = compute_moe(config, layer, h.view(rows * length, -1), wanted)
            x = x + mixed.view_as(x)
            chosen.append(used)
            router_logits.append(logits.view(rows, length, -1))
    return DecoderOutput(
        hidden_BTD=rms_norm(x, params.norm, config.rms_norm_eps),
        kv=kv,
        routes_BTLK=torch.stack(chosen, 1).view(rows, length, config.num_layers, -1)
        if record_routes and chosen
        else None,
        router_logits=router_logits if return_router_logits else None,
    )


def compute_logits(config: DecoderConfig, params: DecoderParams | ForeignParams, hidden: Tensor) -> Tensor:
    """Project hidden states [..., D] to raw logits [..., V]."""
    if not isinstance(params, DecoderParams):
        from hotloop.models.fallback import compute_foreign_logits

        return compute_foreign_logits(params, hidden)
    return F.linear(hidden, params.head)


def compute_load_balancing_loss(
    router_logits: Sequence[Tensor], routes_BTLK: Tensor, mask_BT: Tensor | None, config: DecoderConfig
) -> Tensor:
    """Compute the auxiliary loss that keeps experts evenly used, averaged over the mixture layers.

    Formula: E * sum_e share_e * mean_prob_e, where share_e is the share of the N K assignments times K that went to
    expert e, and mean_prob_e the mean router probability; K at perfect balance.
    Source: Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6, for K experts per token; mean over layers where
    transformers takes one mean over all layers' tokens together.
    """
    losses = []
    moe_layers = [index for index in range(config.num_layers) if config.is_moe_layer(index)]
    for index, logits in zip(moe_layers, router_logits, strict=True):
        probs = torch.softmax(logits.float(), -1).view(-1, config.num_experts)
        picks = F.one_hot(routes_BTLK[:, :, index].reshape(probs.shape[0], -1), config.num_experts).sum(1).float()
        if mask_BT is None:
            share, mean_prob = picks.mean(0), probs.mean(0)
        else:
            weight = mask_BT.reshape(-1, 1).float()
            total = weight.sum()
            share, mean_prob = (picks * weight).sum(0) / total, (probs * weight).sum(0) / total
        losses.append(config.num_experts * (share * mean_prob).sum())
    return torch.stack(losses).mean()


def _allowed(
    rows: int,
    length: int,
    past: Sequence[KV] | None,
    past_mask_BS: Tensor | None,
    mask_BT: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Say which keys each query may see, [1 or B, T, S + T]; None when all may be seen."""
    past_length = 0 if past is None else past[0][0].shape[1]
    if length == 1 and past_mask_BS is None:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
    if mask_BT is not None:
        # A padded query still sees itself: a row of nothing but -inf would give NaN, and NaN gradients.
        own = torch.eye(length, dtype=torch.bool, device=device)[None]
        causal = (causal & mask_BT[:, None, :]) | own
    if past_length == 0:
        return causal
    seen = (
        torch.ones(1, 1, past_length, dtype=torch.bool, device=device)
        if past_mask_BS is None
        else past_mask_BS[:, None, :].bool()
    )
    both = max(seen.shape[0], causal.shape[0])
    return torch.cat((seen.expand(both, length, past_length), causal.expand(both, length, length)), -1)
