"""Runs policies that the lean decoder does not cover, through models.decoder.forward, over the same KV slots.

Owns: the plain step: gather past keys and values, call the forward pass, store the new ones. No fused operators.

Promises: the same results and the same methods as `NativeRunner`; it runs native policies too, which is how the two
are tested against each other.

Shapes: n rows, P prompts, T new tokens, S cache columns, L layers, E experts per token, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotloop.engines.torch.kv_cache import KVCache
from hotloop.engines.torch.runner import PREFILL_PIECE_TOKENS, Ints, Prefill, PrefillResult
from hotloop.engines.torch.trunk import TrunkLayout
from hotloop.models.config import DecoderConfig
from hotloop.models.decoder import DecoderParams, compute_logits, forward
from hotloop.models.fallback import ForeignParams
from hotloop.models.weights import Arena


class ForeignRunner:
    """One prompt at a time in prefill, all rows at once in decode."""

    def __init__(self, config: DecoderConfig, arena: Arena, *, num_slots: int, max_context: int) -> None:
        self.config = config
        self.num_slots = num_slots
        self.max_context = max_context
        self._params: DecoderParams | ForeignParams = arena.forward_params
        self._device = arena.flat.device
        self.kv = KVCache(config, num_slots, max_context, arena.flat.dtype, str(self._device))
        self._route_dtype = np.uint8 if config.num_experts <= 256 else np.uint16

    def refresh(self) -> None:
        """Nothing is derived from the weights here."""

    @property
    def reads_trunks(self) -> bool:
        """Never: the plain forward pass reads each row's own cache."""
        return False

    @torch.inference_mode()
    def decode(
        self, tokens: Ints, lengths: Ints, trunks: TrunkLayout | None = None
    ) -> tuple[Tensor, npt.NDArray[np.generic] | None]:
        """Feed one token per row at position `lengths`; return logits [n, V] fp32 and routes [n, L, E]."""
        positions = torch.from_numpy(lengths).to(self._device)
        ids = torch.from_numpy(tokens).to(self._device)
        logits, routes = self._forward(0, len(tokens), ids[:, None], positions[:, None], int(lengths.max()))
        return logits[:, -1], None if routes is None else routes[:, 0]

    @torch.inference_mode()
    def prefill(self, prefills: list[Prefill]) -> PrefillResult:
        """Run prompts into rows."""
        last: list[Tensor] = []
        all_logits: dict[int, Tensor] = {}
        routes: list[npt.NDArray[np.generic]] = []
        for index, one in enumerate(prefills):
            logits: list[Tensor] = []
            used: list[npt.NDArray[np.generic]] = []
            for at in range(0, len(one.ids), PREFILL_PIECE_TOKENS):
                ids = torch.tensor([one.ids[at : at + PREFILL_PIECE_TOKENS]], device=self._device)
                start = one.start + at
                positions = torch.arange(start, start + ids.shape[1], device=self._device)[None]
                piece, piece_routes = self._forward(one.row, one.row + 1, ids, positions, start)
                logits.append(piece[0])
                if piece_routes is not None:
                    used.append(piece_routes[0])
            last.append(logits[-1][-1])
            if one.wants_all_logits:
                all_logits[index] = torch.cat(logits)
            if used:
                routes.append(np.concatenate(used))
        return PrefillResult(torch.stack(last), all_logits, routes or None)

    def _forward(
        self, first: int, stop: int, ids_BT: Tensor, positions_BT: Tensor, past_columns: int
    ) -> tuple[Tensor, npt.NDArray[np.generic] | None]:
        """Run rows first .. stop-1 over what they hold and store the new keys and values."""
        config = self.config
        records = config.is_native and config.num_experts > 0
        past = past_mask = None
        if past_columns:
            windows = [self.kv.window(layer, first, stop, past_columns) for layer in range(config.num_layers)]
            past = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in windows]
            past_mask = torch.arange(past_columns, device=self._device) < positions_BT[:, :1]
        out = forward(
            config, self._params, ids_BT, positions_BT, past=past, past_mask_BS=past_mask, record_routes=records
        )
        rows = torch.arange(first, stop, device=self._device)[:, None] * self.max_context
        where = (rows + positions_BT).reshape(-1)
        for layer, (keys, values) in enumerate(out.kv):
            new = torch.cat((keys, values), 2).reshape(-1, 2 * config.num_kv_heads, config.head_dim)
            self.kv.flat[layer].index_copy_(0, where, new)
        routes = None if out.routes_BTLK is None else out.routes_BTLK.cpu().numpy().astype(self._route_dtype)
        return compute_logits(config, self._params, out.hidden_BTD).float(), routes

    @torch.inference_mode()
    def copy_rows(self, source: Ints, target: Ints, length: int) -> None:
        """Copy the first `length` columns of some rows onto others; no target is a source."""
        self.kv.copy_rows(source, target, length)

    @torch.inference_mode()
    def read_columns(self, row: int, start: int, stop: int) -> Tensor:
        """Copy out columns of a row, [L, stop - start, 2 K, d]."""
        return self.kv.all[:, row, start:stop].clone()

    @torch.inference_mode()
    def write_columns(self, row: int, start: int, columns: Tensor) -> None:
        """Copy columns into a row."""
        self.kv.all[:, row, start : start + columns.shape[1]] = columns
