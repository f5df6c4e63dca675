"""Random numbers of a run as a pure function of its seed and of what they are for.

Owns: `derive_seed` and `derive_seeds`.

Promises: no hidden state, so there is nothing to save or to restore: a resumed run derives the same seeds as an
uninterrupted one.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 63
_STRIDE = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: multiples of it do not meet for 2**63 steps."""


def derive_seed(*parts: int | str) -> int:
    """Hash what a random number is for into a seed in [0, 2**63)."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def derive_seeds(count: int, *parts: int | str) -> list[int]:
    """Derive different seeds for what differs only in its number; engines hash seeds, so a fixed stride is enough."""
    base = derive_seed(*parts)
    return [(base + index * _STRIDE) % 2**SEED_BITS for index in range(count)]
