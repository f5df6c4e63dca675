"""Policies that the lean decoder does not cover, run by transformers behind the same call.

Owns: a transformers model whose parameters are views on our arena, and `forward_foreign`, which takes and gives what
models.decoder.forward does: keys and values in and out, padding masks, gradients.

Promises: built from config.json alone (no remote code, no pickles); the arena stays the one home of the weights, so
in-place writes and flat gradients work as for native policies.

Does not do: routes of experts, sliding-window or hybrid caches (refused with `policy_unsupported`).

Shapes: as in models/decoder.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotloop.errors import InputError, MissingExtra
from hotloop.models.config import DecoderConfig
from hotloop.models.decoder import KV, DecoderOutput


@dataclass(slots=True)
class ForeignParams:
    """A transformers causal LM whose parameters live in an arena."""

    model: Any
    by_name: dict[str, Tensor]


def build_foreign(config: DecoderConfig, tensors: dict[str, Tensor]) -> ForeignParams:
    """Build the transformers model of a config around existing tensors.

    Args:
        tensors: checkpoint name -> live view; leaves that require grad stay leaves.

    Raises:
        InputError: code `policy_unsupported` when transformers does not know the architecture, its cache is of
            another kind, or its names differ from the checkpoint's.
        MissingExtra: transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtra(f"a policy of model_type {config.model_type!r}", "transformers", "torch") from error
    try:
        hf = AutoConfig.for_model(**dict(config.hf))
        # Built with weights of its own, which the arena's replace at once: buffers (rotary tables) come out right.
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(hf, trust_remote_code=False, attn_implementation="eager")
    except (ValueError, KeyError, ImportError) as error:
        raise InputError(
            "policy_unsupported", f"transformers cannot build this architecture ({error})", where=config.model_type
        ) from error
    own = dict(model.named_parameters())
    is_tied = bool(getattr(hf, "tie_word_embeddings", False))
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if is_tied else set()
    placed = {name: name for name in tensors if name in own}
    missing = sorted(set(own) - set(placed) - tied)
    spare = sorted(set(tensors) - set(placed))
    if len(missing) == len(spare) == 1 and own[missing[0]].shape == tensors[spare[0]].shape:
        placed[spare[0]] = missing[0]  # such as embed_out, which transformers calls lm_head
    elif missing:
        raise InputError(
            "policy_unsupported",
            f"the checkpoint does not name {missing[0]} (and {len(missing) - 1} others) as transformers does",
            where=config.model_type,
            do="Save the policy again with transformers and use that directory.",
        )
    for name, target in placed.items():
        _place(model, target, tensors[name])
    model.tie_weights()
    model.eval()
    return ForeignParams(model, dict(tensors))


def forward_foreign(
    config: DecoderConfig,
    params: ForeignParams,
    ids_BT: Tensor,
    positions_BT: Tensor,
    past: Sequence[KV] | None,
    past_mask_BS: Tensor | None,
    mask_BT: Tensor | None,
    *,
    wants_routes: bool,
) -> DecoderOutput:
    """Run the transformers model; see models.decoder.forward.

    Raises:
        InputError: code `routes_unsupported`.
    """
    if wants_routes:
        raise InputError("routes_unsupported", "this policy runs through transformers, which gives no routes")
    from transformers import DynamicCache

    rows, length = ids_BT.shape
    cache = DynamicCache()
    seen = ids_BT.new_ones(rows, length) if mask_BT is None else mask_BT.long()
    past_length = 0
    if past is not None:
        past_length = past[0][0].shape[1]
        for index, (k, v) in enumerate(past):
            cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
        before = ids_BT.new_ones(rows, past_length) if past_mask_BS is None else past_mask_BS.long()
        seen = torch.cat((before.expand(rows, -1), seen), 1)
    body = params.model.get_decoder()
    # transformers renamed this argument between 4 and 5.
    cache_name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    out = body(input_ids=ids_BT, attention_mask=seen, position_ids=positions_BT, use_cache=True, **{cache_name: cache})
    kv: list[KV] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[2] != past_length + length:
            raise InputError(
                "policy_unsupported",
                f"a {type(layer).__name__} of its cache does not keep one key and value per token",
                where=config.model_type,
            )
        kv.append((keys[:, :, past_length:].transpose(1, 2), values[:, :, past_length:].transpose(1, 2)))
    return DecoderOutput(hidden_BTD=out.last_hidden_state, kv=kv)


def compute_foreign_logits(params: ForeignParams, hidden: Tensor) -> Tensor:
    """Project hidden states with the model's own head."""
    logits: Tensor = params.model.get_output_embeddings()(hidden)
    return logits


def _place(model: torch.nn.Module, name: str, view: Tensor) -> None:
    """Put a view where the model keeps a parameter; a Parameter of a view shares its memory and its gradient."""
    owner, _, leaf = name.rpartition(".")
    parameter = torch.nn.Parameter(view, requires_grad=view.requires_grad)
    if view.requires_grad:
        parameter.grad = view.grad
    setattr(model.get_submodule(owner), leaf, parameter)
