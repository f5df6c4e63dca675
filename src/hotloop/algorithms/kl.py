"""Estimators of the divergence between the current and the reference policy, per token.

Owns: k1, k2, k3 and low_var_kl of algorithms.md section 3. All estimate KL(current || reference) from tokens drawn
from the current policy; x = logprob under current - logprob under reference.

Promises: gradients flow through the current logprobs only as the formula says; nothing is detached here.
Does not do: choosing where the penalty goes (reward or loss), nor its coefficient.

Shapes: any; arguments broadcast.
"""

from __future__ import annotations

from typing import Literal

import torch

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_BOUND = 10.0
"""Bound of low_var_kl on either side, against a token whose ratio overflows (slime 624b824a)."""


def compute_kl(
    kind: KlKind, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimate the divergence of each token.

    Args:
        kind: the estimator.
        logprobs: current policy.
        reference_logprobs: frozen reference policy.
        ratio: exp(current - old) for the unbiased form; it multiplies before the clamp of low_var_kl.

    Formula: k1 = x; k2 = x^2 / 2; k3 = exp(-x) - 1 + x; low_var_kl = clamp(k3, -10, 10).

    Source: Schulman 2020, "Approximating KL Divergence" (k1, k2, k3); slime 624b824a `compute_approx_kl`.
    """
    x = logprobs - reference_logprobs
    if kind == "k1":
        value = x
    elif kind == "k2":
        value = x * x / 2
    else:
        value = torch.expm1(-x) + x
    if ratio is not None:
        value = value * ratio
    if kind == "low_var_kl":
        value = value.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return value
