"""The Trainer port: samples in, an optimizer step out.

Owns: the Protocol that every trainer implements (torch, fake), its settings and records, and `open_trainer`, which
imports an implementation when called so that nobody else names torch.

Promises (held by tests/contract/test_trainer_contract.py on every implementation):
- `train_round` is deterministic: same state and batch, same metrics and weights;
- one microbatch and k microbatches give the same update to 1e-6;
- `save` then `load` restores weights, optimizer and counters exactly;
- a non-finite loss or gradient raises before any weight changes.

Does not do: advantages and filtering (algorithms/), when to save or publish (loop/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hotloop.types import Sample


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The objective, as algorithms.md sections 2 to 5 define it."""

    kind: Literal["grpo", "gspo", "cispo"] = "grpo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    dual_clip: float | None = None
    kl_loss_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coef: float = 0.0
    aggregation: Literal["per_sample", "per_token"] = "per_sample"
    correction: Literal["none", "tis", "icepop"] = "none"
    correction_low: float = 0.0
    correction_high: float = 2.0
    old_logprobs: Literal["recompute", "behaviour"] = "recompute"
    """recompute: from the trainer before the first step of the round; behaviour: the engine's own."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule; counts are optimizer steps."""

    lr: float = 1e-6
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_min_frac: float = 0.0
    lr_warmup_steps: int = 0
    total_steps: int = 1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    clip_grad: float = 1.0
    steps_per_round: int = 1
    max_tokens_per_microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What `open_trainer` needs to build a trainer."""

    kind: Literal["torch", "fake"] = "torch"
    policy_dir: str = ""
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    exact_savings: bool = True
    replay_routed_experts: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What one round trains on."""

    round: int
    samples: Sequence[Sample]
    num_rollouts: int
    """Rollouts in the round, zero-advantage groups included: the denominator of per-sample aggregation."""


class Trainer(Protocol):
    """Holds the policy being trained and its optimizer."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the first round."""
        ...

    def train_round(self, batch: Batch) -> dict[str, float]:
        """Take `steps_per_round` optimizer steps and return metrics under the names of algorithms.md section 13.

        Raises:
            RunError: code `non_finite_loss` or `non_finite_gradient`; weights are unchanged.
        """
        ...

    def round_logprobs(self) -> Mapping[int, Sequence[float]]:
        """What the trainer itself gave the tokens of the last round, before the loss of each was taken.

        Returns: rollout id -> one logprob for each token from the first unmasked one to the last; a rollout that the
            exact savings left out of the passes, or that has several samples, is not in it.
        """
        ...

    def weights(self) -> Mapping[str, Any]:
        """Current parameters by checkpoint name, as live arrays that an in-process engine may copy from."""
        ...

    def save_policy(self, directory: Path) -> None:
        """Write `model.safetensors`, `config.json` and the tokenizer: a Hugging Face directory."""
        ...

    def save_optimizer(self, path: Path) -> None: ...

    def load(self, directory: Path) -> None:
        """Restore weights and optimizer from a checkpoint directory."""
        ...

    def close(self) -> None: ...


def open_trainer(settings: TrainerSettings) -> Trainer:
    """Build the trainer that the settings name.

    Raises:
        MissingExtra: the implementation needs a package that is not installed.
        InputError: the policy directory is not usable.
    """
    from hotloop.trainers.registry import build

    return build(settings)
