"""The torch trainer against a slow, plain computation; old logprobs, steps, microbatches, routes and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_batches import make_batch

from hotloop.errors import InputError, RunError
from hotloop.models.decoder import compute_logits, forward
from hotloop.models.weights import read_policy
from hotloop.trainers.base import Batch
from hotloop.types import Support


def plain_logprobs(policy_dir: Path, ids: list[int], temperature: float = 1.0) -> tuple[Any, torch.Tensor]:
    """One sample at a time, whole vocabulary, no padding."""
    config, arena = read_policy(policy_dir)
    arena.enable_gradients()
    row = torch.tensor([ids])
    output = forward(config, arena.params, row, torch.arange(len(ids))[None])
    logits = compute_logits(config, arena.params, output.hidden_BTD)[0, :-1] / temperature
    return arena, torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0]


def test_loss_and_gradient_equal_a_plain_computation_sample_by_sample(make_trainer: Any, policy_dirs: Any) -> None:
    batch = make_batch(num_groups=3, group_size=3, zero_groups=1, tool_frac=0.3)
    trainer = make_trainer(clip_grad=0.0, correction="tis", temperature=0.8, aggregation="per_sample")
    metrics = trainer.train_round(batch)
    gradient, loss, gaps = torch.zeros_like(trainer.arena.flat), 0.0, []
    for sample in batch.samples:
        arena, logprobs = plain_logprobs(policy_dirs("dense"), sample.ids, temperature=0.8)
        mask = torch.tensor(sample.mask[1:], dtype=torch.float32)
        behaviour, advantage = torch.tensor(sample.behaviour_logprobs[1:]), torch.tensor(sample.advantages[1:])
        tis = torch.exp(logprobs.detach() - behaviour).clamp(0.0, 2.0)
        ratio = torch.exp(logprobs - logprobs.detach())
        token_loss = -ratio * advantage * tis
        sample_loss = (token_loss * mask).sum() / mask.sum() / batch.num_rollouts
        sample_loss.backward()
        gradient += arena.grad
        loss += float(sample_loss.detach())
        if any(sample.advantages):
            gaps.append(float(((logprobs.detach() - behaviour).abs() * mask).sum() / mask.sum()))
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert float((trainer._optimizer.gradient - gradient).norm() / gradient.norm()) < 1e-5
    assert metrics["train/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)


def test_a_round_of_one_step_is_on_policy_and_needs_no_second_pass(make_trainer: Any) -> None:
    metrics = make_trainer().train_round(make_batch())
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/pg_clipfrac"] == 0.0


def test_later_steps_of_a_round_compare_with_logprobs_from_before_the_first(make_trainer: Any) -> None:
    batch = make_batch(num_groups=4, zero_groups=0)
    together = make_trainer(steps_per_round=2, lr=1e-2)
    together.train_round(batch)
    # by hand: the first half moves the weights, the second half still compares with the start
    by_hand = make_trainer(steps_per_round=1, lr=1e-2, total_steps=1)
    halves = [[s for s in batch.samples if s.group_id in ids] for ids in ((100, 101), (102, 103))]
    start = make_trainer(lr=1e-2)
    starting = [
        start._compute_logprobs(start._params, m) for m in start._lay_out(Batch(0, halves[1], 10))[0].microbatches
    ]
    by_hand.train_round(Batch(0, halves[0], 10))
    [step] = by_hand._lay_out(Batch(0, halves[1], 10))
    values = by_hand._take_step(step, list(starting))
    assert abs(values["train/ppo_kl"]) > 1e-4
    torch.testing.assert_close(by_hand.arena.flat, together.arena.flat, rtol=1e-5, atol=1e-7)


def test_with_behaviour_as_old_the_ratio_is_against_the_engine(make_trainer: Any) -> None:
    batch = make_batch(zero_groups=0)
    metrics = make_trainer(old_logprobs="behaviour").train_round(batch)
    other = make_trainer().train_round(batch)
    assert abs(metrics["train/ppo_kl"]) <= metrics["train/train_rollout_logprob_abs_diff"]
    assert abs(metrics["train/ppo_kl"]) > 0.01
    assert metrics["train/train_rollout_logprob_abs_diff"] == other["train/train_rollout_logprob_abs_diff"]


@pytest.mark.parametrize("settings", [{}, {"aggregation": "per_token"}, {"steps_per_round": 2, "correction": "tis"}])
@pytest.mark.parametrize("savings", [True, False])
def test_one_microbatch_equals_many(make_trainer: Any, settings: dict[str, Any], savings: bool) -> None:
    batch = make_batch(num_groups=8)
    whole = make_trainer(exact_savings=savings, **settings)
    cut = make_trainer(exact_savings=savings, max_tokens_per_microbatch=24, **settings)
    one, many = whole.train_round(batch), cut.train_round(batch)
    steps = cut._lay_out(batch)
    assert min(len(step.microbatches) for step in steps) > 1
    if "steps_per_round" not in settings:  # AdamW's first step makes the second one's weights differ by rounding
        gap = cut._optimizer.gradient - whole._optimizer.gradient
        assert float(gap.norm() / whole._optimizer.gradient.norm()) < 1e-6
    for name, value in one.items():
        if name != "train/computed_tokens":
            assert many[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_no_microbatch_exceeds_its_bound_unless_it_is_a_single_row(make_trainer: Any) -> None:
    trainer = make_trainer(max_tokens_per_microbatch=12)
    [step] = trainer._lay_out(make_batch(num_groups=8, zero_groups=0))
    for microbatch in step.microbatches:
        tokens = microbatch.prefix_ids_GP.numel() + microbatch.branch_ids_BW.numel()
        assert tokens <= 12 or len(microbatch.mask_BR) == 1


def test_chunked_logits_give_the_same_gradient(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    whole = make_trainer(entropy_coef=0.01)
    whole.train_round(batch)
    monkeypatch.setattr("hotloop.trainers.torch.passes.MAX_LOGITS", 32 * 5)
    chunked = make_trainer(entropy_coef=0.01)
    chunked.train_round(batch)
    gap = chunked._optimizer.gradient - whole._optimizer.gradient
    assert float(gap.norm() / whole._optimizer.gradient.norm()) < 1e-5


def test_the_reference_is_frozen_and_its_divergence_starts_at_zero(make_trainer: Any) -> None:
    trainer = make_trainer(kl_loss_coef=0.5, lr=1e-2)
    batch = make_batch(zero_groups=0)
    first, second = trainer.train_round(batch), trainer.train_round(batch)
    assert abs(first["train/kl_loss"]) < 1e-8
    assert second["train/kl_loss"] > 1e-4
    assert second["train/loss"] == pytest.approx(second["train/pg_loss"] + 0.5 * second["train/kl_loss"], rel=1e-5)


def test_a_divergence_term_pulls_the_policy_back(make_trainer: Any) -> None:
    batch = make_batch(zero_groups=0)
    distance = {}
    for coef in (0.0, 5.0):
        trainer = make_trainer(kl_loss_coef=coef, lr=3e-3)
        start = trainer.arena.flat.clone()
        for _ in range(10):
            trainer.train_round(batch)
        distance[coef] = float((trainer.arena.flat - start).norm())
    assert distance[5.0] < distance[0.0]


def test_an_entropy_bonus_raises_entropy(make_trainer: Any) -> None:
    batch = make_batch(zero_groups=6, num_groups=6)
    trainer = make_trainer(entropy_coef=1.0, lr=3e-3)
    values = [trainer.train_round(batch)["train/entropy_loss"] for _ in range(5)]
    assert values == sorted(values)
    assert values[-1] <= math.log(32)


def test_training_raises_the_probability_of_rewarded_tokens(make_trainer: Any) -> None:
    trainer = make_trainer(lr=1e-2)
    batch = make_batch(num_groups=4, zero_groups=0)
    losses = [trainer.train_round(batch)["train/pg_loss"] for _ in range(1)]
    before = mean_advantage_logprob(make_trainer(), batch)
    for _ in range(20):
        losses.append(trainer.train_round(batch)["train/pg_loss"])
    assert mean_advantage_logprob(trainer, batch) > before + 0.1


def mean_advantage_logprob(trainer: Any, batch: Batch) -> float:
    [step] = trainer._lay_out(batch)
    return sum(
        float((trainer._compute_logprobs(trainer._params, m) * m.advantages_BR * m.weights_BR).sum())
        for m in step.microbatches
    )


def with_supports(batch: Batch) -> Batch:
    """Let truncated sampling have kept 6 tokens of 32 at most places, and everything at every third."""
    samples = []
    for sample in batch.samples:
        rows = []
        for position in range(sample.mask.index(1), len(sample.ids)):
            draw = np.random.default_rng([position, *sample.ids])
            kept = {sample.ids[position], *draw.choice(32, 5, replace=False).tolist()}
            rows.append(sorted(kept) if position % 3 else [])
        offsets = np.cumsum([0, *map(len, rows)]).tolist()
        samples.append(replace(sample, support=Support(offsets, [token for row in rows for token in row])))
    return replace(batch, samples=samples)


@pytest.mark.parametrize("settings", [{}, {"exact_savings": False}, {"max_tokens_per_microbatch": 16}])
def test_logprobs_are_taken_over_the_recorded_support(
    make_trainer: Any, policy_dirs: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("hotloop.trainers.torch.passes.MAX_LOGITS", 32 * 7)
    batch = with_supports(make_batch(tool_frac=0.3, zero_groups=0))
    trainer = make_trainer(correction="tis", temperature=0.9, **settings)
    metrics = trainer.train_round(batch)
    gaps = []
    for sample in batch.samples:
        config, arena = read_policy(policy_dirs("dense"))
        output = forward(config, arena.params, torch.tensor([sample.ids]), torch.arange(len(sample.ids))[None])
        logits = compute_logits(config, arena.params, output.hidden_BTD)[0] / 0.9
        own, prompt = [], sample.mask.index(1)
        for position in range(prompt, len(sample.ids)):
            begin, end = sample.support.offsets[position - prompt : position - prompt + 2]
            kept = sample.support.token_ids[begin:end] or list(range(32))
            row = logits[position - 1]
            logprob = float(row[sample.ids[position]] - torch.logsumexp(row[kept], 0))
            if sample.mask[position]:
                own.append(abs(logprob - sample.behaviour_logprobs[position]))
        gaps.append(sum(own) / len(own))
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    without = make_trainer(correction="tis", temperature=0.9, **settings).train_round(
        make_batch(tool_frac=0.3, zero_groups=0)
    )
    assert abs(metrics["train/train_rollout_logprob_abs_diff"] - without["train/train_rollout_logprob_abs_diff"]) > 0.1


def test_savings_are_exact_with_recorded_supports(make_trainer: Any) -> None:
    batch = with_supports(make_batch())
    gradients = []
    for exact_savings in (True, False):
        trainer = make_trainer(exact_savings=exact_savings, clip_grad=0.0)
        trainer.train_round(batch)
        gradients.append(trainer._optimizer.gradient)
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-5


def test_a_support_that_covers_too_few_positions_is_an_error(make_trainer: Any) -> None:
    batch = make_batch(num_groups=1, zero_groups=0, response_tokens=(3, 5))
    samples = [replace(sample, support=Support([0, 1], [sample.ids[-1]])) for sample in batch.samples]
    with pytest.raises(RunError, match="support covers positions"):
        make_trainer().train_round(replace(batch, samples=samples))


def with_routes(batch: Batch, seed: int = 0) -> Batch:
    """Give every sample routes that no router would choose: random, the same on a shared prompt."""
    samples = []
    for sample in batch.samples:
        draw = np.random.default_rng([seed, *sample.ids])
        prompt = sample.mask.index(1)
        shared = np.random.default_rng([seed, *sample.ids[:prompt]])
        parts = [
            rng.random((n, 2, 8)).argsort(-1)[..., :2]
            for rng, n in ((shared, prompt), (draw, len(sample.ids) - 1 - prompt))
        ]
        samples.append(replace(sample, routed_experts=np.concatenate(parts).astype(np.uint8)))
    return replace(batch, samples=samples)


def test_replayed_routes_change_the_loss_and_savings_do_not(make_trainer: Any) -> None:
    batch = with_routes(make_batch())
    gradients = {}
    for name, settings in {
        "free": {},
        "replayed": {"replay_routed_experts": True},
        "plain": {"replay_routed_experts": True, "exact_savings": False},
        "cut": {"replay_routed_experts": True, "max_tokens_per_microbatch": 20},
    }.items():
        trainer = make_trainer("moe", clip_grad=0.0, **settings)
        trainer.train_round(batch)
        gradients[name] = trainer._optimizer.gradient.clone()
    norm = gradients["plain"].norm()
    assert float((gradients["replayed"] - gradients["plain"]).norm() / norm) < 1e-5
    assert float((gradients["cut"] - gradients["plain"]).norm() / norm) < 1e-5
    assert float((gradients["free"] - gradients["plain"]).norm() / norm) > 0.1


def test_routes_that_the_router_chose_change_nothing(make_trainer: Any, policy_dirs: Any) -> None:
    batch = make_batch()
    config, arena = read_policy(policy_dirs("moe"))
    samples = []
    for sample in batch.samples:
        inputs = torch.tensor([sample.ids[:-1]])
        output = forward(config, arena.params, inputs, torch.arange(inputs.shape[1])[None], record_routes=True)
        samples.append(replace(sample, routed_experts=output.routes_BTLK[0].numpy().astype(np.uint8)))
    recorded = replace(batch, samples=samples)
    free = make_trainer("moe").train_round(batch)
    replayed = make_trainer("moe", replay_routed_experts=True).train_round(recorded)
    for name, value in free.items():
        assert replayed[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_samples_with_other_routes_on_the_same_prompt_do_not_share_it(make_trainer: Any) -> None:
    batch = make_batch(num_groups=1, group_size=2, num_answers=1, zero_groups=0)
    first, second = (with_routes(batch, seed).samples[seed] for seed in (0, 1))
    trainer = make_trainer("moe", replay_routed_experts=True)
    [step] = trainer._lay_out(replace(batch, samples=[first, second]))
    assert step.microbatches[0].prefix_ids_GP.shape[0] == 2


def test_replay_without_recorded_routes_is_an_error(make_trainer: Any) -> None:
    with pytest.raises(RunError, match="routes_missing"):
        make_trainer("moe", replay_routed_experts=True).train_round(make_batch())


def test_routes_that_are_all_zero_are_an_error(make_trainer: Any) -> None:
    batch = make_batch(num_groups=1, zero_groups=0)
    samples = [replace(s, routed_experts=np.zeros((len(s.ids) - 1, 2, 2), np.uint8)) for s in batch.samples]
    with pytest.raises(RunError, match="all zero"):
        make_trainer("moe", replay_routed_experts=True).train_round(replace(batch, samples=samples))


def test_a_gradient_that_overflows_in_a_later_step_undoes_the_whole_round(make_trainer: Any) -> None:
    batch = make_batch(num_groups=4, zero_groups=0)
    huge = [
        replace(s, advantages=[value * 1e38 for value in s.advantages]) if s.group_id >= 102 else s
        for s in batch.samples
    ]
    trainer = make_trainer(steps_per_round=2)
    trainer.train_round(batch)
    flat, memory, step = trainer.arena.flat.clone(), trainer._optimizer.remember(), trainer.step
    with pytest.raises(RunError) as caught:
        trainer.train_round(replace(batch, samples=huge, round=7))
    assert caught.value.code in ("non_finite_gradient", "non_finite_loss")
    assert caught.value.details["round"] == 7
    assert torch.equal(trainer.arena.flat, flat)
    assert trainer.step == step
    for now, before in zip(trainer._optimizer.remember().moments, memory.moments, strict=True):
        assert torch.equal(now, before)


def test_a_policy_that_is_no_longer_finite_is_a_loss_error(make_trainer: Any) -> None:
    trainer = make_trainer()
    trainer.arena.view("model.norm.weight")[0] = math.nan
    with pytest.raises(RunError, match="non_finite_loss"):
        trainer.train_round(make_batch())
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantages": [0.0]}, "must be equal in number"),
        ({"mask": [1, 1, 1, 1]}, "first token is unmasked"),
        ({"advantages": [0.0, 0.0, 0.0, math.nan]}, "advantage is not finite"),
        ({"advantages": [0.0, 0.0, 1.0, 1.0], "behaviour_logprobs": [0, 0, -1.0, -math.inf]}, "logprob is not finite"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(make_trainer: Any, change: dict[str, Any], words: str) -> None:
    batch = make_batch(num_groups=1, zero_groups=0)
    sample = replace(
        batch.samples[0], ids=[1, 2, 3, 4], mask=[0, 0, 1, 1], behaviour_logprobs=[0.0] * 4, advantages=[0.0] * 4
    )
    with pytest.raises(RunError, match=words) as caught:
        make_trainer().train_round(replace(batch, samples=[*batch.samples[1:], replace(sample, **change)]))
    assert "rollout 0 of group 100" in str(caught.value)


def test_more_steps_than_rollouts_is_an_error(make_trainer: Any) -> None:
    with pytest.raises(RunError, match="empty_step"):
        make_trainer(steps_per_round=6).train_round(make_batch(num_groups=1, zero_groups=0))


def test_a_checkpoint_of_another_policy_is_refused_and_changes_nothing(make_trainer: Any, tmp_path: Path) -> None:
    other, trainer = make_trainer("moe"), make_trainer()
    other.save_policy(tmp_path / "c")
    other.save_optimizer(tmp_path / "c" / "optimizer.safetensors")
    flat = trainer.arena.flat.clone()
    with pytest.raises(InputError, match="checkpoint_mismatch"):
        trainer.load(tmp_path / "c")
    trainer.save_policy(tmp_path / "c")
    other.save_optimizer(tmp_path / "c" / "optimizer.safetensors")
    with pytest.raises(InputError, match="checkpoint_mismatch"):
        trainer.load(tmp_path / "c")
    assert torch.equal(trainer.arena.flat, flat)


def test_an_optimizer_that_cannot_be_written_is_a_run_error(make_trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="optimizer_write_failed"):
        make_trainer().save_optimizer(tmp_path / "absent" / "optimizer.safetensors")


def test_weight_decay_and_moments_are_those_of_adamw_on_separate_parameters(make_trainer: Any) -> None:
    trainer = make_trainer(weight_decay=0.1, clip_grad=0.0, lr=1e-2)
    apart = [tensor.clone().requires_grad_() for tensor in trainer.arena.tensors().values()]
    oracle = torch.optim.AdamW(apart, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False)
    for seed in range(3):
        trainer.train_round(make_batch(seed=seed))
        for parameter, name in zip(apart, trainer.arena.slots, strict=True):
            parameter.grad = trainer.arena.grad_view(name).clone()
        oracle.step()
    for parameter, tensor in zip(apart, trainer.arena.tensors().values(), strict=True):
        torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-5, atol=1e-7)


def test_clipping_scales_the_gradient_to_the_limit(make_trainer: Any) -> None:
    free, clipped = make_trainer(clip_grad=0.0), make_trainer(clip_grad=0.01)
    norms = [trainer.train_round(make_batch(zero_groups=0))["train/grad_norm"] for trainer in (free, clipped)]
    assert norms[0] == norms[1] > 0.01
    assert float(clipped._optimizer.gradient.norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA GPU")
def test_a_gpu_gives_the_gradient_of_the_cpu(make_trainer: Any) -> None:
    batch = make_batch()
    gradients = []
    for device in ("cpu", "cuda"):
        trainer = make_trainer(device=device, correction="tis", steps_per_round=2)
        trainer.train_round(batch)
        gradients.append(trainer._optimizer.gradient.cpu())
    on_cpu, on_gpu = gradients
    assert float((on_gpu - on_cpu).norm() / on_cpu.norm()) < 1e-3


@pytest.mark.parametrize("steps_per_round", [1, 2])
def test_the_rounds_logprobs_are_those_of_the_weights_before_its_first_step(
    make_trainer: Any, policy_dirs: Any, steps_per_round: int
) -> None:
    batch = make_batch(num_groups=4, group_size=3, zero_groups=1, tool_frac=0.3)
    trainer = make_trainer(steps_per_round=steps_per_round, temperature=0.8)
    trainer.train_round(batch)
    given = trainer.round_logprobs()
    trained = [sample for sample in batch.samples if any(sample.advantages)]
    assert set(given) == {sample.rollout_id for sample in trained}
    for sample in trained:
        _, logprobs = plain_logprobs(policy_dirs("dense"), sample.ids, temperature=0.8)
        first, end = sample.mask.index(1), len(sample.mask) - sample.mask[::-1].index(1)
        wanted = (logprobs.detach() * torch.tensor(sample.mask[1:]))[first - 1 : end - 1]
        assert list(given[sample.rollout_id]) == pytest.approx(wanted.tolist(), abs=2e-5)
