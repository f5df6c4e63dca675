"""Policies that the lean decoder does not cover train through transformers, with the same savings and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_batches import make_batch

from hotloop.trainers.base import LossSettings, OptimizerSettings, TrainerSettings
from hotloop.trainers.torch.trainer import TorchTrainer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def foreign_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StableLM with random weights: rotary embedding on part of the head, layer norms with biases."""
    torch.manual_seed(5)
    config = transformers.StableLmConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        attention_dropout=0.0,
        num_key_value_heads=2,
        partial_rotary_factor=0.5,
    )
    directory = tmp_path_factory.mktemp("foreign") / "neox"
    transformers.StableLmForCausalLM(config).save_pretrained(directory)
    return directory


def trainer_of(directory: Path, **settings: Any) -> TorchTrainer:
    loss = LossSettings(correction="tis")
    optimizer = OptimizerSettings(lr=1e-3, clip_grad=0.0)
    return TorchTrainer(TrainerSettings(policy_dir=str(directory), loss=loss, optimizer=optimizer, **settings))


def test_a_foreign_policy_has_the_gradient_that_transformers_gives(foreign_dir: Path) -> None:
    batch = make_batch(num_groups=2, group_size=2, zero_groups=0)
    trainer = trainer_of(foreign_dir)
    trainer.train_round(batch)
    model = transformers.AutoModelForCausalLM.from_pretrained(foreign_dir)
    for sample in batch.samples:
        ids = torch.tensor([sample.ids])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        mask, advantage = torch.tensor(sample.mask[1:]).float(), torch.tensor(sample.advantages[1:])
        weight = torch.exp(logprobs.detach() - torch.tensor(sample.behaviour_logprobs[1:])).clamp(0, 2)
        (-(torch.exp(logprobs - logprobs.detach()) * advantage * weight * mask).sum() / mask.sum() / 4).backward()
    norm = float(trainer._optimizer.gradient.norm())
    for name, parameter in model.named_parameters():
        gap = trainer.arena.grad_view(name) - parameter.grad
        assert float(gap.norm()) < 1e-5 * norm, name


def test_savings_are_exact_for_a_foreign_policy(foreign_dir: Path) -> None:
    batch = make_batch()
    gradients = []
    for exact_savings in (True, False):
        trainer = trainer_of(foreign_dir, exact_savings=exact_savings)
        trainer.train_round(batch)
        gradients.append(trainer._optimizer.gradient)
    saved, plain = gradients
    assert float(plain.norm()) > 1e-3
    assert float((saved - plain).norm() / plain.norm()) < 1e-5


def test_a_foreign_policy_is_saved_and_loaded(foreign_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_of(foreign_dir)
    trainer.train_round(make_batch())
    trainer.save_policy(tmp_path / "c")
    trainer.save_optimizer(tmp_path / "c" / "optimizer.safetensors")
    resumed = trainer_of(foreign_dir)
    resumed.load(tmp_path / "c")
    assert resumed.train_round(make_batch(seed=1)) == trainer.train_round(make_batch(seed=1))
    assert torch.equal(resumed.arena.flat, trainer.arena.flat)
    assert set(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c").state_dict()) >= set(trainer.weights())
