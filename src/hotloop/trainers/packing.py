"""From samples to the rows of an optimizer step, and the exact savings on the way.

Owns: the split of a round into optimizer steps, and three savings that leave the gradient as it is. Numpy only.

    samples of a step --skip--> live --merge--> rows, numbered by prompt --> microbatches (microbatch.py)

Promises, each with the condition under which it holds (`choose_savings` switches a saving off where it does not):
- skip: a sample whose advantages are all zero adds nothing to the gradient, unless a KL or entropy term also acts on
  it. Its weight in the denominators stays. A sample without unmasked tokens never adds anything.
- merge: samples with equal ids, mask, advantages, routes and support have equal losses, so one row carries the sum of
  their weights. When behaviour logprobs enter the loss (TIS, IcePop, old = behaviour) they must be equal too, to the
  rounding of fp32 kernels (`LOGPROB_ROUNDING`); the row then carries their mean.
- share: causal attention makes a prompt's keys independent of what follows, so samples with the same prompt (and the
  same replayed routes on it) use one pass over it. It holds for every policy without dropout.

Does not do: the cut into forward passes (microbatch.py), the loss (torch/objective.py).

Shapes: N rows of a step, T tokens of the longest row, L rows after merging, U rows that differ in any bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.algorithms.aggregation import Aggregation, compute_sample_weights
from hotloop.errors import RunError
from hotloop.trainers.base import LossSettings
from hotloop.types import Sample

LOGPROB_ROUNDING = 2e-6
"""Two recordings of the same token's logprob that differ by no more are the same number (fp32 kernels)."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Savings:
    """Which savings are exact for an objective."""

    skip_zero_advantage: bool = False
    merge_equal: bool = False
    share_prompts: bool = False


def choose_savings(loss: LossSettings, *, wanted: bool) -> Savings:
    """Choose the savings that leave the gradient of this objective as it is."""
    if not wanted:
        return Savings()
    acts_without_advantage = loss.kl_loss_coef > 0 or loss.entropy_coef != 0
    return Savings(skip_zero_advantage=not acts_without_advantage, merge_equal=True, share_prompts=True)


def uses_behaviour_logprobs(loss: LossSettings) -> bool:
    """Say whether the engine's logprobs enter the loss itself and not only its metrics."""
    return loss.correction != "none" or loss.old_logprobs == "behaviour"


@dataclass(frozen=True, slots=True)
class RowSupport:
    """The recorded support of one row, as arrays."""

    first: int
    """Position of the token that row 0 of the support belongs to."""
    offsets: Ints
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one optimizer step, padded on the right."""

    ids_NT: Ints
    lengths_N: Ints
    """Tokens up to the last unmasked one."""
    starts_N: Ints
    """Position of the first unmasked token: the length of the prompt."""
    prefixes_N: Ints
    """Rows with the same number share their prompt pass."""
    mask_NT: NDArray[np.bool_]
    advantages_NT: NDArray[np.float32]
    behaviour_NT: NDArray[np.float32]
    weights_N: Floats
    """Weight of each unmasked token in the step's loss; merged samples add up."""
    routes: list[Any] | None
    """Per row, recorded expert ids [length - 1, layers, top_k], or None without replay."""
    supports: list[RowSupport] | None
    """Per row, what top-p left to draw from, or None when no sample was truncated."""
    num_samples: int
    """Samples of the step before any saving."""


def split_steps(samples: Sequence[Sample], num_rollouts: int, num_steps: int) -> list[tuple[list[int], float]]:
    """Split a round into optimizer steps of whole groups, in order of their first appearance.

    Args:
        samples: of the round.
        num_rollouts: of the round, those without a sample here included.
        num_steps: wanted; a step never divides a rollout, and divides a group only if there are fewer groups.

    Returns:
        Per step, positions in `samples` and the rollouts that its per-sample mean divides by: its share of
        `num_rollouts`.

    Raises:
        RunError: code `empty_step` when there are fewer rollouts than steps.
    """
    rollout_ids = [sample.rollout_id for sample in samples]
    num_distinct = len(set(rollout_ids))
    if num_distinct < num_steps:
        raise RunError(
            "empty_step",
            f"{num_distinct} rollouts cannot fill {num_steps} optimizer steps",
            where="optimizer.steps_per_round",
            do="Lower steps_per_round or collect more groups per round.",
        )
    if num_steps == 1:
        return [(list(range(len(samples))), float(num_rollouts))]
    group_ids = [sample.group_id for sample in samples]
    units = group_ids if len(set(group_ids)) >= num_steps else rollout_ids
    order = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    parts: list[list[int]] = [[] for _ in range(num_steps)]
    for position, unit in enumerate(units):
        parts[order[unit] * num_steps // len(order)].append(position)
    return [(part, num_rollouts * len({rollout_ids[i] for i in part}) / num_distinct) for part in parts]


def build_rows(
    samples: Sequence[Sample],
    *,
    num_rollouts: float,
    aggregation: Aggregation,
    savings: Savings,
    compare_behaviour: bool,
    replay_routes: bool,
) -> StepRows:
    """Lay the samples of one step out as rows, after skipping and merging.

    Args:
        samples: of the step.
        num_rollouts: what the per-sample mean divides by.
        aggregation: decides the weight of each token.
        savings: which to apply.
        compare_behaviour: behaviour logprobs enter the loss, so merged samples must agree in them.
        replay_routes: samples carry recorded expert ids that the passes replay.

    Raises:
        RunError: code `sample_invalid` or `routes_missing`, naming the rollout.
    """
    total_N = np.fromiter((len(sample.ids) for sample in samples), np.int64, len(samples))
    _check_lengths(samples)
    filled_NT = np.arange(int(total_N.max(initial=1))) < total_N[:, None]
    mask_NT = _lay_out([sample.mask for sample in samples], filled_NT, np.int8).astype(bool)
    advantages_NT = _lay_out([sample.advantages for sample in samples], filled_NT, np.float32)
    _check_mask(samples, mask_NT)
    _check_finite(samples, advantages_NT, "an advantage")
    weights_N = compute_sample_weights(
        mask_NT.sum(1), [sample.rollout_id for sample in samples], num_rollouts=num_rollouts, mode=aggregation
    )
    advantages_NT[~mask_NT] = 0.0
    live_N = mask_NT.any(1)
    if savings.skip_zero_advantage:
        live_N &= advantages_NT.any(1)
    keep = np.flatnonzero(live_N)
    kept = [samples[i] for i in keep.tolist()]
    mask_NT, advantages_NT, filled_NT = mask_NT[keep], advantages_NT[keep], filled_NT[keep]
    ids_NT = _lay_out([sample.ids for sample in kept], filled_NT, np.int64)
    behaviour_NT = _lay_out([sample.behaviour_logprobs for sample in kept], filled_NT, np.float32)
    _check_finite(kept, behaviour_NT, "a behaviour logprob")
    behaviour_NT[~mask_NT] = 0.0
    starts_N = mask_NT.argmax(1)
    lengths_N = mask_NT.shape[1] - mask_NT[:, ::-1].argmax(1)
    width = int(lengths_N.max(initial=1))
    ids_NT = np.where(np.arange(ids_NT.shape[1]) < lengths_N[:, None], ids_NT, 0)[:, :width]
    rows = StepRows(
        ids_NT=ids_NT,
        lengths_N=lengths_N,
        starts_N=starts_N,
        prefixes_N=np.arange(len(keep)),
        mask_NT=mask_NT[:, :width],
        advantages_NT=advantages_NT[:, :width],
        behaviour_NT=behaviour_NT[:, :width],
        weights_N=weights_N[keep],
        routes=_collect_routes(kept, lengths_N) if replay_routes else None,
        supports=_collect_supports(kept, starts_N),
        num_samples=len(samples),
    )
    if len(keep) and savings.merge_equal:
        rows = _merge(rows, compare_behaviour=compare_behaviour)
    if len(keep) and savings.share_prompts:
        rows = _number_prompts(rows)
    return rows


def _lay_out(lists: Sequence[Sequence[Any]], filled_NT: NDArray[np.bool_], dtype: Any) -> NDArray[Any]:
    grid = np.zeros(filled_NT.shape, dtype)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is refused as such
        grid[filled_NT] = np.fromiter(chain.from_iterable(lists), dtype, int(filled_NT.sum()))
    return grid


def _merge(rows: StepRows, *, compare_behaviour: bool) -> StepRows:
    """Join rows with equal content; the first of each stays, and carries the sum of the weights."""
    contents = _row_bytes(rows.ids_NT, rows.mask_NT, rows.advantages_NT)
    if rows.routes is not None:
        contents = [content + route.tobytes() for content, route in zip(contents, rows.routes, strict=True)]
    if rows.supports is not None:
        contents = [
            content + support.offsets.tobytes() + support.token_ids.tobytes()
            for content, support in zip(contents, rows.supports, strict=True)
        ]
    # First join what is equal bit for bit; only what is left is compared number by number.
    recordings = _row_bytes(rows.behaviour_NT)
    unique_N, firsts = _number(list(zip(contents, recordings, strict=True)))
    counts_U = np.bincount(unique_N)
    leaders_of: dict[bytes, list[int]] = {}
    leaders: list[int] = []
    owner_U = np.empty(len(firsts), np.int64)
    for unique, row in enumerate(firsts):
        candidates = leaders_of.setdefault(contents[row], [])
        agreeing = (
            place for place in candidates if not compare_behaviour or _agree(rows.behaviour_NT, row, leaders[place])
        )
        place = next(agreeing, len(leaders))
        if place == len(leaders):
            candidates.append(place)
            leaders.append(row)
        owner_U[unique] = place
    sums_LT = np.zeros((len(leaders), rows.behaviour_NT.shape[1]))
    np.add.at(sums_LT, owner_U, rows.behaviour_NT[firsts] * counts_U[:, None].astype(np.float64))
    counts_L = np.bincount(owner_U, weights=counts_U)
    kept = np.array(leaders, np.int64)
    return replace(
        rows,
        ids_NT=rows.ids_NT[kept],
        lengths_N=rows.lengths_N[kept],
        starts_N=rows.starts_N[kept],
        prefixes_N=np.arange(len(kept)),
        mask_NT=rows.mask_NT[kept],
        advantages_NT=rows.advantages_NT[kept],
        behaviour_NT=(sums_LT / counts_L[:, None]).astype(np.float32),
        weights_N=np.bincount(owner_U[unique_N], weights=rows.weights_N).astype(np.float64),
        routes=None if rows.routes is None else [rows.routes[row] for row in leaders],
        supports=None if rows.supports is None else [rows.supports[row] for row in leaders],
    )


def _number(keys: Sequence[Any]) -> tuple[Ints, list[int]]:
    """Number keys in order of their first appearance; return the number of each, and where each number first stood."""
    numbers: dict[Any, int] = {}
    firsts: list[int] = []
    numbered = np.empty(len(keys), np.int64)
    for position, key in enumerate(keys):
        number = numbers.setdefault(key, len(firsts))
        if number == len(firsts):
            firsts.append(position)
        numbered[position] = number
    return numbered, firsts


def _agree(behaviour_NT: NDArray[np.float32], row: int, other: int) -> bool:
    return bool(np.abs(behaviour_NT[row] - behaviour_NT[other]).max() <= LOGPROB_ROUNDING)


def _number_prompts(rows: StepRows) -> StepRows:
    """Give rows with the same prompt, and the same replayed routes on it, one number."""
    ids = np.ascontiguousarray(rows.ids_NT, np.int32)
    keys = [ids[row, :start].tobytes() for row, start in enumerate(rows.starts_N.tolist())]
    if rows.routes is not None:
        keys = [
            key + rows.routes[row][:start].tobytes()
            for row, (key, start) in enumerate(zip(keys, rows.starts_N.tolist(), strict=True))
        ]
    return replace(rows, prefixes_N=_number(keys)[0])


def _row_bytes(*arrays: NDArray[Any]) -> list[bytes]:
    """Content of each row of equally long arrays, as one byte string per row."""
    parts = [np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1) for array in arrays]
    packed = np.concatenate(parts, axis=1)
    width = packed.shape[1]
    data = packed.tobytes()
    return [data[i * width : (i + 1) * width] for i in range(len(packed))]


def _collect_routes(samples: Sequence[Sample], lengths_N: Ints) -> list[Any]:
    routes = []
    for sample, length in zip(samples, lengths_N.tolist(), strict=True):
        if sample.routed_experts is None:
            raise RunError(
                "routes_missing",
                "routing replay is on and the sample carries no recorded experts",
                where=f"rollout {sample.rollout_id}",
                do="Let the engine record routes, or turn routing replay off.",
            )
        recorded = np.asarray(sample.routed_experts)
        if recorded.ndim != 3 or len(recorded) != len(sample.ids) - 1:
            raise _invalid(
                sample, f"routed experts have shape {recorded.shape}, wanted ({len(sample.ids) - 1}, layers, k)"
            )
        if recorded.shape[2] > 1 and not recorded.any():
            raise _invalid(sample, "routed experts are all zero, which no router with two experts per token chooses")
        routes.append(np.ascontiguousarray(recorded[: length - 1], np.int64))
    return routes


def _collect_supports(samples: Sequence[Sample], starts_N: Ints) -> list[RowSupport] | None:
    if all(sample.support is None for sample in samples):
        return None
    supports = []
    for sample, start in zip(samples, starts_N.tolist(), strict=True):
        recorded = sample.support
        if recorded is None:
            length = len(sample.ids) - start
            supports.append(RowSupport(start, np.zeros(length + 1, np.int64), np.empty(0, np.int64)))
            continue
        first = len(sample.ids) - (len(recorded.offsets) - 1)
        if first > start or recorded.offsets[-1] != len(recorded.token_ids):
            raise _invalid(
                sample, f"its support covers positions from {first}, and its first unmasked token is {start}"
            )
        supports.append(
            RowSupport(first, np.asarray(recorded.offsets, np.int64), np.asarray(recorded.token_ids, np.int64))
        )
    return supports


def _check_lengths(samples: Sequence[Sample]) -> None:
    for sample in samples:
        length = len(sample.ids)
        if not (length == len(sample.mask) == len(sample.behaviour_logprobs) == len(sample.advantages)):
            raise _invalid(
                sample,
                f"{length} ids, {len(sample.mask)} mask, {len(sample.behaviour_logprobs)} behaviour logprobs and"
                f" {len(sample.advantages)} advantages must be equal in number",
            )


def _check_mask(samples: Sequence[Sample], mask_NT: NDArray[np.bool_]) -> None:
    unpredicted = np.flatnonzero(mask_NT[:, 0])
    if unpredicted.size:
        raise _invalid(samples[unpredicted[0]], "its first token is unmasked, and no token before it predicts it")


def _check_finite(samples: Sequence[Sample], values_NT: NDArray[np.float32], what: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(values_NT).all(1))
    if wrong.size:
        raise _invalid(samples[wrong[0]], f"{what} is not finite")


def _invalid(sample: Sample, why: str) -> RunError:
    return RunError("sample_invalid", why, where=f"rollout {sample.rollout_id} of group {sample.group_id}")
