"""Which row each distinct sequence gets when completions of a row have drawn different tokens, or have ended.

Owns: the plan: rows stay dense (0 .. n-1), the first child of a row stays where it is if that place survives, the
others go to free places.

Promises: no place that is written is one that is read, so all copies of a plan are one operator; pure.

Does not do: copy keys and values (runner.py), decide who ends (core.py).

Shapes: C completions, n rows after the split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where every new row comes from and goes to, all [n] in an order of their own."""

    first: Ints
    """A completion of each new row."""
    parent: Ints
    """Its row before."""
    target: Ints
    """Its row from now on."""
    moves: Bools
    """True where keys and values must be copied from parent to target."""
    row_of: Ints
    """[C] new row of each completion."""


def plan_rows(rows: Ints, names: Ints | None) -> RowPlan:
    """Plan the split.

    Args:
        rows: [C] row of each completion that goes on; C >= 1.
        names: [C] equal where completions of a row have drawn the same and may go on sharing it, rising with the row;
            None gives every completion a row of its own.
    """
    if names is not None:
        _, first, child_of = np.unique(names, return_index=True, return_inverse=True)
    else:
        first = np.argsort(rows, kind="stable")
        child_of = np.empty_like(first)
        child_of[first] = np.arange(len(first))
    parent = rows[first]
    n = len(parent)
    is_eldest = np.ones(n, dtype=np.bool_)
    is_eldest[1:] = parent[1:] != parent[:-1]
    stays = is_eldest & (parent < n)
    is_free = np.ones(n, dtype=np.bool_)
    is_free[parent[stays]] = False
    moves = ~stays
    target = parent.copy()
    target[moves] = np.flatnonzero(is_free)
    return RowPlan(first, parent, target, moves, target[child_of])
