"""A trainer without torch: a policy of one logit per token, trained for real by policy gradient.

Owns: a numpy stand-in that obeys the whole Trainer port, so that the loop, checkpoints and weight sync can be tested
without torch. Its policy ignores the context; that is enough for rewards on the tokens drawn to rise.

Promises: those of base.py, held by the same contract test. The objective is plain policy gradient with the settings'
aggregation, schedule, clipping and step split, and AdamW without weight decay.
Does not do: clipping of ratios, corrections, KL, entropy terms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hotloop.errors import InputError, RunError
from hotloop.trainers.base import Batch, TrainerSettings
from hotloop.trainers.microbatch import cut_microbatches
from hotloop.trainers.packing import Savings, build_rows, split_steps
from hotloop.trainers.schedule import compute_lr
from hotloop.types import Sample

DEFAULT_VOCAB = 32
WEIGHT_NAME = "logits.weight"


class FakeTrainer:
    """A Trainer of a context-free policy."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        config = Path(settings.policy_dir) / "config.json" if settings.policy_dir else None
        vocab = json.loads(config.read_text())["vocab_size"] if config and config.is_file() else DEFAULT_VOCAB
        self._state: dict[str, NDArray[np.float64]] = {
            name: np.zeros(vocab) for name in (WEIGHT_NAME, "exp_avg", "exp_avg_sq")
        }
        self._step = 0
        self.rounds: list[int] = []
        """Round numbers trained on, in order."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the first round."""
        return self._step

    def train_round(self, batch: Batch) -> dict[str, float]:
        """Take `steps_per_round` steps.

        Raises:
            RunError: codes `non_finite_loss`, `empty_batch`, `sample_invalid`, `empty_step`; weights are unchanged.
        """
        if not batch.samples:
            raise RunError("empty_batch", "there is nothing to train on", where=f"round {batch.round}")
        before, step = {name: array.copy() for name, array in self._state.items()}, self._step
        try:
            metrics = [
                self._take_step([batch.samples[i] for i in chosen], num_rollouts)
                for chosen, num_rollouts in split_steps(
                    batch.samples, batch.num_rollouts, self._settings.optimizer.steps_per_round
                )
            ]
        except RunError:
            for name, array in before.items():
                self._state[name][:] = array
            self._step = step
            raise
        self.rounds.append(batch.round)
        mean = {name: sum(values[name] for values in metrics) / len(metrics) for name in metrics[0]}
        return {**mean, "train/lr-pg_0": metrics[-1]["train/lr-pg_0"], "train/step": float(self._step)}

    def round_logprobs(self) -> Mapping[int, Sequence[float]]:
        """Nothing is kept: this policy ignores what came before a token."""
        return {}

    def weights(self) -> Mapping[str, Any]:
        """The one live array."""
        return {WEIGHT_NAME: self._state[WEIGHT_NAME]}

    def save_policy(self, directory: Path) -> None:
        """Write `model.safetensors` and `config.json`."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file({WEIGHT_NAME: self._state[WEIGHT_NAME]}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({"vocab_size": self._state[WEIGHT_NAME].size}))

    def save_optimizer(self, path: Path) -> None:
        """Write moments and the step counter."""
        moments = {name: self._state[name] for name in ("exp_avg", "exp_avg_sq")}
        save_file({**moments, "step": np.array([self._step])}, path)

    def load(self, directory: Path) -> None:
        """Restore what the two writes left in a directory.

        Raises:
            InputError: code `checkpoint_incomplete`.
        """
        paths = [directory / name for name in ("model.safetensors", "optimizer.safetensors")]
        for path in paths:
            if not path.is_file():
                raise InputError("checkpoint_incomplete", "the file is not there", where=str(path))
        tensors = {name: array for path in paths for name, array in load_file(path).items()}
        for name in self._state:
            self._state[name][:] = tensors[name]
        self._step = int(tensors["step"][0])

    def close(self) -> None:
        """Nothing to release."""

    def _take_step(self, samples: list[Sample], num_rollouts: float) -> dict[str, float]:
        optimizer = self._settings.optimizer
        rows = build_rows(
            samples,
            num_rollouts=num_rollouts,
            aggregation=self._settings.loss.aggregation,
            savings=Savings(),
            compare_behaviour=False,
            replay_routes=False,
        )
        logits = self._state[WEIGHT_NAME]
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        probs = np.exp(logprobs)
        gradient = np.zeros_like(logits)
        loss = 0.0
        for microbatch in cut_microbatches(rows, share_prompts=False, max_tokens=optimizer.max_tokens_per_microbatch):
            pull = (microbatch.advantages_BR.astype(np.float64) * microbatch.weights_BR).reshape(-1)[microbatch.cells_C]
            loss -= float((pull * logprobs[microbatch.targets_C]).sum())
            gradient -= np.bincount(microbatch.targets_C, weights=pull, minlength=logits.size) - pull.sum() * probs
        if not math.isfinite(loss):
            raise RunError("non_finite_loss", f"the loss is {loss}", where=f"optimizer step {self._step + 1}")
        norm = float(np.linalg.norm(gradient))
        if optimizer.clip_grad and norm > optimizer.clip_grad:
            gradient *= optimizer.clip_grad / norm
        self._step += 1
        lr = compute_lr(optimizer, self._step)
        first, second = self._state["exp_avg"], self._state["exp_avg_sq"]
        first += (1 - optimizer.beta1) * (gradient - first)
        second += (1 - optimizer.beta2) * (gradient * gradient - second)
        unbiased_first = first / (1 - optimizer.beta1**self._step)
        unbiased_second = second / (1 - optimizer.beta2**self._step)
        logits -= lr * unbiased_first / (np.sqrt(unbiased_second) + optimizer.eps)
        return {"train/loss": loss, "train/pg_loss": loss, "train/grad_norm": norm, "train/lr-pg_0": lr}
