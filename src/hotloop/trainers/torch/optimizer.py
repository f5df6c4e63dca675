"""AdamW on one flat parameter, and its state on disk.

Owns: the fused optimizer over an arena, gradient clipping, the schedule's application, and a safetensors file of the
two moments and the step counters.

Promises: `save` then `load` continues bit for bit; a file of another layout is refused; `undo` restores weights,
moments and counters as they were when `remember` was called.

Does not do: the meaning of the schedule (../schedule.py). Weight decay acts on every parameter, norms and embeddings
too, as plain AdamW does.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hotloop.errors import InputError, RunError
from hotloop.models.weights import Arena
from hotloop.trainers.base import OptimizerSettings
from hotloop.trainers.schedule import compute_lr

_CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as torch's own clipping does."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything an optimizer step changes."""

    flat: Tensor
    moments: tuple[Tensor, Tensor]
    adam_step: float
    step: int


class ArenaAdamW:
    """The optimizer of one arena.

    Source: Loshchilov and Hutter 2017 (AdamW), arXiv:1711.05101, algorithm 2; Kingma and Ba 2014, arXiv:1412.6980.
    """

    def __init__(self, arena: Arena, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.step = 0
        """Optimizer steps taken."""
        self._arena = arena
        self._whole = _link_gradients(arena)
        self._adam = torch.optim.AdamW(
            [self._whole],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        zeros = torch.zeros_like(arena.flat)
        self._adam.state[self._whole] = {
            "step": torch.zeros((), dtype=torch.float32, device=arena.flat.device),
            "exp_avg": zeros,
            "exp_avg_sq": zeros.clone(),
        }

    @property
    def gradient(self) -> Tensor:
        """The flat gradient that backward passes add to."""
        assert self._arena.grad is not None
        return self._arena.grad

    def clear_gradient(self) -> None:
        """Set the gradient to zero, keeping the buffer."""
        self.gradient.zero_()

    def apply(self) -> tuple[float, float]:
        """Clip the gradient and take one step.

        Returns:
            The gradient norm before clipping, and the learning rate used.

        Raises:
            RunError: code `non_finite_gradient`; nothing has changed.
        """
        norm = float(torch.linalg.vector_norm(self.gradient))
        if not math.isfinite(norm):
            raise RunError(
                "non_finite_gradient",
                f"the gradient norm is {norm}",
                where=f"optimizer step {self.step + 1}",
                do="Lower optimizer.lr or turn on optimizer.clip_grad; weights are as they were before the round.",
            )
        limit = self.settings.clip_grad
        if limit and norm > limit:
            self.gradient.mul_(limit / (norm + _CLIP_EPSILON))
        lr = compute_lr(self.settings, self.step + 1)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self.step += 1
        return norm, lr

    def remember(self) -> Memory:
        """Copy everything that a step changes."""
        state = self._adam.state[self._whole]
        moments = (state["exp_avg"].clone(), state["exp_avg_sq"].clone())
        return Memory(self._arena.flat.clone(), moments, float(state["step"]), self.step)

    def undo(self, memory: Memory) -> None:
        """Go back to what `remember` copied."""
        state = self._adam.state[self._whole]
        with torch.no_grad():
            self._arena.flat.copy_(memory.flat)
            state["exp_avg"].copy_(memory.moments[0])
            state["exp_avg_sq"].copy_(memory.moments[1])
            state["step"].fill_(memory.adam_step)
        self.step = memory.step

    def save(self, path: Path) -> None:
        """Write moments and counters, and wait until they are on disk.

        Raises:
            RunError: code `optimizer_write_failed`.
        """
        state = self._adam.state[self._whole]
        tensors = {
            "exp_avg": state["exp_avg"].cpu(),
            "exp_avg_sq": state["exp_avg_sq"].cpu(),
            "adam_step": state["step"].cpu().reshape(1),
            "step": torch.tensor([self.step], dtype=torch.int64),
        }
        try:
            save_file(tensors, str(path), metadata={"layout": describe_layout(self._arena)})
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, SafetensorError) as error:
            raise RunError(
                "optimizer_write_failed",
                f"cannot write the optimizer ({error})",
                where=str(path),
                do="Free disk space and resume from the checkpoint before this one.",
            ) from error

    def load(self, path: Path) -> None:
        """Read what `save` wrote.

        Raises:
            InputError: code `checkpoint_incomplete` or `checkpoint_mismatch`; nothing has changed.
        """
        if not path.is_file():
            raise InputError(
                "checkpoint_incomplete", "there is no optimizer state", where=str(path), do="Use another checkpoint."
            )
        try:
            with safe_open(str(path), framework="pt") as file:
                layout = (file.metadata() or {}).get("layout")
                tensors = {name: file.get_tensor(name) for name in ("exp_avg", "exp_avg_sq", "adam_step", "step")}
        except SafetensorError as error:
            raise InputError("checkpoint_incomplete", f"not readable ({error})", where=str(path)) from error
        if layout != describe_layout(self._arena):
            raise InputError(
                "checkpoint_mismatch",
                "the optimizer state belongs to a policy with other parameters",
                where=str(path),
                do="Resume with the policy that the run was started with.",
            )
        state = self._adam.state[self._whole]
        state["exp_avg"].copy_(tensors["exp_avg"])
        state["exp_avg_sq"].copy_(tensors["exp_avg_sq"])
        state["step"].fill_(float(tensors["adam_step"]))
        self.step = int(tensors["step"])


def _link_gradients(arena: Arena) -> torch.nn.Parameter:
    """Make one flat parameter whose gradient buffer the leaves of the forward pass share."""
    if arena.config.is_native:
        return arena.enable_gradients()
    arena.grad = torch.zeros_like(arena.flat)
    whole = torch.nn.Parameter(arena.flat)
    whole.grad = arena.grad
    return whole


def describe_layout(arena: Arena) -> str:
    """Hash the names and shapes of an arena in order: two arenas with the same hash share a flat layout."""
    lines = "\n".join(f"{name} {slot.offset} {slot.shape}" for name, slot in arena.slots.items())
    return hashlib.sha256(lines.encode()).hexdigest()
