"""Positions that byte ranges cover, as arrays: what every engine that writes ranges needs.

Owns: `expand_ranges` and `iter_windows`, pure functions on arrays of offsets and lengths.
Promises: ranges keep their order, so that of two that overlap the later one counts.
Does not do: reading or writing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def expand_ranges(offsets: Ints, lengths: Ints) -> Ints:
    """List every position that ranges cover, in order."""
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    positions: Ints = np.arange(total, dtype=np.int64) + np.repeat(offsets - starts, lengths)
    return positions


def iter_windows(offsets: Ints, lengths: Ints, size: int) -> Iterator[tuple[int, int]]:
    """Cut a list of ranges into groups that lie in windows of some bytes, or one range each where it is longer.

    Yields: begin and end of each group; ranges that do not rise are groups of their own.
    """
    ends = offsets + lengths
    is_rising = bool((offsets[1:] >= ends[:-1]).all())
    begin = 0
    while begin < len(offsets):
        end = begin + 1
        if is_rising:
            end = max(end, int(np.searchsorted(ends, offsets[begin] + size, side="right")))
        yield begin, end
        begin = end
