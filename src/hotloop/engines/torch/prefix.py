"""Reuses the keys and values of prompts and answers that begin alike.

Owns: a fixed number of blocks of 16 tokens, a chain of hashes that names each block by namespace and every token
before it, and least-recently-used eviction.

Promises: a block is only matched inside its own namespace and only if all tokens before it are equal too; at least
the last prompt token is always computed, because its logits are needed. Weights are not part of the name: whoever
swaps weights gives later requests another namespace (hot_load.md section 7), unless old keys are wanted.

Does not do: share memory with rows; matched columns are copied into the row.

Shapes: L layers, K key heads, d head size, E experts per token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_TOKENS = 16


@dataclass(slots=True)
class Match:
    """The longest known beginning of a prompt."""

    num_tokens: int
    columns: Tensor
    """[L, num_tokens, 2 K, d]"""
    routes: npt.NDArray[np.generic] | None
    """[num_tokens, L, E]"""


class PrefixCache:
    """Blocks of keys and values by the hash of everything that led to them."""

    def __init__(self, num_tokens: int) -> None:
        self._capacity = num_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[bytes, tuple[Tensor, npt.NDArray[np.generic] | None]] = OrderedDict()
        """Name -> columns [L, 16, 2 K, d] and routes [16, L, E]; the next to go first."""

    @property
    def num_tokens(self) -> int:
        """Tokens held now."""
        return len(self._blocks) * BLOCK_TOKENS

    def find(self, namespace: str, ids: Sequence[int]) -> Match | None:
        """Find the longest run of blocks that begins this prompt and leaves at least one token to compute."""
        names: list[bytes] = []
        for name in _names(namespace, ids[: len(ids) - 1]):
            if name not in self._blocks:
                break
            names.append(name)
        if not names:
            return None
        found = [self._blocks[name] for name in names]
        self._touch(names)
        routes = [one for _, one in found if one is not None]
        return Match(
            num_tokens=len(names) * BLOCK_TOKENS,
            columns=torch.cat([columns for columns, _ in found], 1),
            routes=np.concatenate(routes) if routes else None,
        )

    def count_missing(self, namespace: str, ids: Sequence[int]) -> int:
        """Count tokens at the end of the whole blocks of `ids` that are not held yet."""
        names = list(_names(namespace, ids))
        return sum(name not in self._blocks for name in names) * BLOCK_TOKENS

    def insert(
        self, namespace: str, ids: Sequence[int], columns: Tensor, routes: npt.NDArray[np.generic] | None
    ) -> None:
        """Keep the whole blocks of a sequence.

        Args:
            columns: [L, len(ids) or more, 2 K, d] keys and values of these tokens.
            routes: [len(ids) or more, L, E] or None.
        """
        names = list(_names(namespace, ids))[: self._capacity]
        for index, name in enumerate(names):
            if name not in self._blocks:
                span = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
                self._blocks[name] = (columns[:, span].clone(), None if routes is None else routes[span].copy())
        self._touch(names)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def _touch(self, names: Sequence[bytes]) -> None:
        # The beginning ends up newest, so a chain loses its end first and stays matchable.
        for name in reversed(names):
            self._blocks.move_to_end(name)


def _names(namespace: str, ids: Sequence[int]) -> list[bytes]:
    """Name each whole block by a hash over the namespace and all tokens up to its end."""
    tokens = np.asarray(ids, dtype=np.int64)
    name = hashlib.blake2b(namespace.encode("utf-8"), digest_size=16).digest()
    names = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = hashlib.blake2b(name + tokens[start : start + BLOCK_TOKENS].tobytes(), digest_size=16).digest()
        names.append(name)
    return names
