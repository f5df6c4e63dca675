"""Random numbers of a run as a pure function of its seed and of what they are for.

Owns: `derive_seed`. Promises: no hidden state, so there is nothing to save or to restore: a resumed run derives the
same seeds as an uninterrupted one.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 63


def derive_seed(*parts: int | str) -> int:
    """Hash what a random number is for into a seed in [0, 2**63)."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
