"""The torch trainer: policy, frozen reference and optimizer in one process, on a CPU or one GPU.

Owns: the order of a round (below), and what is computed at most once in it.

    samples -> steps -> rows (skip, merge) -> microbatches
                |
                +- old logprobs of steps 2, 3, ... (no gradient), before any weight moves
                |
                +- per step: for each microbatch forward, objective, backward; then clip, AdamW

Old logprobs of the first step are the current ones without gradient: the weights are the same, so recomputing them
would give the same numbers. That is also why a round of one step never recomputes them, with TIS or without.

Promises: see ../base.py. A non-finite loss or gradient leaves weights, moments and counters as they were before the
round, whichever step of the round it came from.

Does not do: packing (../packing.py, ../microbatch.py), the forward pass (passes.py), losses (objective.py), the
optimizer (optimizer.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotloop.errors import InputError, RunError
from hotloop.models.decoder import DecoderConfig, DecoderParams
from hotloop.models.weights import Arena, read_policy, write_policy
from hotloop.trainers.base import Batch, TrainerSettings
from hotloop.trainers.microbatch import cut_microbatches
from hotloop.trainers.packing import (
    StepRows,
    build_rows,
    choose_savings,
    split_steps,
    uses_behaviour_logprobs,
)
from hotloop.trainers.torch.objective import compute_metrics, compute_objective
from hotloop.trainers.torch.optimizer import ArenaAdamW
from hotloop.trainers.torch.passes import TensorBatch, compute_response_logprobs, make_tensors

if TYPE_CHECKING:
    from hotloop.models.fallback import ForeignParams
    from hotloop.types import Sample


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step, laid out."""

    microbatches: list[TensorBatch]
    names: list[list[bytes]]
    """Content of each row of each microbatch, as `_name_tokens` gives it."""
    num_rollouts: float
    num_samples: int
    num_rows: int
    num_tokens: int


class TorchTrainer:
    """A Trainer that computes with torch."""

    def __init__(self, settings: TrainerSettings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._config, self._arena = read_policy(settings.policy_dir, device=settings.device)
        self._optimizer = ArenaAdamW(self._arena, settings.optimizer)
        self._params = _make_params(self._config, self._arena)
        self._savings = choose_savings(settings.loss, wanted=settings.exact_savings)
        self._round_logprobs: Mapping[int, Sequence[float]] = {}
        self._reference: DecoderParams | ForeignParams | None = None
        if settings.loss.kl_loss_coef > 0:
            self._reference = _make_params(*read_policy(settings.policy_dir, device=settings.device))

    @property
    def step(self) -> int:
        """Optimizer steps taken since the first round."""
        return self._optimizer.step

    @property
    def arena(self) -> Arena:
        """The live parameters, for an engine in the same process."""
        return self._arena

    def train_round(self, batch: Batch) -> dict[str, float]:
        """Take `steps_per_round` optimizer steps.

        Raises:
            RunError: codes `non_finite_loss`, `non_finite_gradient`, `sample_invalid`, `routes_missing`, `empty_step`,
                `empty_batch`; weights are unchanged.
        """
        if not batch.samples:
            raise RunError("empty_batch", "there is nothing to train on", where=f"round {batch.round}")
        steps = self._lay_out(batch)
        old = self._compute_old_logprobs(steps)
        memory = self._optimizer.remember() if len(steps) > 1 else None
        per_step = []
        given: dict[bytes, Sequence[float]] = {}
        try:
            for index, step in enumerate(steps):
                per_step.append(self._take_step(step, old[index], given))
        except BaseException as error:  # an interrupt too must not leave half a round behind
            if memory is not None:
                self._optimizer.undo(memory)
            if isinstance(error, RunError):
                error.details["round"] = batch.round
            raise
        metrics = {
            name: _mean([values[name] for values in per_step if name in values])
            for name in dict.fromkeys(name for values in per_step for name in values)
        }
        self._round_logprobs = _assign_logprobs(batch.samples, given)
        metrics["train/lr-pg_0"] = per_step[-1]["train/lr-pg_0"]
        metrics["train/step"] = float(self.step)
        metrics["train/computed_rows"] = float(sum(step.num_rows for step in steps))
        metrics["train/computed_tokens"] = float(sum(step.num_tokens for step in steps))
        return metrics

    def round_logprobs(self) -> Mapping[int, Sequence[float]]:
        """See base.py; before the round's first step where old logprobs are recomputed, else before their own step."""
        return self._round_logprobs

    def weights(self) -> Mapping[str, Any]:
        """Current parameters by checkpoint name: live views that the next step changes."""
        return self._arena.tensors()

    def save_policy(self, directory: Path) -> None:
        """Write a Hugging Face directory; it is replaced if it exists.

        Raises:
            RunError: code `policy_write_failed`.
        """
        write_policy(directory, self._config, self._arena, self._settings.policy_dir)

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer's moments and counters.

        Raises:
            RunError: code `optimizer_write_failed`.
        """
        self._optimizer.save(path)

    def load(self, directory: Path) -> None:
        """Restore `model.safetensors` and `optimizer.safetensors`; the reference stays the policy of the settings.

        Raises:
            InputError: code `checkpoint_incomplete` or `checkpoint_mismatch`; nothing has changed.
        """
        tensors = self._read_weights(Path(directory) / "model.safetensors")
        self._optimizer.load(Path(directory) / "optimizer.safetensors")
        for name, tensor in tensors.items():
            self._arena.view(name).copy_(tensor)

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""

    def _lay_out(self, batch: Batch) -> list[_Step]:
        settings, loss = self._settings, self._settings.loss
        steps = []
        for chosen, num_rollouts in split_steps(batch.samples, batch.num_rollouts, settings.optimizer.steps_per_round):
            rows = build_rows(
                [batch.samples[i] for i in chosen],
                num_rollouts=num_rollouts,
                aggregation=loss.aggregation,
                savings=self._savings,
                compare_behaviour=uses_behaviour_logprobs(loss),
                replay_routes=settings.replay_routed_experts and self._config.num_experts > 0,
            )
            microbatches = cut_microbatches(
                rows,
                share_prompts=self._savings.share_prompts,
                max_tokens=settings.optimizer.max_tokens_per_microbatch,
            )
            steps.append(
                _Step(
                    [make_tensors(microbatch, settings.device) for microbatch in microbatches],
                    [_name_rows(rows, microbatch.rows_B.tolist()) for microbatch in microbatches],
                    num_rollouts,
                    rows.num_samples,
                    len(rows.lengths_N),
                    sum(microbatch.num_tokens for microbatch in microbatches),
                )
            )
        return steps

    def _compute_old_logprobs(self, steps: list[_Step]) -> list[list[Tensor | None]]:
        """Logprobs before the first step of the round, per step and microbatch; None where the current ones serve."""
        old: list[list[Tensor | None]] = [[None] * len(step.microbatches) for step in steps]
        if self._settings.loss.old_logprobs == "behaviour":
            return old
        for index, step in enumerate(steps[1:], start=1):
            old[index] = [self._compute_logprobs(self._params, microbatch) for microbatch in step.microbatches]
        return old

    def _compute_logprobs(self, params: DecoderParams | ForeignParams, microbatch: TensorBatch) -> Tensor:
        with torch.no_grad():
            logprobs_BR, _ = compute_response_logprobs(
                self._config, params, microbatch, temperature=self._settings.loss.temperature
            )
        return logprobs_BR

    def _take_step(
        self, step: _Step, old: list[Tensor | None], given: dict[bytes, Sequence[float]] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step; `given` collects the logprobs of its rows."""
        loss_settings = self._settings.loss
        self._optimizer.clear_gradient()
        names: list[str] = []
        totals: Tensor | None = None
        for microbatch, names_B, old_BR in zip(step.microbatches, step.names, old, strict=True):
            logprobs_BR, entropy_BR = compute_response_logprobs(
                self._config,
                self._params,
                microbatch,
                temperature=loss_settings.temperature,
                entropy_gradient=loss_settings.entropy_coef != 0,
            )
            if given is not None:
                given.update(zip(names_B, (logprobs_BR.detach() if old_BR is None else old_BR).tolist(), strict=True))
            reference_BR = None if self._reference is None else self._compute_logprobs(self._reference, microbatch)
            objective = compute_objective(
                loss_settings, microbatch, logprobs_BR, entropy_BR, old_BR=old_BR, reference_BR=reference_BR
            )
            value = float(objective.loss.detach())
            if not math.isfinite(value):
                raise RunError(
                    "non_finite_loss",
                    f"the loss is {value}",
                    where=f"optimizer step {self.step + 1}",
                    do="Look at rewards and logprobs of the round's rollouts; weights are as they were before it.",
                )
            objective.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
            names = list(objective.sums)
            sums = torch.stack([sum_.double() for sum_ in objective.sums.values()])
            totals = sums if totals is None else totals + sums
        norm, lr = self._optimizer.apply()
        sums_by_name = dict(zip(names, totals.tolist(), strict=True)) if totals is not None else _NO_TOKENS
        return {
            **compute_metrics(sums_by_name),
            "train/grad_norm": norm,
            "train/lr-pg_0": lr,
            "train/global_batch_size": step.num_rollouts,
        }

    def _read_weights(self, path: Path) -> dict[str, Tensor]:
        if not path.is_file():
            raise InputError(
                "checkpoint_incomplete", "there are no weights", where=str(path), do="Use another checkpoint."
            )
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        except SafetensorError as error:
            raise InputError("checkpoint_incomplete", f"not readable ({error})", where=str(path)) from error
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: slot.shape for name, slot in self._arena.slots.items()}
        if shapes != wanted:
            raise InputError(
                "checkpoint_mismatch",
                "the weights are not those of the policy that the run was started with",
                where=str(path),
                do="Resume with the policy that the run was started with.",
            )
        return tensors


_NO_TOKENS = {"weight": 0.0, "train/loss": 0.0, "train/pg_loss": 0.0, "train/pg_clipfrac": 0.0}
"""Sums of a step in which no sample has an advantage: its gradient is zero."""


def _make_params(config: DecoderConfig, arena: Arena) -> DecoderParams | ForeignParams:
    """Give the forward pass what it takes: leaves on the arena, with gradients if the arena has a buffer for them."""
    if config.is_native:
        return arena.params
    from hotloop.models.fallback import build_foreign

    leaves = arena.tensors()
    if arena.grad is not None:
        for name, leaf in leaves.items():
            leaf.requires_grad_()
            leaf.grad = arena.grad_view(name)
    return build_foreign(config, leaves)


def _name_tokens(ids: Sequence[int] | NDArray[np.int64]) -> bytes:
    """Name a row by its token ids up to the last unmasked one; equal rows get equal logprobs."""
    return np.asarray(ids, np.int32).tobytes()


def _name_rows(rows: StepRows, chosen: Sequence[int]) -> list[bytes]:
    return [_name_tokens(rows.ids_NT[row, : rows.lengths_N[row]]) for row in chosen]


def _assign_logprobs(
    samples: Sequence[Sample], given: Mapping[bytes, Sequence[float]]
) -> Mapping[int, Sequence[float]]:
    """Hand the logprobs of the rows back to the rollouts that they stand for."""
    assigned: dict[int, Sequence[float]] = {}
    several: set[int] = set()
    for sample in samples:
        if 1 not in sample.mask:
            continue
        first, end = sample.mask.index(1), len(sample.mask) - sample.mask[::-1].index(1)
        values = given.get(_name_tokens(sample.ids[:end]))
        if values is None:
            continue
        if sample.rollout_id in assigned:
            several.add(sample.rollout_id)
        assigned[sample.rollout_id] = values[: end - first]
    return {rollout_id: values for rollout_id, values in assigned.items() if rollout_id not in several}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
