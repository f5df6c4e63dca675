"""The optional per-token heads: the k best tokens, and the tokens that survived truncation.

Owns: how one row of a distribution becomes rows of `TopLogprobs` and `Support`.

Promises: best tokens are sorted by logprob, ties by id, and removed tokens are left out, so a row may be shorter than
k; support ids rise.

Does not do: anything for requests that did not ask; this is Python work per token.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hotloop.engines.torch.draw import Distribution
from hotloop.engines.torch.record import Heads, Wanted


def record_heads(heads: Heads, distribution: Distribution, row: int, wanted: Wanted) -> None:
    """Append what one drawn token's request asked for."""
    if wanted.top_k > 0:
        logprobs = distribution.sampling[row] if wanted.top_kind == "sampling" else distribution.raw[row]
        ids, values = find_best(logprobs, wanted.top_k)
        heads.top_ids.append(ids)
        heads.top_logprobs.append(values)
    if wanted.support:
        kept = distribution.kept
        heads.support.append([] if kept is None else torch.nonzero(kept[row])[:, 0].tolist())


def find_best(logprobs: torch.Tensor, k: int) -> tuple[list[int], list[float]]:
    """Find the k best tokens of one row [V], sorted by logprob, ties by id, removed ones left out."""
    k = min(k, logprobs.shape[0])
    floor = torch.topk(logprobs, k).values[-1]
    # Everything at the floor is a candidate, so that a tie at the cut goes to the lower id.
    ids = torch.nonzero((logprobs >= floor) & (logprobs > -math.inf))[:, 0].cpu().numpy()
    values = logprobs.cpu().numpy()[ids]
    order = np.lexsort((ids, -values))[:k]
    return ids[order].tolist(), values[order].astype(float).tolist()
