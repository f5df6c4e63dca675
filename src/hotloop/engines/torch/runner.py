"""Runs the decoder for the engine: packed prefill and one-token decode steps over a KV cache in slots.

Owns: rotary tables, buffers derived from weights, and the order of operators of prefill and of a decode step: fused
q/k/v and gate/up, both norms of q and k as one, keys and values written by one indexed copy, residuals inside
addmm, results in buffers whose views exist already (workspace.py). A small fp32 policy on a CPU is bound by the cost
of calling operators and takes its decode steps in small.py. The last layer of a prefill computes keys and values of
every token, and the rest of the last token only, where nobody wants more.

Promises: rows 0 .. n-1 are dense; a row's result depends on other rows only by rounding; positions past a row's
length are never read; logits equal models.decoder.forward to rounding, routes exactly.

Does not do: which row belongs to whom (core.py), drawing (draw.py), writing weights (install.py, which calls
`refresh`). Policies that are not native run through `ForeignRunner`, same methods, no fused steps.

Shapes: n rows, N packed tokens, P prompts, T longest new part, S cache columns, D hidden, Q query heads, K key heads,
d head size, L layers, V vocabulary, E experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hotloop.engines.torch.kv_cache import KVCache
from hotloop.engines.torch.small import SmallDecoder
from hotloop.engines.torch.trunk import TrunkLayout
from hotloop.engines.torch.workspace import LayerStep, Workspace
from hotloop.models.config import DecoderConfig
from hotloop.models.decoder import LayerParams, compute_logits, compute_moe, compute_rope
from hotloop.models.weights import Arena

Ints = npt.NDArray[np.int64]

PREFILL_PIECE_TOKENS = 512
"""A longer prompt is prefilled in pieces, so that attention scores stay small."""
FOLD_LIMIT_BYTES = 32 * 2**20
"""Policies up to this size get copies of their matrices with the norm weights folded in."""
PREFILL_CHUNK_TOKENS = 4096
"""Packed tokens per prefill pass."""


@dataclass(slots=True)
class Prefill:
    """One prompt to prefill into one row."""

    row: int
    start: int
    """Tokens already in the row's cache (prefix reuse)."""
    ids: list[int]
    """The prompt from `start` on; at least one token."""
    wants_all_logits: bool = False


@dataclass(slots=True)
class PrefillResult:
    """What a prefill leaves for the scheduler."""

    last_logits: Tensor
    """[P, V] fp32 at each prompt's last token."""
    all_logits: dict[int, Tensor]
    """Index into the prefills -> [len(ids), V] fp32, where asked for."""
    routes: list[npt.NDArray[np.generic]] | None
    """[P] of [len(ids), L, E]; None for a dense policy."""


class Runner(Protocol):
    """What the scheduler needs of a policy."""

    num_slots: int
    max_context: int

    def prefill(self, prefills: list[Prefill]) -> PrefillResult: ...

    @property
    def reads_trunks(self) -> bool:
        """True when `decode` takes a trunk layout."""
        ...

    def decode(
        self, tokens: Ints, lengths: Ints, trunks: TrunkLayout | None = None
    ) -> tuple[Tensor, npt.NDArray[np.generic] | None]:
        """Feed one token per row at position `lengths`; return logits [n, V] fp32 and routes [n, L, E]."""
        ...

    def copy_rows(self, source: Ints, target: Ints, length: int) -> None: ...

    def read_columns(self, row: int, start: int, stop: int) -> Tensor: ...

    def write_columns(self, row: int, start: int, columns: Tensor) -> None: ...

    def refresh(self) -> None:
        """Recompute what is derived from weights; after every write."""
        ...


class NativeRunner:
    """The fast path for policies that models/decoder.py covers."""

    def __init__(self, config: DecoderConfig, arena: Arena, *, num_slots: int, max_context: int) -> None:
        self.config = config
        self.arena = arena
        self.num_slots = num_slots
        self.max_context = max_context
        self._device = arena.flat.device
        self._dtype = arena.flat.dtype
        self.kv = KVCache(config, num_slots, max_context, self._dtype, str(self._device))
        positions = torch.arange(max_context, device=self._device)
        cos, sin = compute_rope(config.rope, config.head_dim, positions)
        self._rope = torch.stack((cos, sin), 1).to(self._dtype)
        """[S, 2, d]"""
        self._row_base = torch.arange(num_slots, device=self._device) * max_context
        self._columns = torch.arange(max_context, device=self._device)
        # x / sqrt(mean(x^2) + eps) is x sqrt(D) / hypot(|x|, sqrt(eps D)). In fp32 the sqrt(D) sits in the weight; in
        # bf16 that would round the weight, so it goes into the fp32 norm.
        self._is_wide = self._dtype == torch.float32
        self._norm_floor = torch.tensor(math.sqrt(config.rms_norm_eps * config.hidden_size), device=self._device)
        self._head_floor = torch.tensor(math.sqrt(config.rms_norm_eps * config.head_dim), device=self._device)
        self._norm_unit = 1.0 / math.sqrt(config.hidden_size)
        self._head_unit = 1.0 / math.sqrt(config.head_dim)
        self._workspace = Workspace(config, num_slots, self._dtype, self._device, float(self._norm_floor))
        self._steps: list[LayerStep] = []
        self._final_norm = self._head_t = torch.empty(0)
        # A small policy is bound by the number of operators: copies of its matrices that hold the norm weights save two
        # per layer. A large one is bound by memory, and keeps one copy.
        self._folds = self._is_wide and arena.flat.numel() * arena.flat.itemsize <= FOLD_LIMIT_BYTES
        self._qk_norms: tuple[Tensor, Tensor] | None = None
        """[L, 1, Q + K, d] weights of the cosine and of the sine, when folded into the rotation."""
        self._route_dtype = np.uint8 if config.num_experts <= 256 else np.uint16
        is_small = self._folds and self._device.type == "cpu"
        self._small = SmallDecoder(config, self.kv, self._rope, num_slots) if is_small else None
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Recompute the scaled norm weights; everything else is a view on the arena."""
        params, config = self.arena.params, self.config
        wide = math.sqrt(config.hidden_size) if self._is_wide else 1.0
        head = math.sqrt(config.head_dim) if self._is_wide else 1.0
        self._final_norm = params.norm * wide
        self._head_t = self._fold(params.head, self._final_norm)
        self._steps = []
        for index, layer in enumerate(params.layers):
            qk_norm = None
            if layer.q_norm is not None and layer.k_norm is not None:
                rows = (layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1))
                qk_norm = torch.cat(rows) * head
            input_norm, post_norm = layer.input_norm * wide, layer.post_norm * wide
            self._steps.append(
                LayerStep(
                    index=index,
                    layer=layer,
                    input_norm=input_norm,
                    post_norm=post_norm,
                    qk_norm=qk_norm,
                    qkv_t=self._fold(layer.qkv, input_norm),
                    qkv_bias=layer.qkv_bias,
                    o_t=layer.o.t(),
                    o_bias=layer.o_bias,
                    gate_up_t=None if layer.gate_up is None else self._fold(layer.gate_up, post_norm),
                    down_t=None if layer.down is None else layer.down.t(),
                    kv_flat=self.kv.flat[index],
                )
            )
        weights = [step.qk_norm for step in self._steps if step.qk_norm is not None]
        if self._folds and weights:
            stacked = torch.stack(weights)[:, None]
            self._qk_norms = (stacked, stacked.roll(config.head_dim // 2, -1))
        if self._small is not None:
            self._small.load(self._steps, params.embed, self._head_t)

    def _fold(self, matrix: Tensor, norm: Tensor) -> Tensor:
        """Transpose a matrix, with the norm of its input folded in when this runner folds."""
        return (matrix * norm).t().contiguous() if self._folds else matrix.t()

    def _norm_into(self, x: Tensor, size: Tensor, floor: Tensor, unit: float, out: Tensor) -> Tensor:
        """Write x / rms(x) (times sqrt of the width in fp32) into `out`: three operators, the mean in fp32."""
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32, out=size)
        size.hypot_(floor)
        if not self._is_wide:
            size.mul_(unit)
        return torch.div(x, size, out=out)

    def _norm(self, x: Tensor, scaled_weight: Tensor, floor: Tensor, unit: float) -> Tensor:
        """RMSNorm of the last dimension into a new tensor."""
        size = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        return self._norm_into(x, size, floor, unit, torch.empty(x.shape, dtype=x.dtype, device=x.device)).mul_(
            scaled_weight
        )

    def _project(self, layer_index: int, layer: LayerParams, x: Tensor, rope: Tensor) -> Tensor:
        """Project to heads [N, Q + 2 K, d], q and k normed and rotated."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        step = self._steps[layer_index]
        h = self._norm(x, step.input_norm, self._norm_floor, self._norm_unit)
        heads = F.linear(h, layer.qkv, layer.qkv_bias).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        rotated = heads[:, :num_rotated]
        qk = rotated
        if step.qk_norm is not None:
            qk = self._norm(rotated, step.qk_norm, self._head_floor, self._head_unit)
        turned = qk.roll(config.head_dim // 2, -1)
        torch.addcmul(qk * rope[:, :1], turned, rope[:, 1:], out=rotated)
        return heads

    def _finish_layer(
        self, layer_index: int, layer: LayerParams, x: Tensor, mixed: Tensor, routes: list[Tensor]
    ) -> None:
        """Add the attention output and the MLP to `x` in place."""
        x.addmm_(mixed, layer.o.t())
        if layer.o_bias is not None:
            x.add_(layer.o_bias)
        h = self._norm(x, self._steps[layer_index].post_norm, self._norm_floor, self._norm_unit)
        if layer.router is not None:
            out, used, _ = compute_moe(self.config, layer, h, None)
            x.add_(out)
            routes.append(used)
            return
        assert layer.gate_up is not None and layer.down is not None
        gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
        x.addmm_(F.silu(gate).mul_(up), layer.down.t())
        if self.config.num_experts:
            routes.append(torch.zeros(x.shape[0], self.config.experts_per_token, dtype=torch.int64, device=x.device))

    def _logits(self, x: Tensor) -> Tensor:
        h = self._norm(x, self._final_norm, self._norm_floor, self._norm_unit)
        return compute_logits(self.config, self.arena.params, h).float()

    def _pack_routes(self, routes: list[Tensor]) -> npt.NDArray[np.generic] | None:
        if not routes:
            return None
        packed: npt.NDArray[np.generic] = torch.stack(routes, 1).cpu().numpy().astype(self._route_dtype)
        return packed

    @property
    def reads_trunks(self) -> bool:
        """True on a CPU, whose attention kernel returns what merging needs."""
        return self._device.type == "cpu"

    @torch.inference_mode()
    def decode(
        self, tokens: Ints, lengths: Ints, trunks: TrunkLayout | None = None
    ) -> tuple[Tensor, npt.NDArray[np.generic] | None]:
        """Feed one token per row at position `lengths`; return logits [n, V] fp32 and routes [n, L, E]."""
        if self._small is not None:
            small_logits, small_routes = self._small.decode(tokens, lengths, trunks)
            return small_logits, self._pack_routes(small_routes)
        n = len(tokens)
        columns = int(lengths.max()) + 1
        positions = torch.from_numpy(lengths).to(self._device)
        where = self._row_base[:n] + positions
        cosines, upper_sines, lower_sines = self._rotation(positions)
        begin = 0 if trunks is None else trunks.begin
        mask = None
        if int(lengths.min()) + 1 != columns or (trunks is not None and not trunks.is_even):
            hidden = self._columns[begin:columns] > positions[:, None]
            if trunks is not None:
                hidden |= self._columns[begin:columns] < trunks.own_from[:, None]
            mask = torch.zeros(n, 1, 1, columns - begin, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden[:, None, None], float("-inf"))
        w = self._workspace.views(n)
        x, h, size, rotated, head_size, normed = w.x, w.h, w.size, w.rotated, w.head_size, w.normed
        x.copy_(F.embedding(torch.from_numpy(tokens).to(self._device), self.arena.params.embed))
        folds, rotation_has_norm = self._folds, self._qk_norms is not None
        routes: list[Tensor] = []
        keys, values = self.kv.windows(n, begin, columns)
        for step in self._steps:
            index = step.index
            self._normalise(w.x_and_floor, x, size, self._norm_unit, h)
            if not folds:
                h.mul_(step.input_norm)
            if step.qkv_bias is None:
                torch.mm(h, step.qkv_t, out=w.heads_flat)
            else:
                torch.addmm(step.qkv_bias, h, step.qkv_t, out=w.heads_flat)
            if step.qk_norm is None:
                normed.copy_(rotated)
            else:
                self._norm_into(rotated, head_size, self._head_floor, self._head_unit, normed)
                if not rotation_has_norm:
                    normed.mul_(step.qk_norm)
            torch.mul(normed, cosines[index], out=w.product)
            torch.addcmul(w.product_upper, w.lower, upper_sines[index], out=w.rotated_upper)
            torch.addcmul(w.product_lower, w.upper, lower_sines[index], out=w.rotated_lower)
            step.kv_flat.index_copy_(0, where, w.new_kv)
            if trunks is None:
                mixed = F.scaled_dot_product_attention(w.queries, keys[index], values[index], attn_mask=mask)
            else:
                mixed = trunks.attend(index, w.queries, keys[index], values[index], mask)
            x.addmm_(mixed.reshape(n, -1), step.o_t)
            if step.o_bias is not None:
                x.add_(step.o_bias)
            self._normalise(w.x_and_floor, x, size, self._norm_unit, h)
            if step.gate_up_t is not None and step.down_t is not None:
                if not folds:
                    h.mul_(step.post_norm)
                torch.mm(h, step.gate_up_t, out=w.gate_up)
                x.addmm_(F.silu(w.gate).mul_(w.up), step.down_t)
                if self.config.num_experts:
                    routes.append(torch.zeros(n, self.config.experts_per_token, dtype=torch.int64, device=x.device))
            else:
                out, used, _ = compute_moe(self.config, step.layer, h.mul_(step.post_norm), None)
                x.add_(out)
                routes.append(used)
        self._normalise(w.x_and_floor, x, size, self._norm_unit, h)
        if not folds:
            h.mul_(self._final_norm)
        return torch.mm(h, self._head_t).float(), self._pack_routes(routes)

    def _rotation(self, positions: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Give cosines [n, 1 or Q + K, d] and both halves of the sines per layer, norm weights folded in or not."""
        half = self.config.head_dim // 2
        cos, sin = torch.split(self._rope.index_select(0, positions), 1, 1)
        if self._qk_norms is None:
            layers = self.config.num_layers
            return [cos] * layers, [sin[..., :half]] * layers, [sin[..., half:]] * layers
        # x w rotated is x (w cos) + turned(x) (turned(w) sin).
        sines = self._qk_norms[1] * sin
        return (self._qk_norms[0] * cos).unbind(0), sines[..., :half].unbind(0), sines[..., half:].unbind(0)

    def _normalise(self, x_and_floor: Tensor, x: Tensor, size: Tensor, unit: float, out: Tensor) -> None:
        """Write x / rms(x) as `_norm_into` does; the floor is a column beside x, which saves the hypot."""
        torch.linalg.vector_norm(x_and_floor, dim=-1, keepdim=True, dtype=torch.float32, out=size)
        if not self._is_wide:
            size.mul_(unit)
        torch.div(x, size, out=out)

    @torch.inference_mode()
    def prefill(self, prefills: list[Prefill]) -> PrefillResult:
        """Run prompts into consecutive rows, shortest padding first by keeping the caller's order.

        Args:
            prefills: rows must be consecutive and rising.
        """
        last: list[Tensor] = []
        all_logits: dict[int, Tensor] = {}
        routes: list[npt.NDArray[np.generic]] | None = [] if self.config.num_experts else None
        begin = 0
        while begin < len(prefills):
            stop, tokens = begin + 1, len(prefills[begin].ids)
            while stop < len(prefills) and tokens + len(prefills[stop].ids) <= PREFILL_CHUNK_TOKENS:
                tokens += len(prefills[stop].ids)
                stop += 1
            self._prefill_chunk(prefills[begin:stop], begin, last, all_logits, routes)
            begin = stop
        return PrefillResult(torch.cat(last), all_logits, routes)

    def _prefill_chunk(
        self,
        prefills: list[Prefill],
        begin: int,
        last: list[Tensor],
        all_logits: dict[int, Tensor],
        routes: list[npt.NDArray[np.generic]] | None,
    ) -> None:
        """Prefill one chunk piece by piece; a short prompt is one piece."""
        longest = max(len(one.ids) for one in prefills)
        found: dict[int, Tensor] = {}
        hidden: dict[int, list[Tensor]] = {}
        used: dict[int, list[npt.NDArray[np.generic]]] = {index: [] for index in range(len(prefills))}
        packs_last = not self.config.num_experts  # routes are recorded of every token in every layer
        for at in range(0, longest, PREFILL_PIECE_TOKENS):
            live = [index for index, one in enumerate(prefills) if len(one.ids) > at]
            pieces = [prefills[index].ids[at : at + PREFILL_PIECE_TOKENS] for index in live]
            starts = [prefills[index].start + at for index in live]
            rows = [prefills[index].row for index in live]
            wants_last = packs_last and not any(prefills[index].wants_all_logits for index in live)
            x_ND, packed = self._run_pieces(rows, starts, pieces, wants_last)
            offset = 0
            for order, (index, piece) in enumerate(zip(live, pieces, strict=True)):
                offset += len(piece)
                if at + len(piece) == len(prefills[index].ids):
                    found[index] = x_ND[order if wants_last else offset - 1]
                if prefills[index].wants_all_logits:
                    hidden.setdefault(index, []).append(x_ND[offset - len(piece) : offset])
                if packed is not None:
                    used[index].append(packed[offset - len(piece) : offset])
        last.append(self._logits(torch.stack([found[index] for index in range(len(prefills))])))
        for index, parts in hidden.items():
            all_logits[begin + index] = self._logits(torch.cat(parts))
        if routes is not None:
            routes.extend(np.concatenate(used[index]) for index in range(len(prefills)))

    def _run_pieces(
        self, rows: list[int], starts: list[int], pieces: list[list[int]], wants_last: bool
    ) -> tuple[Tensor, npt.NDArray[np.generic] | None]:
        """Run packed tokens of several rows through all layers; return hidden states [N, D] and routes [N, L, E].

        Args:
            wants_last: only the last token of each piece is wanted, [rows, D]: the last layer then computes keys and
                values of every token and the rest of that one.
        """
        config, params, device = self.config, self.arena.params, self._device
        lengths = [len(piece) for piece in pieces]
        longest, count = max(lengths), len(rows)
        columns = max(start + length for start, length in zip(starts, lengths, strict=True))
        padded = np.arange(longest)[None, :] + np.array(starts)[:, None]
        is_token = np.arange(longest)[None, :] < np.array(lengths)[:, None]
        positions = torch.from_numpy(padded[is_token]).to(device)
        where = torch.from_numpy((padded + np.array(rows)[:, None] * self.max_context)[is_token]).to(device)
        is_even = bool(is_token.all())
        spots = None if is_even else torch.from_numpy(np.flatnonzero(is_token)).to(device)
        rope = self._rope.index_select(0, positions)
        num_heads, num_kv, d = config.num_heads, config.num_kv_heads, config.head_dim
        fold = num_heads // num_kv
        is_plain = is_even and not any(starts)
        mask = None
        if not is_plain:
            seen = self._columns[:columns] <= torch.from_numpy(padded).to(device)[..., None]
            mask = seen[:, None].repeat(1, 1, fold, 1)
        is_even_end = all(start + length == columns for start, length in zip(starts, lengths, strict=True))
        first, stop = rows[0], rows[-1] + 1
        is_dense = stop - first == count
        picks = None if is_dense else torch.tensor(rows, device=device)
        x = F.embedding(torch.tensor([one for piece in pieces for one in piece], device=device), params.embed)
        routes: list[Tensor] = []
        for index, layer in enumerate(params.layers):
            heads = self._project(index, layer, x, rope)
            self.kv.flat[index].index_copy_(0, where, heads[:, num_heads:])
            if picks is None:
                keys, values = self.kv.window(index, first, stop, columns)
            else:
                part = self.kv.all[index].index_select(0, picks)[:, :columns].transpose(1, 2)
                keys, values = part[:, :num_kv], part[:, num_kv:]
            if wants_last and index == config.num_layers - 1:
                ends = torch.from_numpy(np.cumsum(lengths) - 1).to(device)
                x = x.index_select(0, ends)
                queries = heads[:, :num_heads].index_select(0, ends).view(count, num_kv, fold, d)
                seen = (self._columns[:columns] <= positions[ends, None])[:, None, None]
                mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=None if is_even_end else seen)
                self._finish_layer(index, layer, x, mixed.reshape(count, -1), routes)
                break
            if spots is None:
                q = heads[:, :num_heads].view(count, longest, num_heads, d)
            else:
                q = x.new_zeros(count * longest, num_heads, d).index_copy_(0, spots, heads[:, :num_heads])
                q = q.view(count, longest, num_heads, d)
            if mask is None:
                keys, values = keys.repeat_interleave(fold, 1), values.repeat_interleave(fold, 1)
                mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
                mixed = mixed.transpose(1, 2)
            else:
                folded = q.view(count, longest, num_kv, fold, d).permute(0, 2, 3, 1, 4).reshape(count, num_kv, -1, d)
                mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
                mixed = mixed.view(count, num_kv, fold, longest, d).permute(0, 3, 1, 2, 4)
            mixed = mixed.reshape(count * longest, num_heads * d)
            if spots is not None:
                mixed = mixed.index_select(0, spots)
            self._finish_layer(index, layer, x, mixed, routes)
        return x, self._pack_routes(routes)

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
