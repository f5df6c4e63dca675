"""Each saving of the trainer against the plain path, by gradient; and when each switches itself off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_batches import make_batch

from hotloop.trainers.base import Batch, LossSettings
from hotloop.trainers.packing import Savings, build_rows, choose_savings, uses_behaviour_logprobs

ALL = Savings(skip_zero_advantage=True, merge_equal=True, share_prompts=True)
ONE_BY_ONE = {
    "skip": Savings(skip_zero_advantage=True),
    "merge": Savings(merge_equal=True),
    "share": Savings(share_prompts=True),
    "all": ALL,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {},
    "tis": {"correction": "tis"},
    "icepop": {"correction": "icepop", "correction_low": 0.5},
    "behaviour": {"old_logprobs": "behaviour"},
    "gspo": {"kind": "gspo", "old_logprobs": "behaviour"},
    "cispo": {"kind": "cispo", "old_logprobs": "behaviour"},
    "per_token": {"aggregation": "per_token"},
    "temperature": {"temperature": 0.7},
    "dual": {"dual_clip": 3.0, "old_logprobs": "behaviour"},
}


def gradient_of(
    make_trainer: Any, savings: Savings, batch: Batch, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    trainer = make_trainer(clip_grad=0.0, **settings)
    trainer._savings = savings
    metrics = trainer.train_round(batch)
    return trainer._optimizer.gradient.clone(), metrics


def relative_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("saving", ONE_BY_ONE)
def test_a_saving_leaves_the_gradient_as_it_is(make_trainer: Any, saving: str, objective: str) -> None:
    batch = make_batch(tool_frac=0.2)
    settings = OBJECTIVES[objective]
    plain, plain_metrics = gradient_of(make_trainer, Savings(), batch, **settings)
    saved, saved_metrics = gradient_of(make_trainer, ONE_BY_ONE[saving], batch, **settings)
    assert float(plain.norm()) > 1e-3
    assert relative_gap(saved, plain) < 1e-5
    for name in ("train/loss", "train/pg_loss", "train/pg_clipfrac", "train/grad_norm"):
        assert saved_metrics[name] == pytest.approx(plain_metrics[name], rel=2e-5, abs=1e-7), name
    if saving != "share":
        assert saved_metrics["train/computed_rows"] < plain_metrics["train/computed_rows"]
    assert saved_metrics["train/computed_tokens"] < plain_metrics["train/computed_tokens"]


@pytest.mark.parametrize("saving", ["merge", "share"])
def test_merging_and_sharing_leave_every_metric_as_it_is(make_trainer: Any, saving: str) -> None:
    batch = make_batch(zero_groups=1)
    settings = {"correction": "tis", "kl_loss_coef": 0.1, "entropy_coef": 0.01}
    _, plain = gradient_of(make_trainer, Savings(), batch, **settings)
    _, saved = gradient_of(make_trainer, ONE_BY_ONE[saving], batch, **settings)
    for name, value in plain.items():
        if not name.startswith("train/computed"):
            assert saved[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_all_savings_leave_a_round_of_several_steps_as_it_is(make_trainer: Any) -> None:
    batch = make_batch(num_groups=9, zero_groups=3)
    trainers = {}
    for name, savings in (("plain", Savings()), ("all", ALL)):
        trainers[name] = make_trainer(steps_per_round=3, correction="tis")
        trainers[name]._savings = savings
        for _ in range(2):
            trainers[name].train_round(batch)
    start = make_trainer().arena.flat
    moved = {name: trainer.arena.flat - start for name, trainer in trainers.items()}
    assert relative_gap(moved["all"], moved["plain"]) < 1e-3  # AdamW's division enlarges rounding of small gradients


def test_the_mixture_of_experts_shares_and_merges_exactly(make_trainer: Any) -> None:
    batch = make_batch()
    plain, _ = gradient_of(make_trainer, Savings(), batch, policy="moe")
    saved, _ = gradient_of(make_trainer, ALL, batch, policy="moe")
    assert relative_gap(saved, plain) < 1e-5


def test_skipping_is_off_when_a_kl_or_entropy_term_acts_without_advantage() -> None:
    assert choose_savings(LossSettings(), wanted=True) == ALL
    assert not choose_savings(LossSettings(kl_loss_coef=0.1), wanted=True).skip_zero_advantage
    assert not choose_savings(LossSettings(entropy_coef=0.01), wanted=True).skip_zero_advantage
    assert choose_savings(LossSettings(), wanted=False) == Savings()


@pytest.mark.parametrize("term", [{"kl_loss_coef": 0.1}, {"entropy_coef": 0.01}])
def test_skipping_would_be_wrong_with_those_terms(make_trainer: Any, term: dict[str, float]) -> None:
    batch = make_batch()
    settings = {"steps_per_round": 1, **term}
    plain, _ = gradient_of(make_trainer, Savings(), batch, **settings)
    skipped, _ = gradient_of(make_trainer, Savings(skip_zero_advantage=True), batch, **settings)
    chosen, _ = gradient_of(make_trainer, choose_savings(LossSettings(**term), wanted=True), batch, **settings)
    assert relative_gap(chosen, plain) < 1e-5
    if "entropy_coef" in term:  # at the first step the policy is its own reference: k3 has no gradient there
        assert relative_gap(skipped, plain) > 1e-3


def rows_of(batch: Batch, savings: Savings, *, compare_behaviour: bool = True) -> Any:
    return build_rows(
        batch.samples,
        num_rollouts=batch.num_rollouts,
        aggregation="per_sample",
        savings=savings,
        compare_behaviour=compare_behaviour,
        replay_routes=False,
    )


def test_equal_responses_become_one_row_with_the_sum_of_their_weights() -> None:
    batch = make_batch(num_groups=1, group_size=8, num_answers=2, zero_groups=0)
    rows = rows_of(batch, Savings(merge_equal=True))
    distinct = {tuple(sample.ids): sum(other.ids == sample.ids for other in batch.samples) for sample in batch.samples}
    assert len(rows.lengths_N) == len(distinct) == 2
    for row, (ids, count) in enumerate(distinct.items()):
        per_token = count / (rows.mask_NT[row].sum() * 8)
        assert rows.ids_NT[row, : len(ids)].tolist() == list(ids)
        assert rows.weights_N[row] == pytest.approx(per_token)


def test_equal_responses_with_other_advantages_stay_apart() -> None:
    batch = make_batch(num_groups=1, num_answers=1, zero_groups=0)
    first, *others = batch.samples
    penalised = replace(
        first, advantages=[value - 0.1 * kept for value, kept in zip(first.advantages, first.mask, strict=True)]
    )
    rows = rows_of(replace(batch, samples=[penalised, *others]), Savings(merge_equal=True))
    assert len(rows.lengths_N) == 2


def test_equal_responses_with_other_behaviour_logprobs_stay_apart_when_those_enter_the_loss() -> None:
    batch = make_batch(num_groups=1, num_answers=1, zero_groups=0, noise=0.01)
    assert len(rows_of(batch, Savings(merge_equal=True), compare_behaviour=True).lengths_N) == 5
    assert len(rows_of(batch, Savings(merge_equal=True), compare_behaviour=False).lengths_N) == 1


def test_behaviour_logprobs_that_differ_by_rounding_are_merged_to_their_mean() -> None:
    batch = make_batch(num_groups=1, num_answers=1, zero_groups=0, noise=5e-7)
    rows = rows_of(batch, Savings(merge_equal=True))
    assert len(rows.lengths_N) == 1
    mean = np.mean([sample.behaviour_logprobs for sample in batch.samples], axis=0)
    np.testing.assert_allclose(rows.behaviour_NT[0], mean[: rows.lengths_N[0]], rtol=1e-6)


def test_which_objectives_read_behaviour_logprobs() -> None:
    assert not uses_behaviour_logprobs(LossSettings())
    assert uses_behaviour_logprobs(LossSettings(correction="tis"))
    assert uses_behaviour_logprobs(LossSettings(old_logprobs="behaviour"))


def test_the_denominator_counts_samples_that_were_skipped() -> None:
    batch = make_batch(zero_groups=4)
    skipped, kept = rows_of(batch, Savings(skip_zero_advantage=True)), rows_of(batch, Savings())
    assert len(skipped.weights_N) == 10
    np.testing.assert_array_equal(skipped.weights_N, kept.weights_N[20:])


def test_a_round_without_any_advantage_has_a_zero_gradient_and_says_what_is_known(make_trainer: Any) -> None:
    batch = make_batch(zero_groups=6)
    gradient, metrics = gradient_of(make_trainer, ALL, batch)
    assert float(gradient.abs().max()) == 0.0
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["train/computed_rows"] == 0.0
    assert "train/entropy_loss" not in metrics
