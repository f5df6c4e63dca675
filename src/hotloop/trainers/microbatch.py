"""The rows of a step, cut into the arrays of one forward pass each.

Owns: `Microbatch`, the cut by a bound on tokens, and the index arithmetic of the two passes. Numpy only; every array
is built once, by whole-array operations.

    rows --cut--> microbatches:  prefix pass: each distinct prompt once
                                 branch pass: the responses, on the prompts' keys (absent when W is 0)

Promises: token weights are fixed per step before the cut, so the gradient is the sum over microbatches; padding is on
the right, where causal attention keeps it from every real token.

Does not do: what becomes a row (packing.py), the forward pass (torch/passes.py).

Shapes: N rows of a step, T tokens of the longest row, G prefixes and B rows of a microbatch, P and W the widths of
the prefix and the branch pass, R the response tokens of its longest row, C the cells (unmasked tokens) in it, K the
tokens that truncated sampling kept in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.trainers.packing import Ints, RowSupport, StepRows


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arrays of one forward pass: a prefix pass, and a branch pass on its keys (absent when W is 0)."""

    rows_B: Ints
    """Which row of the step each row is."""
    prefix_ids_GP: Ints
    prefix_lengths_G: Ints
    branch_ids_BW: Ints
    branch_positions_BW: Ints
    prefix_of_B: Ints
    """The prefix that each row continues."""
    gather_C: Ints
    """Where the hidden state that predicts each cell lies, in prefix states then branch states, flattened."""
    cells_C: Ints
    """Where each cell lies in the flattened [B, R] arrays."""
    targets_C: Ints
    mask_BR: NDArray[np.float32]
    advantages_BR: NDArray[np.float32]
    behaviour_BR: NDArray[np.float32]
    weights_BR: NDArray[np.float32]
    """Zero where masked."""
    prefix_routes: NDArray[np.int64] | None
    """[G, P, layers, top_k]"""
    branch_routes: NDArray[np.int64] | None
    """[B, W, layers, top_k]"""
    support_cells_K: Ints | None
    """Cell (index into C, rising) of each kept token; None when no sample was truncated."""
    support_ids_K: Ints | None
    """Kept token ids. A cell without any keeps the whole vocabulary."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the decoder, padding included."""
        return self.prefix_ids_GP.size + self.branch_ids_BW.size


def cut_microbatches(rows: StepRows, *, share_prompts: bool, max_tokens: int | None) -> list[Microbatch]:
    """Cut the rows of a step into forward passes of at most `max_tokens` tokens, padding included.

    A row longer than the bound is alone. Rows of one prompt stay together as far as the bound allows.
    """
    num_rows = len(rows.lengths_N)
    if not num_rows:
        return []
    splits_N = rows.starts_N if share_prompts else rows.lengths_N - 1
    if max_tokens is None:
        return [_build_microbatch(rows, np.arange(num_rows), splits_N)]
    microbatches = []
    chosen: list[int] = []
    prefixes: set[int] = set()
    prefix_width = branch_width = 0
    for row in np.argsort(rows.prefixes_N, kind="stable").tolist():
        prefix, split = int(rows.prefixes_N[row]), int(splits_N[row])
        wider = max(prefix_width, split), max(branch_width, int(rows.lengths_N[row]) - 1 - split)
        tokens = len(prefixes | {prefix}) * wider[0] + (len(chosen) + 1) * wider[1]
        if chosen and tokens > max_tokens:
            microbatches.append(_build_microbatch(rows, np.array(chosen), splits_N))
            chosen, prefixes = [], set()
            wider = split, int(rows.lengths_N[row]) - 1 - split
        chosen.append(row)
        prefixes.add(prefix)
        prefix_width, branch_width = wider
    microbatches.append(_build_microbatch(rows, np.array(chosen), splits_N))
    return microbatches


def _build_microbatch(rows: StepRows, chosen_B: Ints, splits_N: Ints) -> Microbatch:
    ids_BT, mask_BT = rows.ids_NT[chosen_B], rows.mask_NT[chosen_B]
    lengths_B, starts_B, splits_B = rows.lengths_N[chosen_B], rows.starts_N[chosen_B], splits_N[chosen_B]
    _, first_G, prefix_of_B = np.unique(rows.prefixes_N[chosen_B], return_index=True, return_inverse=True)

    prefix_lengths_G = splits_B[first_G]
    prefix_width = int(prefix_lengths_G.max())
    in_prefix_GP = np.arange(prefix_width) < prefix_lengths_G[:, None]
    prefix_ids_GP = np.where(in_prefix_GP, ids_BT[first_G, :prefix_width], 0)

    inputs_B = lengths_B - 1
    branch_width = int((inputs_B - splits_B).max())
    positions_BW = splits_B[:, None] + np.arange(branch_width)
    in_branch_BW = positions_BW < inputs_B[:, None]
    positions_BW = np.where(in_branch_BW, positions_BW, 0)
    branch_ids_BW = np.where(in_branch_BW, np.take_along_axis(ids_BT, positions_BW, 1), 0)

    row_C, token_C = np.nonzero(mask_BT)
    source_C = token_C - 1
    split_C = splits_B[row_C]
    in_branch_base = len(first_G) * prefix_width
    gather_C = np.where(
        source_C < split_C,
        prefix_of_B[row_C] * prefix_width + source_C,
        in_branch_base + row_C * branch_width + source_C - split_C,
    )
    response_width = int((lengths_B - starts_B).max())
    cells_C = row_C * response_width + token_C - starts_B[row_C]
    shape = (len(chosen_B), response_width)

    def spread(values_C: NDArray[Any]) -> NDArray[np.float32]:
        grid = np.zeros(shape, np.float32)
        grid.reshape(-1)[cells_C] = values_C
        return grid

    prefix_routes = branch_routes = None
    if rows.routes is not None:
        routes = [rows.routes[row] for row in chosen_B]
        prefix_routes = _spread_routes([routes[b] for b in first_G], np.zeros_like(first_G), prefix_lengths_G)
        branch_routes = _spread_routes(routes, splits_B, inputs_B)
    support_cells_K = support_ids_K = None
    if rows.supports is not None:
        support_cells_K, support_ids_K = _spread_supports([rows.supports[row] for row in chosen_B], row_C, token_C)
    return Microbatch(
        rows_B=chosen_B,
        prefix_ids_GP=prefix_ids_GP,
        prefix_lengths_G=prefix_lengths_G,
        branch_ids_BW=branch_ids_BW,
        branch_positions_BW=positions_BW,
        prefix_of_B=prefix_of_B.astype(np.int64),
        gather_C=gather_C,
        cells_C=cells_C,
        targets_C=ids_BT[row_C, token_C],
        mask_BR=spread(np.ones(len(row_C))),
        advantages_BR=spread(rows.advantages_NT[chosen_B][row_C, token_C]),
        behaviour_BR=spread(rows.behaviour_NT[chosen_B][row_C, token_C]),
        weights_BR=spread(rows.weights_N[chosen_B][row_C]),
        prefix_routes=prefix_routes,
        branch_routes=branch_routes,
        support_cells_K=support_cells_K,
        support_ids_K=support_ids_K,
    )


def _spread_routes(routes: Sequence[Any], begin: Ints, end: Ints) -> NDArray[np.int64]:
    """Cut [begin, end) of each row; padding gets distinct experts 0, 1, ... so that its gates stay finite."""
    layers, top_k = routes[0].shape[1:]
    grid = np.broadcast_to(np.arange(top_k), (len(routes), int((end - begin).max()), layers, top_k)).copy()
    for row, (recorded, low, high) in enumerate(zip(routes, begin.tolist(), end.tolist(), strict=True)):
        grid[row, : high - low] = recorded[low:high]
    return grid


def _spread_supports(supports: Sequence[RowSupport], row_C: Ints, token_C: Ints) -> tuple[Ints, Ints]:
    """List the kept tokens of every cell, in the order of the cells."""
    counts_parts, id_parts = [], []
    bounds = np.searchsorted(row_C, np.arange(len(supports) + 1))
    for row, support in enumerate(supports):
        places = token_C[bounds[row] : bounds[row + 1]] - support.first
        begins = support.offsets[places]
        counts = support.offsets[places + 1] - begins
        counts_parts.append(counts)
        shifts = np.repeat(begins - (np.cumsum(counts) - counts), counts)
        id_parts.append(support.token_ids[shifts + np.arange(counts.sum())])
    return np.repeat(np.arange(len(row_C)), np.concatenate(counts_parts)), np.concatenate(id_parts)
