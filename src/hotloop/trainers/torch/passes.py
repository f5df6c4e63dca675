"""One forward pass: the logprob and the entropy of every unmasked response token of a microbatch.

Owns: tensors made from a `Microbatch`, the prefix pass and the branch pass on its keys, logits on response
positions only, and the chunks that bound the memory of the logits.

Promises: differentiable in every parameter through both passes; padding adds nothing; the same numbers, to the
rounding of fp32, whichever savings laid the microbatch out.

Does not do: losses (objective.py), packing (../packing.py, ../microbatch.py).

Shapes: G prefixes, B rows, P and W widths of the two passes, R response tokens, C cells, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hotloop.algorithms.logprobs import compute_logprobs_and_entropy
from hotloop.models.decoder import DecoderConfig, DecoderParams, compute_logits, forward
from hotloop.trainers.microbatch import Microbatch

if TYPE_CHECKING:
    from hotloop.models.fallback import ForeignParams

MAX_LOGITS = 1 << 26
"""Elements of logits alive at a time (256 MiB in fp32); more cells are projected in chunks and recomputed backward."""


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """A microbatch on its device. Fields as in `Microbatch`."""

    prefix_ids_GP: Tensor
    branch_ids_BW: Tensor
    branch_positions_BW: Tensor
    prefix_of_B: Tensor | None
    """None when row b continues prefix b."""
    past_mask_BP: Tensor | None
    """None when no prefix is padded."""
    gather_C: Tensor
    cells_C: Tensor | None
    """None when every cell of the [B, R] arrays is unmasked."""
    targets_C: Tensor
    mask_BR: Tensor
    advantages_BR: Tensor
    behaviour_BR: Tensor
    weights_BR: Tensor
    prefix_routes: Tensor | None
    branch_routes: Tensor | None
    support_cells_K: Tensor | None
    support_ids_K: Tensor | None


def make_tensors(microbatch: Microbatch, device: str) -> TensorBatch:
    """Move a microbatch to its device."""
    lengths_G = microbatch.prefix_lengths_G
    num_prefixes, width = microbatch.prefix_ids_GP.shape
    lengths_B = torch.from_numpy(lengths_G[microbatch.prefix_of_B])
    is_padded = bool((lengths_G != width).any())
    is_identity = num_prefixes == len(microbatch.prefix_of_B)  # rows of one microbatch are in prefix order
    is_full = microbatch.cells_C.size == microbatch.mask_BR.size

    def move(array: object) -> Tensor:
        return torch.as_tensor(array, device=device)

    return TensorBatch(
        prefix_ids_GP=move(microbatch.prefix_ids_GP),
        branch_ids_BW=move(microbatch.branch_ids_BW),
        branch_positions_BW=move(microbatch.branch_positions_BW),
        prefix_of_B=None if is_identity else move(microbatch.prefix_of_B),
        past_mask_BP=move(torch.arange(width) < lengths_B[:, None]) if is_padded else None,
        gather_C=move(microbatch.gather_C),
        cells_C=None if is_full else move(microbatch.cells_C),
        targets_C=move(microbatch.targets_C),
        mask_BR=move(microbatch.mask_BR),
        advantages_BR=move(microbatch.advantages_BR),
        behaviour_BR=move(microbatch.behaviour_BR),
        weights_BR=move(microbatch.weights_BR),
        prefix_routes=None if microbatch.prefix_routes is None else move(microbatch.prefix_routes),
        branch_routes=None if microbatch.branch_routes is None else move(microbatch.branch_routes),
        support_cells_K=None if microbatch.support_cells_K is None else move(microbatch.support_cells_K),
        support_ids_K=None if microbatch.support_ids_K is None else move(microbatch.support_ids_K),
    )


def compute_response_logprobs(
    config: DecoderConfig,
    params: DecoderParams | ForeignParams,
    batch: TensorBatch,
    *,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute logprob and entropy of each unmasked response token.

    Args:
        temperature: of the rollout; divides the logits.
        entropy_gradient: the entropy enters the loss.

    Returns:
        logprobs_BR and entropy_BR, zero where masked.
    """
    num_prefixes, width = batch.prefix_ids_GP.shape
    positions_GP = torch.arange(width, device=batch.prefix_ids_GP.device).expand(num_prefixes, width)
    prefix = forward(config, params, batch.prefix_ids_GP, positions_GP, routes=batch.prefix_routes)
    hidden_SD = prefix.hidden_BTD.reshape(-1, prefix.hidden_BTD.shape[-1])
    if batch.branch_ids_BW.shape[1]:
        rows = batch.prefix_of_B
        past = prefix.kv
        if rows is not None:
            past = [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in past]
        branch = forward(
            config,
            params,
            batch.branch_ids_BW,
            batch.branch_positions_BW,
            past=past,
            past_mask_BS=batch.past_mask_BP,
            routes=batch.branch_routes,
        )
        hidden_SD = torch.cat((hidden_SD, branch.hidden_BTD.reshape(-1, hidden_SD.shape[-1])))
    hidden_CD = hidden_SD.index_select(0, batch.gather_C)

    def project(hidden: Tensor, first: int) -> tuple[Tensor, Tensor]:
        targets = batch.targets_C[first : first + len(hidden)]
        return compute_logprobs_and_entropy(
            compute_logits(config, params, hidden),
            targets,
            temperature=temperature,
            removed_NV=_find_removed(batch, first, targets, config.vocab_size),
            entropy_gradient=entropy_gradient,
        )

    rows_at_a_time = max(1, MAX_LOGITS // config.vocab_size)
    if len(hidden_CD) <= rows_at_a_time:
        logprobs_C, entropy_C = project(hidden_CD, 0)
    else:
        pieces = [
            checkpoint(project, hidden, index * rows_at_a_time, use_reentrant=False)
            for index, hidden in enumerate(torch.split(hidden_CD, rows_at_a_time))
        ]
        logprobs_C, entropy_C = torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])
    return _spread(batch, logprobs_C), _spread(batch, entropy_C)


def _spread(batch: TensorBatch, values_C: Tensor) -> Tensor:
    """Put one value per cell into [B, R], zero elsewhere."""
    if batch.cells_C is None:
        return values_C.view_as(batch.mask_BR)
    flat = values_C.new_zeros(batch.mask_BR.numel())
    return flat.index_copy(0, batch.cells_C, values_C).view_as(batch.mask_BR)


def _find_removed(batch: TensorBatch, first: int, targets: Tensor, vocab_size: int) -> Tensor | None:
    """Say which tokens the sampler had removed at the cells from `first` on, [len(targets), V]; targets never are."""
    if batch.support_cells_K is None or batch.support_ids_K is None:
        return None
    bounds = torch.tensor([first, first + len(targets)], device=targets.device)
    low, high = torch.searchsorted(batch.support_cells_K, bounds).tolist()
    cells, ids = batch.support_cells_K[low:high] - first, batch.support_ids_K[low:high]
    removed = torch.ones(len(targets), vocab_size, dtype=torch.bool, device=targets.device)
    removed[cells, ids] = False
    removed[removed.all(1)] = False  # no kept token is recorded where nothing was removed
    return removed.scatter_(1, targets[:, None], value=False)
