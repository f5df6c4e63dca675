"""From samples to the arrays of one forward pass, and the exact savings on the way.

Owns: the split of a round into optimizer steps, three savings that leave the gradient as it is, and the cut of a step
into microbatches. Numpy only; every array is built once, by whole-array operations.

    samples of a step --skip--> live --merge--> rows --cut--> microbatches
                                                              |  prefix pass: each distinct prompt once
                                                              |  branch pass: the responses, on the prompts' keys

Promises, each with the condition under which it holds (`choose_savings` switches a saving off where it does not):
- skip: a sample whose advantages are all zero adds nothing to the gradient, unless a KL or entropy term also acts on
  it. Its weight in the denominators stays. A sample without unmasked tokens never adds anything.
- merge: samples with equal ids, mask, advantages and routes have equal losses, so one row carries the sum of their
  weights. When behaviour logprobs enter the loss (TIS, IcePop, old = behaviour) they must be equal too, to the rounding
  of fp32 kernels (`LOGPROB_ROUNDING`); the row then carries their mean.
- share: causal attention makes a prompt's keys independent of what follows, so samples with the same prompt (and the
  same replayed routes on it) use one pass over it. It holds for every policy without dropout.
- any cut: token weights are fixed per step before the cut, so the gradient is the sum over microbatches.

Does not do: the forward pass (torch/passes.py), the loss (torch/objective.py).

Shapes: N rows of a step, T tokens of the longest row, G prefixes and B rows of a microbatch, P and W the widths of
the prefix and the branch pass, R the response tokens of its longest row, C the cells (unmasked tokens) in it.
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
    num_samples: int
    """Samples of the step before any saving."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arrays of one forward pass: a prefix pass, and a branch pass on its keys (absent when W is 0)."""

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

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the decoder, padding included."""
        return self.prefix_ids_GP.size + self.branch_ids_BW.size


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
        num_samples=len(samples),
    )
    if len(keep) and savings.merge_equal:
        rows = _merge(rows, compare_behaviour=compare_behaviour)
    if len(keep) and savings.share_prompts:
        rows = _number_prompts(rows)
    return rows


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
    return Microbatch(
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
    )


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


def _spread_routes(routes: Sequence[Any], begin: Ints, end: Ints) -> NDArray[np.int64]:
    """Cut [begin, end) of each row; padding gets distinct experts 0, 1, ... so that its gates stay finite."""
    layers, top_k = routes[0].shape[1:]
    grid = np.broadcast_to(np.arange(top_k), (len(routes), int((end - begin).max()), layers, top_k)).copy()
    for row, (recorded, low, high) in enumerate(zip(routes, begin.tolist(), end.tolist(), strict=True)):
        grid[row, : high - low] = recorded[low:high]
    return grid


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
