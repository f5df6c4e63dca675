"""What every trainer promises, run on the torch trainer and on the fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop.errors import HotloopError, InputError, RunError
from hotloop.trainers.base import Batch, OptimizerSettings, Trainer, TrainerSettings, open_trainer
from hotloop.types import Sample

MakeTrainer = Callable[..., Trainer]
CHECKPOINT = "optimizer.safetensors"


@pytest.fixture(params=["torch", "fake"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTrainer:
    directory = tmp_path / "policy"
    if request.param == "torch":
        pytest.importorskip("torch")
        from hotloop.models.builtin import make_policy

        make_policy(directory, cache=tmp_path / "cache")

    def build(**optimizer: object) -> Trainer:
        settings = OptimizerSettings(**{"lr": 1e-2, "total_steps": 100, **optimizer})  # type: ignore[arg-type]
        return open_trainer(TrainerSettings(kind=request.param, policy_dir=str(directory), optimizer=settings))

    return build


def batch_of(round_number: int = 0, *, num_groups: int = 4, group_size: int = 4) -> Batch:
    """The token after the prompt earns 1 if it is even; behaviour logprobs are those of a uniform policy."""
    draw = np.random.default_rng(round_number)
    samples = []
    for group in range(num_groups):
        tokens = draw.integers(3, 30, group_size)
        rewards = (tokens % 2 == 0).astype(float)
        for index in range(group_size):
            advantage = float(rewards[index] - rewards.mean())
            samples.append(
                Sample(
                    ids=[1, 5 + group, int(tokens[index]), 2],
                    mask=[0, 0, 1, 1],
                    behaviour_logprobs=[0.0, 0.0, -3.5, -3.5],
                    advantages=[0.0, 0.0, advantage, advantage],
                    rollout_id=group * group_size + index,
                    group_id=group,
                    oldest_policy_version=0,
                )
            )
    return Batch(round_number, samples, num_groups * group_size)


def as_array(tensor: Any) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()


def copy_weights(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: as_array(tensor).copy() for name, tensor in trainer.weights().items()}


def assert_equal_weights(one: Trainer | dict[str, np.ndarray], other: Trainer) -> None:
    left = one if isinstance(one, dict) else copy_weights(one)
    right = copy_weights(other)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_same_state_and_batch_give_the_same_metrics_and_weights(make: MakeTrainer) -> None:
    one, other = make(), make()
    for round_number in range(3):
        assert one.train_round(batch_of(round_number)) == other.train_round(batch_of(round_number))
    assert_equal_weights(one, other)


def test_a_round_moves_the_weights_and_counts_its_steps(make: MakeTrainer) -> None:
    trainer = make(steps_per_round=2)
    before = copy_weights(trainer)
    metrics = trainer.train_round(batch_of())
    assert trainer.step == 2
    assert metrics["train/step"] == 2.0
    assert any(not np.array_equal(before[name], array) for name, array in copy_weights(trainer).items())


def test_weights_are_live(make: MakeTrainer) -> None:
    trainer = make()
    held = trainer.weights()
    trainer.train_round(batch_of())
    for name, array in trainer.weights().items():
        np.testing.assert_array_equal(as_array(held[name]), as_array(array))


def test_metrics_bear_the_published_names_and_are_numbers(make: MakeTrainer) -> None:
    metrics = make().train_round(batch_of())
    assert {"train/loss", "train/pg_loss", "train/grad_norm", "train/lr-pg_0", "train/step"} <= metrics.keys()
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())


def test_one_microbatch_and_many_give_the_same_update(make: MakeTrainer) -> None:
    whole, cut = make(eps=1e-3), make(eps=1e-3, max_tokens_per_microbatch=8)
    one, many = whole.train_round(batch_of()), cut.train_round(batch_of())
    assert many["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)
    assert many["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)
    for name, array in copy_weights(whole).items():
        np.testing.assert_allclose(copy_weights(cut)[name], array, atol=1e-6)


def test_save_then_load_continues_bit_for_bit(make: MakeTrainer, tmp_path: Path) -> None:
    settings = {"steps_per_round": 2, "lr_warmup_steps": 3, "lr_decay_style": "linear"}
    trainer, folder = make(**settings), tmp_path / "checkpoint"
    trainer.train_round(batch_of(0))
    trainer.save_policy(folder)
    trainer.save_optimizer(folder / CHECKPOINT)
    saved = copy_weights(trainer)
    expected = [trainer.train_round(batch_of(n)) for n in (1, 2)]

    resumed = make(**settings)
    resumed.train_round(batch_of(9))
    resumed.load(folder)
    assert_equal_weights(saved, resumed)
    assert resumed.step == 2
    assert [resumed.train_round(batch_of(n)) for n in (1, 2)] == expected
    assert_equal_weights(trainer, resumed)


def test_a_saved_policy_is_a_policy_directory(make: MakeTrainer, tmp_path: Path) -> None:
    trainer = make()
    trainer.save_policy(tmp_path / "out")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("missing", ["model.safetensors", CHECKPOINT])
def test_an_incomplete_checkpoint_is_refused_and_changes_nothing(
    make: MakeTrainer, tmp_path: Path, missing: str
) -> None:
    trainer, folder = make(), tmp_path / "checkpoint"
    trainer.save_policy(folder)
    trainer.save_optimizer(folder / CHECKPOINT)
    (folder / missing).unlink()
    trainer.train_round(batch_of())
    before = copy_weights(trainer)
    with pytest.raises(InputError, match="checkpoint_incomplete"):
        trainer.load(folder)
    assert_equal_weights(before, trainer)
    assert trainer.step == 1


def test_a_gradient_that_is_not_finite_raises_before_any_weight_changes(make: MakeTrainer) -> None:
    trainer = make(steps_per_round=2)
    trainer.train_round(batch_of(0))
    before, step = copy_weights(trainer), trainer.step
    good = batch_of(1)
    huge = [replace(s, advantages=[a * 1e39 for a in s.advantages]) if s.group_id == 3 else s for s in good.samples]
    with pytest.raises(HotloopError) as caught:
        trainer.train_round(replace(good, samples=huge))
    assert caught.value.code in ("non_finite_loss", "non_finite_gradient", "sample_invalid")
    assert_equal_weights(before, trainer)
    assert trainer.step == step
    untouched = make(steps_per_round=2)
    untouched.train_round(batch_of(0))
    assert trainer.train_round(batch_of(2)) == untouched.train_round(batch_of(2))


def test_an_empty_batch_is_refused(make: MakeTrainer) -> None:
    with pytest.raises(RunError, match="empty_batch"):
        make().train_round(Batch(0, [], 0))


def test_rewarded_tokens_become_likelier(make: MakeTrainer) -> None:
    trainer = make(lr=3e-2)
    first = trainer.train_round(batch_of(0))["train/pg_loss"]
    assert first == pytest.approx(0.0, abs=0.6)
    for round_number in range(1, 30):
        trainer.train_round(batch_of(round_number))
    again = make(lr=3e-2)
    losses = [probe(t) for t in (trainer, again)]
    assert losses[0] > losses[1] + 0.05
    trainer.close()


def probe(trainer: Trainer) -> float:
    """Probability that the policy gives to even tokens after the prompt (1, 5), from its weights."""
    weights = trainer.weights()
    if "logits.weight" in weights:
        logits = np.asarray(weights["logits.weight"])
    else:
        import torch

        from hotloop.models.decoder import compute_logits, forward

        arena = trainer.arena  # type: ignore[attr-defined]
        output = forward(arena.config, arena.params, torch.tensor([[1, 5]]), torch.tensor([[0, 1]]))
        logits = compute_logits(arena.config, arena.params, output.hidden_BTD)[0, -1].detach().numpy()
    probs = np.exp(logits - logits.max())
    return float(probs[4:30:2].sum() / probs.sum())
