"""Policies that the lean decoder does not cover, run by transformers behind the same call.

Owns: a transformers model whose parameters are views on our arena, and `forward_foreign`, which takes and gives what
models.decoder.forward does: keys and values in and out, padding masks, gradients.

Promises: built from config.json alone (no remote code, no pickles); the arena stays the one home of the weights, so
in-place writes and flat gradients work as for native policies. Logits come from the model's own forward pass with its
body taken out, so scales and soft caps after the projection are kept; building checks that body and head together give
the whole model's logits.

    ids -> body -> hidden        (forward_foreign)
                   hidden -> [body passes it on] -> projection, scale, cap -> logits   (compute_foreign_logits)

Does not do: routes of experts, windows shorter than the context, states in place of keys and values (refused with
`policy_unsupported`).

Shapes: as in models/decoder.py.
"""

from __future__ import annotations

import copy
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
    head: Any
    """The same model with a body that gives back the hidden states it is given; shares every other module."""
    by_name: dict[str, Tensor]


def build_foreign(config: DecoderConfig, tensors: dict[str, Tensor]) -> ForeignParams:
    """Build the transformers model of a config around existing tensors.

    Args:
        tensors: checkpoint name -> live view; leaves that require grad stay leaves.

    Raises:
        InputError: code `policy_unsupported` when transformers does not know the architecture, its cache is of
            another kind, its attention has a window that is shorter than the context, its logits do not follow from
            its hidden states, or its names differ from the checkpoint's.
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
    _check_attention(hf, config)
    model.eval()
    head = _take_body_out(model, config.model_type)
    _check_head(model, head, config)
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
    return ForeignParams(model, head, dict(tensors))


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
    """Project hidden states [..., D] with everything that the model does after its body; logits [..., V]."""
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    logits: Tensor = params.head(inputs_embeds=flat, use_cache=False).logits
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])


class _PassOn(torch.nn.Module):
    """Stands where the body was: what it is given as embeddings are the hidden states."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)


class _BodyOutput:
    """What a body returns, of any architecture: the hidden states by name or first, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _take_body_out(model: Any, model_type: str) -> Any:
    """Copy a model without its body; the copy shares all other modules, and parameters that are placed later."""
    body = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is body), "")
    if not path:
        raise InputError("policy_unsupported", "its body and its head are one module", where=model_type)
    owner = head = _copy_shallow(model)
    *parents, leaf = path.split(".")
    for name in parents:
        owner._modules[name] = _copy_shallow(owner._modules[name])
        owner = owner._modules[name]
    owner._modules[leaf] = _PassOn()
    return head


def _copy_shallow(module: Any) -> Any:
    """Copy a module so that its children can be exchanged; parameters and buffers stay shared."""
    made = copy.copy(module)
    made.__dict__["_modules"] = dict(module._modules)
    return made


@torch.no_grad()
def _check_head(model: Any, head: Any, config: DecoderConfig) -> None:
    """Compare, on the weights that transformers has just drawn, body and head with the whole model.

    Raises:
        InputError: code `policy_unsupported`.
    """
    ids = torch.arange(min(4, config.vocab_size))[None]
    wanted = model(input_ids=ids, use_cache=False).logits.double()
    try:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        found = head(inputs_embeds=hidden, use_cache=False).logits.double()
    except (AttributeError, TypeError, ValueError) as error:
        why = f"its head does not run on hidden states alone ({type(error).__name__}: {error})"
        raise InputError("policy_unsupported", why, where=config.model_type) from error
    is_same = found.shape == wanted.shape and bool((found - wanted).norm() <= 1e-2 * wanted.norm())
    if not is_same:
        why = "its logits do not follow from its hidden states, so log-probabilities would be wrong"
        raise InputError("policy_unsupported", why, where=config.model_type)


def _check_attention(hf: Any, config: DecoderConfig) -> None:
    """Refuse every attention that, within the policy's context, is not over all tokens before.

    Raises:
        InputError: code `policy_unsupported`.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    windows: list[int] = []
    try:
        layers = DynamicCache(config=hf).layers
    except (KeyError, AttributeError, ValueError, TypeError) as error:
        why = f"transformers knows no cache of keys and values for it ({type(error).__name__}: {error})"
        raise InputError("policy_unsupported", why, where=config.model_type) from error
    for layer in layers:
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        elif type(layer) is not DynamicLayer:
            why = f"a {type(layer).__name__} of its cache does not keep one key and value per token"
            raise InputError("policy_unsupported", why, where=config.model_type)
    if "local" in (getattr(hf, "attention_layers", None) or ()):  # GPT-Neo masks inside its layers
        windows.append(int(hf.window_size))
    context = int(getattr(hf, "max_position_embeddings", None) or config.max_positions)
    if windows and min(windows) < context:
        window = min(windows)
        raise InputError(
            "policy_unsupported",
            f"its attention sees the last {window} of {context} tokens in some layers, and here every layer sees all",
            where=config.model_type,
            do=f"Lower max_position_embeddings to {window} in its config.json, or take one with full attention.",
        )


def _place(model: torch.nn.Module, name: str, view: Tensor) -> None:
    """Put a view where the model keeps a parameter; a Parameter of a view shares its memory and its gradient."""
    owner, _, leaf = name.rpartition(".")
    parameter = torch.nn.Parameter(view, requires_grad=view.requires_grad)
    if view.requires_grad:
        parameter.grad = view.grad
    setattr(model.get_submodule(owner), leaf, parameter)
