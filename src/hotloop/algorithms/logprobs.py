"""From logits to what the losses eat: the logprob of each chosen token, and the entropy of its distribution.

Owns: the temperature rule (logits are divided by the rollout temperature before both) and the support rule (tokens that
top-p removed while sampling have no probability in the logprob; the entropy is that of the whole distribution).

Promises: float32 inside, whatever the precision of the logits; entropy has a gradient only when asked for.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import torch


def compute_logprobs_and_entropy(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    removed_NV: torch.Tensor | None = None,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logprob of each target and the entropy of each position.

    Args:
        logits_NV: raw logits.
        targets_N: chosen token ids.
        temperature: of the rollout; 0 (greedy) is treated as 1, since a greedy token has no sampling distribution.
        removed_NV: True where the sampler had removed a token; never at a target. None: nothing was removed.
        entropy_gradient: let gradients flow through the entropy.

    Returns:
        logprobs_N (with gradient) and entropy_N, natural logs, float32.

    Formula: logprob = log_softmax(logits / temperature, removed tokens at -inf)[target];
        entropy = -sum_v p_v log p_v with p = softmax(logits / temperature).

    Source: slime 624b824a (temperature and recorded top-p support in the trainer's logprobs).
    """
    scaled_NV = logits_NV.float()
    if temperature not in (0.0, 1.0):
        scaled_NV = scaled_NV / temperature
    all_logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    source_NV = all_logprobs_NV if entropy_gradient else all_logprobs_NV.detach()
    entropy_N = -(source_NV.exp() * source_NV).sum(dim=-1)
    if removed_NV is not None:
        all_logprobs_NV = torch.log_softmax(scaled_NV.masked_fill(removed_NV, float("-inf")), dim=-1)
    logprobs_N = all_logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    return logprobs_N, entropy_N
