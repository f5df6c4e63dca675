"""Sets of stop ids as rows of one table, so that a step asks for every completion at once.

Owns: one row [V] per distinct set.

Promises: equal sets share a row; ids outside the vocabulary never match.

Does not do: stop strings (models/tokenizer.StopMatcher).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class StopTable:
    """Which token ends an answer of which set."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._rows: dict[tuple[int, ...], int] = {}
        self.table: npt.NDArray[np.bool_] = np.zeros((0, vocab_size), dtype=np.bool_)
        """[sets, V] True where a token stops; index it by set and token."""

    def intern(self, ids: Sequence[int]) -> int:
        """Give the row of a set, made on first sight."""
        wanted = tuple(sorted({token for token in ids if 0 <= token < self._vocab}))
        if wanted not in self._rows:
            row = np.zeros((1, self._vocab), dtype=np.bool_)
            row[0, list(wanted)] = True
            self._rows[wanted] = len(self._rows)
            self.table = np.concatenate((self.table, row))
        return self._rows[wanted]
