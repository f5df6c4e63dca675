"""Attention of many answers over one prompt: the prompt's keys are read once per group, not once per answer.

Owns: the keys and values of prompts that several rows share (trunks), how rows are laid out by trunk, and attention in
two parts that are merged by their log-sum-exp.

    queries of all rows of a group  x  trunk (prompt)        one product per group, reads the prompt once
    query of each row               x  its own later tokens  as usual
    merged: weight of the trunk part = sigmoid(lse_trunk - lse_own)

Promises: equal to plain attention up to rounding; used only where every row belongs to a trunk, a prompt is long and
groups are large enough to gain. CPU only: the CPU kernel returns its log-sum-exp.

Does not do: decide which completions start from which prompt (core.py).

Shapes: n rows, G trunks, R most rows of one trunk, K key heads, F query heads per key head, P prompt columns, d head
size, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

MIN_PROMPT_TOKENS = 64
"""Below this, reading the prompt for every row costs less than merging two parts."""
MIN_ROWS_PER_TRUNK = 2
Stacked = tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class TrunkStore:
    """The prompts that completions in flight share, and the layout of the rows at this moment."""

    def __init__(self) -> None:
        self._columns: dict[int, Tensor] = {}
        self._next = 0
        self._layout: TrunkLayout | None = None
        self.rows_changed = False
        """Set by whoever moved, added or removed a row."""

    def open(self, columns: Tensor) -> int:
        """Keep a prompt's keys and values [L, P, 2 K, d]; return its id."""
        self._columns[self._next] = columns
        self._next += 1
        return self._next - 1

    def lay_out(self, rows: Ints, trunks: Ints, n: int) -> TrunkLayout | None:
        """Lay n rows out, or return None where plain attention is as good.

        Args:
            rows: [C] row of each completion.
            trunks: [C] id of each completion's prompt, -1 for none.
        """
        if not self._columns:
            return None
        if self.rows_changed:
            self.rows_changed = False
            of_row = np.full(n, -1, dtype=np.int64)
            of_row[rows] = trunks
            alive = set(trunks.tolist())
            self._columns = {one: kept for one, kept in self._columns.items() if one in alive}
            self._layout = TrunkLayout(self._columns, of_row, self._layout) if is_worth_it(of_row) else None
        return self._layout

    def clear(self) -> None:
        """Forget every prompt."""
        self._columns.clear()
        self._layout = None


class TrunkLayout:
    """The rows of one moment, laid out by trunk."""

    def __init__(self, columns: Mapping[int, Tensor], trunk_of_row: Ints, previous: TrunkLayout | None) -> None:
        """Lay rows out.

        Args:
            columns: trunk id -> [L, P, 2 K, d] keys and values of its prompt.
            trunk_of_row: [n] ids.
            previous: layout before; its stacked keys are kept when the trunks are the same.
        """
        ids, group = np.unique(trunk_of_row, return_inverse=True)
        self.ids: tuple[int, ...] = tuple(ids.tolist())
        parts = [columns[one] for one in self.ids]
        lengths = np.array([part.shape[1] for part in parts])
        self.begin = int(lengths.min())
        """First column that rows read by themselves."""
        self.own_from = torch.from_numpy(lengths[group])
        """[n] columns before this are the trunk's."""
        self.is_even = bool((lengths == lengths[0]).all())
        counts = np.bincount(group)
        width = int(counts.max())
        order = np.argsort(group, kind="stable")
        place = np.empty(len(group), dtype=np.int64)
        place[order] = np.arange(len(group)) - (np.cumsum(counts) - counts)[group[order]]
        place += group * width
        gather = np.zeros(len(ids) * width, dtype=np.int64)
        gather[place] = np.arange(len(group))
        self._gather, self._place = torch.from_numpy(gather), torch.from_numpy(place)
        self._groups, self._width = len(ids), width
        stacked = previous._stacked if previous is not None and previous.ids == self.ids else None
        self._stacked: Stacked = stacked or _stack(parts, int(lengths.max()), lengths)
        self._keys, self._values, self._mask = self._stacked

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend over the trunk and over a row's own columns.

        Args:
            queries: [n, K, F, d].
            keys: [n, K, own columns, d], from column `begin` on.
            mask: [n, 1, 1, own columns] additive, or None.
            scale: of the scores; None means 1 / sqrt(d).

        Returns:
            [n, K, F, d]
        """
        _, heads, fold, d = queries.shape
        groups, width = self._groups, self._width
        laid = queries.index_select(0, self._gather).view(groups, width, heads, fold, d)
        laid = laid.transpose(1, 2).reshape(groups, heads, width * fold, d)
        shared, shared_lse = _flash(laid, self._keys[layer], self._values[layer], attn_mask=self._mask, scale=scale)
        own, own_lse = _flash(queries, keys, values, attn_mask=mask, scale=scale)
        shared = shared.reshape(groups, heads, width, fold, d).transpose(1, 2).reshape(groups * width, heads, fold, d)
        shared_lse = shared_lse.reshape(groups, heads, width, fold).transpose(1, 2).reshape(groups * width, heads, fold)
        weight = torch.sigmoid(shared_lse.index_select(0, self._place) - own_lse.reshape(-1, heads, fold))[..., None]
        merged: Tensor = torch.lerp(own, shared.index_select(0, self._place), weight.to(own.dtype))
        return merged


def is_worth_it(trunk_of_row: Ints) -> bool:
    """Say whether every row has a trunk and groups are large enough."""
    if len(trunk_of_row) == 0 or int(trunk_of_row.min()) < 0:
        return False
    return len(trunk_of_row) >= MIN_ROWS_PER_TRUNK * len(np.unique(trunk_of_row))


def _stack(parts: Sequence[Tensor], longest: int, lengths: Ints) -> Stacked:
    """Stack prompts to keys and values [G, K, P, d] per layer, and a mask for the shorter ones."""
    layers, _, double, d = parts[0].shape
    whole = parts[0].new_zeros(layers, len(parts), longest, double, d)
    for index, part in enumerate(parts):
        whole[:, index, : part.shape[1]] = part
    whole = whole.transpose(2, 3).contiguous()
    mask = None
    if not (lengths == longest).all():
        is_absent = torch.arange(longest)[None] >= torch.from_numpy(lengths)[:, None]
        mask = torch.zeros(len(parts), 1, 1, longest, dtype=whole.dtype)
        mask.masked_fill_(is_absent[:, None, None], float("-inf"))
    return whole[:, :, : double // 2].unbind(0), whole[:, :, double // 2 :].unbind(0), mask
