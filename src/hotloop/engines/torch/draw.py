"""Draws tokens: counter-based uniform numbers, truncation, inverse CDF, and both logprobs of what was drawn.

Owns: `compute_uniforms` (a hash of completion key and position), `compute_distribution` (bias, temperature and
truncation), `draw`.

Promises: the number that decides a token is a function of seed, index and position alone, so it is bit-equal whatever
runs beside it and whether or not equal prefixes are merged. The token then differs only if that number falls within
the rounding of a cumulative probability (batched matmuls round differently at different batch sizes: about 1e-7 of
the mass per token). A token outside the support is never drawn; sampling logprobs are exact for the truncated,
renormalised distribution.

Does not do: stopping, recording.

Shapes: n rows, C completions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotloop.errors import RunError
from hotloop.types import SamplingParams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_16 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(16)


def mix64(values: Keys) -> Keys:
    """Scramble 64-bit words.

    Source: the finaliser of SplitMix64, Steele, Lea and Flood 2014 ("Fast splittable pseudorandom number generators").
    """
    z = values
    z = (z ^ (z >> _SHIFT_30)) * _MIX_1
    z = (z ^ (z >> _SHIFT_27)) * _MIX_2
    return z ^ (z >> _SHIFT_31)


def compute_keys(seeds: Keys, indices: Ints) -> Keys:
    """Derive one key per completion from its request's seed and its index, both [C]."""
    return mix64(mix64(seeds + _GOLDEN) ^ mix64((indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


def to_word(seed: int) -> int:
    """Fold any integer seed into 64 bits."""
    return seed & 0xFFFFFFFFFFFFFFFF


def compute_uniforms(keys: Keys, positions: Ints) -> Floats:
    """Give the uniform number of each completion at its position, in (0, 1), 48 bits."""
    words = mix64(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # Half a step keeps clear of 0 and of 1, so the scaled number stays below the total mass after rounding.
    uniforms: Floats = ((words >> _SHIFT_16).astype(np.float64) + 0.5) * 2.0**-48
    return uniforms


@dataclass(frozen=True, slots=True)
class Shape:
    """The sampling parameters that change a distribution; requests with equal ones are drawn together."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def truncates(self) -> bool:
        """True when some tokens may be removed."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def is_raw(self) -> bool:
        """True when the distribution is that of the raw logits."""
        return self.temperature == 1.0 and not self.truncates and not self.bias


def shape_of(params: SamplingParams) -> Shape:
    """Read the distribution-changing part of sampling parameters."""
    bias: Mapping[int, float] = params.logit_bias
    return Shape(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=int(params.top_k),
        min_p=float(params.min_p),
        bias=tuple(sorted((int(token), float(value)) for token, value in bias.items())),
    )


@dataclass(slots=True)
class Distribution:
    """What rows of one shape are drawn from."""

    raw: Tensor
    """[n, V] log-softmax of the raw logits."""
    sampling: Tensor
    """[n, V] logs of the distribution sampled from, -inf where removed."""
    is_greedy: bool
    kept: Tensor | None
    """[n, V] True where truncation kept the token; None when nothing is ever removed."""


def compute_distribution(logits: Tensor, shape: Shape) -> Distribution:
    """Apply bias, temperature, top-k, top-p and min-p, in that order, and renormalise.

    Each cut works on the distribution that the cut before left, renormalised. Ties at a cut are kept by lower id, so
    the support has exactly the size that the rule says.
    """
    raw = torch.log_softmax(logits, -1)
    if shape.is_raw:
        return Distribution(raw, raw, False, None)
    z = logits
    if shape.bias:
        ids = torch.tensor([token for token, _ in shape.bias], device=z.device)
        values = torch.tensor([value for _, value in shape.bias], device=z.device)
        z = z.index_add(1, ids, values.expand(z.shape[0], -1))
    if shape.temperature == 0.0:
        best = z.argmax(-1, keepdim=True)
        sampling = torch.full_like(z, -math.inf).scatter_(1, best, 0.0)
        return Distribution(raw, sampling, True, None)
    # The best logit becomes 0 first: divided by a tiny temperature it would overflow, and inf - inf is no number.
    z = (z - z.max(-1, keepdim=True).values) / shape.temperature
    kept = _keep(z, shape) if shape.truncates else None
    if kept is not None:
        z = z.masked_fill(~kept, -math.inf)
    return Distribution(raw, torch.log_softmax(z, -1), False, kept)


def _keep(z: Tensor, shape: Shape) -> Tensor:
    """Say which tokens survive top-k, top-p and min-p."""
    n, vocab = z.shape
    if 0 < shape.top_k < vocab:
        best = torch.topk(z, shape.top_k, -1).values
    else:
        best = torch.sort(z, -1, descending=True).values
    counts = torch.full((n,), best.shape[1], dtype=torch.int64, device=z.device)
    probs = torch.softmax(best.double(), -1)
    if shape.top_p < 1.0:
        before = probs.cumsum(-1) - probs
        counts = torch.minimum(counts, (before < shape.top_p).sum(-1))
    if shape.min_p > 0.0:
        # The largest probability is the first; renormalising does not change a ratio.
        counts = torch.minimum(counts, (probs >= shape.min_p * probs[:, :1]).sum(-1))
    counts = counts.clamp(min=1)
    floor = best.gather(1, counts[:, None] - 1)
    above = z > floor
    ties = z == floor
    room = counts[:, None] - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


@dataclass(slots=True)
class Drawn:
    """Tokens of C completions and their logprobs."""

    tokens: Ints
    logprobs: npt.NDArray[np.float32]
    sampling_logprobs: npt.NDArray[np.float32]


def draw(distribution: Distribution, rows: Ints, uniforms: Floats) -> Drawn:
    """Draw one token for each completion from its row: the first token whose cumulative probability passes u.

    Args:
        rows: [C] row of each completion.
        uniforms: [C] numbers in (0, 1).

    Raises:
        RunError: code `logits_not_finite`.
    """
    sampling, raw = distribution.sampling, distribution.raw
    n, count = sampling.shape[0], len(rows)
    device = sampling.device
    # Rows in order with one completion each is the common case once answers have diverged.
    is_plain = count == n and bool((rows == np.arange(n)).all())
    index = None if is_plain else torch.from_numpy(rows).to(device)
    if distribution.is_greedy:
        tokens = sampling.argmax(-1)
        if index is not None:
            tokens = tokens[index]
    else:
        cumulative = sampling.exp().cumsum(-1, dtype=torch.float64)
        if index is None:
            wanted = torch.from_numpy(uniforms[:, None]).to(device) * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
        else:
            slots, width = _number_within_rows(rows, n)
            padded = np.zeros((n, width))
            padded[rows, slots] = uniforms
            wanted = torch.from_numpy(padded).to(device) * cumulative[:, -1:]
            found = torch.searchsorted(cumulative, wanted, right=True)
            tokens = found[index, torch.from_numpy(slots).to(device)]
        tokens = tokens.clamp_(max=sampling.shape[1] - 1)  # a row that is not finite gives an id past the last
    if index is None:
        logprobs = raw.gather(1, tokens[:, None])[:, 0]
        chosen = logprobs if sampling is raw else sampling.gather(1, tokens[:, None])[:, 0]
    else:
        logprobs = raw[index, tokens]
        chosen = logprobs if sampling is raw else sampling[index, tokens]
    recorded = logprobs.cpu().numpy()
    if np.isnan(recorded).any():
        raise _not_finite()
    return Drawn(tokens.cpu().numpy(), recorded, recorded if chosen is logprobs else chosen.cpu().numpy())


def draw_raw_row(logits: Tensor, uniforms: Floats) -> Drawn:
    """Draw from one row of raw logits [V] on the CPU: what `draw` does, without a dozen small torch operators.

    Raises:
        RunError: code `logits_not_finite`.
    """
    row = logits.numpy()
    top = row.max()
    if not math.isfinite(top):
        raise _not_finite()
    weights = np.exp(row - top)
    cumulative = weights.cumsum(dtype=np.float64)
    tokens = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    logprobs = (row[tokens] - (top + np.log(cumulative[-1]))).astype(np.float32)
    return Drawn(tokens, logprobs, logprobs)


def draw_raw_one(row: npt.NDArray[np.float32], uniform: float) -> tuple[int, float]:
    """Draw one token from raw logits [V] and give its logprob: `draw_raw_row` for one number, bit for bit.

    Raises:
        RunError: code `logits_not_finite`.
    """
    top = row.max()
    if not math.isfinite(top):
        raise _not_finite()
    cumulative = np.exp(row - top).cumsum(dtype=np.float64)
    total = cumulative[-1]
    token = int(cumulative.searchsorted(uniform * total, side="right"))
    return token, float(np.float32(row[token] - (top + np.log(total))))


def _not_finite() -> RunError:
    return RunError(
        "logits_not_finite",
        "the policy's logits are not finite numbers, so no token can be drawn",
        where="a decode step",
        do="Check the checkpoint; in a run lower optimizer.lr or set optimizer.clip_grad.",
    )


def _number_within_rows(rows: Ints, n: int) -> tuple[Ints, int]:
    """Number the completions of each row 0, 1, ...; return the numbers and the largest count."""
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=n)
    starts = np.cumsum(counts) - counts
    slots = np.empty(len(rows), dtype=np.int64)
    slots[order] = np.arange(len(rows)) - starts[rows[order]]
    return slots, int(counts.max())
