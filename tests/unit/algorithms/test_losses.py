"""Each loss, divergence and correction: a value worked out by hand and a limit case."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hotloop.algorithms.corrections import CorrectionKind, compute_correction
from hotloop.algorithms.kl import KlKind, compute_kl
from hotloop.algorithms.logprobs import compute_logprobs_and_entropy
from hotloop.algorithms.losses import LossKind, PolicyLoss, compute_policy_loss, compute_value_loss


def one_token(kind: LossKind, advantage: float, ratio: float, **options: Any) -> tuple[PolicyLoss, float]:
    """Loss of one token and its gradient by the current logprob; the current logprob is -1."""
    logprob = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0 - math.log(ratio)]], dtype=torch.float64)
    settings: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28, **options}
    loss = compute_policy_loss(
        kind, logprob, old, torch.tensor([[advantage]], dtype=torch.float64), torch.ones(1, 1).double(), **settings
    )
    loss.loss_BT.sum().backward()
    assert logprob.grad is not None
    return loss, float(logprob.grad)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "gradient", "clipped"),
    [
        (1.0, 1.5, -1.28, 0.0, 1.0),  # clip-higher: the gain is cut at 1 + 0.28
        (1.0, 1.25, -1.25, -1.25, 0.0),  # between eps and eps_high: still free
        (-1.0, 0.5, 0.8, 0.0, 1.0),
        (-1.0, 1.5, 1.5, 1.5, 0.0),  # a bad token that became likelier is never clipped
        (1.0, 0.5, -0.5, -0.5, 0.0),
    ],
)
def test_clip(advantage: float, ratio: float, expected: float, gradient: float, clipped: float) -> None:
    loss, grad = one_token("grpo", advantage, ratio)
    assert loss.loss_BT.item() == pytest.approx(expected)
    assert grad == pytest.approx(gradient)
    assert loss.clipped_BT.item() == clipped


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    loss, grad = one_token("grpo", -1.0, 5.0, dual_clip=3.0)
    assert (loss.loss_BT.item(), grad) == (3.0, 0.0)


def test_dual_clip_leaves_good_tokens_alone() -> None:
    assert one_token("grpo", 1.0, 1.1, dual_clip=3.0)[0].loss_BT.item() == pytest.approx(-1.1)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_at_ratio_one_every_loss_has_the_plain_policy_gradient(kind: LossKind) -> None:
    _, grad = one_token(kind, 0.7, 1.0)
    assert grad == pytest.approx(-0.7)


def test_gspo_uses_the_mean_over_unmasked_tokens_and_shares_its_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -9.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1, -1.1, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    loss = compute_policy_loss("gspo", logprobs, old, torch.ones(1, 3).double(), mask, eps_clip=0.2, eps_clip_high=0.2)
    ratio = math.exp(0.1)
    assert loss.ratio_BT[0].tolist() == pytest.approx([ratio] * 3)
    (loss.loss_BT * mask).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-ratio, -ratio, 0.0])


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    loss, grad = one_token("cispo", 1.0, 1.5)
    assert loss.loss_BT.item() == pytest.approx(1.28)  # -1.28 x 1 x logprob of -1
    assert grad == pytest.approx(-1.28)
    assert loss.clipped_BT.item() == 1.0


def test_cispo_with_eps_of_one_has_no_lower_bound() -> None:
    _, grad = one_token("cispo", 1.0, 0.01, eps_clip=1.0)
    assert grad == pytest.approx(-0.01)


def test_value_loss_takes_the_larger_error() -> None:
    loss, clipped = compute_value_loss(
        torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]), value_clip=0.2
    )
    assert loss.item() == pytest.approx(0.64)  # (0 + 0.2 - 1)^2 > (1 - 1)^2
    assert clipped.item() == 1.0


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.00483742), ("low_var_kl", 0.00483742)]
)
def test_kl_at_a_tenth(kind: KlKind, value: float) -> None:
    assert compute_kl(kind, torch.tensor(-1.0).double(), torch.tensor(-1.1).double()).item() == pytest.approx(
        value, rel=1e-6
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_of_a_policy_to_itself_is_zero(kind: KlKind) -> None:
    logprobs = torch.tensor([-0.3, -2.0])
    assert compute_kl(kind, logprobs, logprobs).tolist() == [0.0, 0.0]


def test_low_var_kl_clamps_the_product_with_the_ratio() -> None:
    current, reference = torch.tensor(-5.0), torch.tensor(-1.0)
    plain = math.exp(4.0) - 1 - 4
    assert compute_kl("k3", current, reference, ratio=torch.tensor(0.1)).item() == pytest.approx(0.1 * plain, rel=1e-6)
    assert compute_kl("low_var_kl", current, reference, ratio=torch.tensor(0.1)).item() == pytest.approx(
        0.1 * plain, rel=1e-6
    )
    assert compute_kl("low_var_kl", current, reference, ratio=torch.tensor(0.5)).item() == 10.0


@pytest.mark.parametrize(
    ("kind", "ratio", "low", "high", "weight"),
    [
        ("tis", 4.0, 0.0, 2.0, 2.0),
        ("tis", 0.4, 0.0, 2.0, 0.4),
        ("tis", 2.0, 0.0, 2.0, 2.0),
        ("icepop", 4.0, 0.5, 2.0, 0.0),
        ("icepop", 0.4, 0.5, 2.0, 0.0),
        ("icepop", 2.0, 0.5, 2.0, 2.0),
        ("icepop", 0.5, 0.5, 2.0, 0.5),
        ("none", 4.0, 0.0, 2.0, 1.0),
    ],
)
def test_corrections(kind: CorrectionKind, ratio: float, low: float, high: float, weight: float) -> None:
    old = torch.tensor([[ratio]], dtype=torch.float64).log()
    correction = compute_correction(kind, old, torch.zeros_like(old), low=low, high=high)
    assert correction.weight_BT.item() == pytest.approx(weight)
    assert correction.ratio_BT.item() == pytest.approx(ratio)


def test_a_correction_carries_no_gradient() -> None:
    old = torch.zeros(1, 1, requires_grad=True)
    assert not compute_correction("tis", old, torch.zeros(1, 1), low=0, high=2).weight_BT.requires_grad


def test_temperature_divides_the_logits_before_logprob_and_entropy() -> None:
    logits = torch.tensor([[math.log(9.0), 0.0]])
    logprobs, entropy = compute_logprobs_and_entropy(logits, torch.tensor([0]), temperature=2.0)
    # at temperature 2 the odds are 3 to 1
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    _, entropy = compute_logprobs_and_entropy(torch.zeros(1, 32), torch.tensor([3]))
    assert entropy.item() == pytest.approx(math.log(32))


def test_entropy_has_a_gradient_only_when_asked_for() -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    assert not compute_logprobs_and_entropy(logits, torch.tensor([0, 1]))[1].requires_grad
    assert compute_logprobs_and_entropy(logits, torch.tensor([0, 1]), entropy_gradient=True)[1].requires_grad


def test_removed_tokens_have_no_probability_in_the_logprob_and_keep_it_in_the_entropy() -> None:
    logits = torch.tensor([[math.log(9.0), 0.0, math.log(10.0)]], requires_grad=True)
    removed = torch.tensor([[False, False, True]])
    logprobs, entropy = compute_logprobs_and_entropy(logits, torch.tensor([0]), removed_NV=removed)
    assert logprobs.item() == pytest.approx(math.log(0.9))
    whole = [0.45, 0.05, 0.5]
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in whole))
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.1, -0.1, 0.0])
