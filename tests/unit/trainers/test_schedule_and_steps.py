"""The learning rate of each step, and how a round is split into steps."""

from __future__ import annotations

import pytest
from trainer_batches import make_batch

from hotloop.trainers.base import OptimizerSettings
from hotloop.trainers.packing import split_steps
from hotloop.trainers.schedule import compute_lr


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 5e-4 * 0.2),  # warm-up 1 of 5, decay not begun
        (5, 5e-4 * (0.05 + 0.95 * (1 - 4 / 500))),
        (251, 5e-4 * (0.05 + 0.95 * 0.5)),
        (500, 5e-4 * (0.05 + 0.95 * (1 - 499 / 500))),
        (501, 5e-4 * 0.05),
        (9999, 5e-4 * 0.05),
    ],
)
def test_linear_decay_is_the_recipe_of_the_default_task(step: int, expected: float) -> None:
    settings = OptimizerSettings(lr=5e-4, lr_warmup_steps=5, lr_decay_style="linear", lr_min_frac=0.05, total_steps=500)
    assert compute_lr(settings, step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("step", "factor"), [(1, 1.0), (51, 0.1 + 0.9 * 0.5), (101, 0.1)])
def test_cosine_decay(step: int, factor: float) -> None:
    settings = OptimizerSettings(lr=1.0, lr_decay_style="cosine", lr_min_frac=0.1, total_steps=100)
    assert compute_lr(settings, step) == pytest.approx(factor)


def test_a_constant_rate_stays_after_its_warm_up() -> None:
    settings = OptimizerSettings(lr=1.0, lr_warmup_steps=2, lr_min_frac=0.0, total_steps=3)
    assert [compute_lr(settings, step) for step in (1, 2, 3, 100)] == [0.5, 1.0, 1.0, 1.0]


def test_steps_hold_whole_groups_in_order_and_share_the_denominator() -> None:
    batch = make_batch(num_groups=5, group_size=4)
    parts = split_steps(batch.samples, batch.num_rollouts, 2)
    groups = [sorted({batch.samples[i].group_id for i in chosen}) for chosen, _ in parts]
    assert groups == [[100, 101, 102], [103, 104]]
    assert [count for _, count in parts] == [12, 8]


def test_rollouts_that_left_no_sample_stay_in_the_denominator() -> None:
    batch = make_batch(num_groups=2, group_size=4)
    parts = split_steps(batch.samples, 32, 2)
    assert [count for _, count in parts] == [16, 16]


def test_fewer_groups_than_steps_are_split_by_rollout() -> None:
    batch = make_batch(num_groups=1, group_size=4)
    parts = split_steps(batch.samples, 4, 2)
    assert [chosen for chosen, _ in parts] == [[0, 1], [2, 3]]
