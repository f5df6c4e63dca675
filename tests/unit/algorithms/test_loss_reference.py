"""Losses, gradients, weights and advantages against values that TRL, slime and verl computed.

`tests/data/loss_reference.json` holds 68 cases. Each is either checked here or listed in NOT_OURS with the reason.
Where a library's reduction is not one of ours, the per-token loss is still ours and only the reduction is the test's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotloop.algorithms.advantages import compute_group_advantages
from hotloop.algorithms.aggregation import compute_sample_weights
from hotloop.algorithms.corrections import compute_correction
from hotloop.algorithms.kl import compute_kl
from hotloop.algorithms.losses import compute_policy_loss, compute_sequence_mean

DATA = json.loads((Path(__file__).parents[2] / "data" / "loss_reference.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in DATA["cases"]}
INPUTS = DATA["inputs"]

NOT_OURS = {
    "verl/tis_sequence/one_fully_masked_response": "sequence-level truncated weights are not among our corrections",
    "verl/kl_abs/mixed": "the absolute log-ratio is not among the estimators of our KL",
}


def tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    fields = INPUTS[case["inputs"]]
    names = ("logp", "old_logp", "rollout_logp", "ref_logp", "mask")
    return {name: torch.tensor(fields[name], dtype=torch.float32) for name in names}


def sample_weights(case: dict[str, Any], mask: np.ndarray) -> np.ndarray:
    """Token weights of the case's reduction, [B, T]; from our aggregation wherever it is one of ours."""
    sums = mask.sum(1)
    rows = np.arange(len(sums))
    reduction = case["reduction"]
    if reduction.startswith(("mean over responses", "sum over responses")):
        count = len(rows) if reduction.startswith("mean") else 1
        weights = compute_sample_weights(sums, rows, num_rollouts=count, mode="per_sample")
    elif reduction == "seq-mean-token-mean":
        weights = compute_sample_weights(sums, rows, num_rollouts=int((sums > 0).sum()), mode="per_sample")
    elif reduction.startswith(("sum over tokens", "token-mean", "masked token mean")):
        if (sums > 0).all():
            weights = compute_sample_weights(sums, rows, num_rollouts=len(rows), mode="per_token")
        else:  # ours counts a fully masked response as one token, theirs as none
            weights = np.full(len(rows), 1 / max(sums.sum(), 1))
    elif reduction == "seq-mean-token-sum":
        weights = np.full(len(rows), 1 / (sums > 0).sum())
    elif reduction == "token sum / (batch * max_completion_length=5)":
        weights = np.full(len(rows), 1 / (len(rows) * 5))
    else:
        raise AssertionError(f"no reduction {reduction!r}")
    return weights[:, None] * mask


def advantages_of(case: dict[str, Any], shape: torch.Size) -> torch.Tensor:
    if case["advantages"] is not None:
        return torch.tensor(case["advantages"], dtype=torch.float32)[:, None].expand(shape)
    return torch.tensor(case["expected"]["advantages_per_token"], dtype=torch.float32)


def loss_options(case: dict[str, Any]) -> dict[str, Any]:
    options = case["options"]
    sequence = "gspo" in case["id"]
    low = options.get("epsilon", options.get("eps_clip", options.get("clip_ratio_low")))
    high = options.get("epsilon_high", options.get("eps_clip_high", options.get("clip_ratio_high", low)))
    dual = options.get("delta", options.get("eps_clip_c", options.get("clip_ratio_c")))
    return {"kind": "gspo" if sequence else "grpo", "eps_clip": low, "eps_clip_high": high, "dual_clip": dual}


def correction_options(case: dict[str, Any]) -> dict[str, Any]:
    options = case["options"]
    name = case["id"].split("/")[1]
    if name.startswith("tis"):
        high = options.get("tis_clip", options.get("rollout_is_threshold"))
        return {"kind": "tis", "low": options.get("tis_clip_low", 0.0), "high": high}
    if name.startswith("icepop"):
        if "tis_clip" in options:
            return {"kind": "icepop", "low": options["tis_clip_low"], "high": options["tis_clip"]}
        low, high = options["rollout_is_threshold"].split("_")
        return {"kind": "icepop", "low": float(low), "high": float(high)}
    return {"kind": "none", "low": 0.0, "high": 0.0}


KL_CASES = [name for name in CASES if "/kl_" in name and name not in NOT_OURS]
ADVANTAGE_CASES = [name for name in CASES if "grpo_advantage" in name]
LOSS_CASES = [
    name
    for name in CASES
    if name not in NOT_OURS and name not in KL_CASES and name not in ADVANTAGE_CASES and "gspo_seq_kl" not in name
]


def test_every_reference_case_is_checked_or_named_as_not_ours() -> None:
    checked = {*LOSS_CASES, *KL_CASES, *ADVANTAGE_CASES, "slime/gspo_seq_kl/mixed"}
    assert checked | set(NOT_OURS) == set(CASES)
    assert not checked & set(NOT_OURS)
    assert len(CASES) == 68


@pytest.mark.parametrize("name", LOSS_CASES)
def test_loss_and_gradient_equal_the_library(name: str) -> None:
    case = CASES[name]
    given = tensors(case)
    mask = given["mask"]
    logprobs = given["logp"].clone().requires_grad_()
    options = loss_options(case)
    kind = options.pop("kind")
    policy = compute_policy_loss(kind, logprobs, given["old_logp"], advantages_of(case, mask.shape), mask, **options)
    correction = compute_correction(
        old_logprobs_BT=given["old_logp"], behaviour_logprobs_BT=given["rollout_logp"], **correction_options(case)
    )
    token_loss = policy.loss_BT * correction.weight_BT
    loss = (token_loss * torch.tensor(sample_weights(case, mask.numpy()), dtype=torch.float32)).sum()
    loss.backward()
    expected = case["expected"]
    assert loss.item() == pytest.approx(expected["loss"], rel=2e-5, abs=2e-7)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected["grad_logp"], rtol=3e-5, atol=3e-7)
    if "per_token" in expected:
        np.testing.assert_allclose(
            token_loss.detach() * mask, np.array(expected["per_token"]) * mask.numpy(), rtol=3e-5, atol=3e-7
        )
    if "clipfrac_per_token" in expected:
        np.testing.assert_array_equal(policy.clipped_BT * mask, np.array(expected["clipfrac_per_token"]) * mask.numpy())
    if "clipped_per_token" in expected:
        np.testing.assert_array_equal(
            correction.clipped_BT * mask, np.array(expected["clipped_per_token"]) * mask.numpy()
        )
    if "weights" in expected:
        np.testing.assert_allclose(correction.weight_BT * mask, expected["weights"], rtol=3e-6)
    metrics = expected.get("metrics", {})
    if "actor/pg_clipfrac" in metrics:
        share = ((policy.clipped_BT * mask).sum() / mask.sum()).item()
        assert share == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("name", KL_CASES)
def test_kl_equals_the_library(name: str) -> None:
    case = CASES[name]
    given = tensors(case)
    logprobs = given["logp"].clone().requires_grad_()
    kind = case["options"].get("kl_penalty", case["options"].get("kl_loss_type"))
    per_token = compute_kl(kind, logprobs, given["ref_logp"])
    np.testing.assert_allclose(per_token.detach(), case["expected"]["per_token"], rtol=1e-4, atol=1e-7)
    loss = (per_token * torch.tensor(sample_weights(case, given["mask"].numpy()), dtype=torch.float32)).sum()
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=2e-5)
    if case["expected"]["grad_logp"] is not None:
        loss.backward()
        assert logprobs.grad is not None
        np.testing.assert_allclose(logprobs.grad.numpy(), case["expected"]["grad_logp"], rtol=1e-5)


def test_the_sequence_mean_of_gspo_equals_slime() -> None:
    case = CASES["slime/gspo_seq_kl/mixed"]
    given = tensors(case)
    means = compute_sequence_mean(given["old_logp"] - given["logp"], given["mask"]).expand(given["mask"].shape)
    np.testing.assert_allclose(means, case["expected"]["per_token"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ADVANTAGE_CASES)
def test_group_advantages_equal_verl(name: str) -> None:
    case = CASES[name]
    fields = INPUTS[case["inputs"]]
    mask = np.array(fields["mask"])
    # verl sums the masked token rewards of a row, so a row whose tokens are all masked has reward 0
    rewards = np.array(fields["rewards"]) * (mask.sum(1) > 0)
    group_ids = np.arange(len(rewards)) // fields["group_size"]
    advantages = compute_group_advantages(rewards, group_ids)
    expected = np.array(case["expected"]["advantages_per_token"])
    np.testing.assert_allclose(advantages[:, None] * mask, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in LOSS_CASES if CASES[name]["advantages"] is not None])
def test_group_advantages_equal_the_ones_given_to_the_losses(name: str) -> None:
    case = CASES[name]
    fields = INPUTS[case["inputs"]]
    group_ids = np.arange(len(fields["rewards"])) // fields["group_size"]
    epsilon = 1e-4 if name.startswith("trl/") else 1e-6
    advantages = compute_group_advantages(fields["rewards"], group_ids, epsilon=epsilon)
    np.testing.assert_allclose(advantages, case["advantages"], rtol=1e-6, atol=1e-7)
