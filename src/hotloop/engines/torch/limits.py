"""Which sampling parameters the engine can follow exactly.

Owns: the range of every number in `SamplingParams`, checked once, before a request is queued.

Promises: what passes gives a distribution of finite numbers that sums to 1; nothing is rounded to a value that was not
asked for. NaN fails every comparison here, so it is refused everywhere.

Does not do: the prompt, the context, slots (engine.py); the narrower ranges of the wire (service/rollout_request.py).
"""

from __future__ import annotations

import math

from hotloop.engines.base import GenerateRequest

MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0: logits of a few hundred divided by less leave the range in which fp32 tells them apart,
and below about 1e-45 the divisor itself is 0 in fp32. The service refuses the same."""
MAX_BIAS = 1e6
"""Largest logit bias either way: far more than forbids or forces a token, and small enough to keep sums finite."""


def find_bad_params(request: GenerateRequest, vocab_size: int) -> str:
    """Say what is wrong with the numbers of a request, with the range; empty when nothing is."""
    params = request.params
    temperature = float(params.temperature)
    if params.max_new_tokens < 0:
        return f"max_new_tokens = {params.max_new_tokens} is negative"
    if not (temperature == 0.0 or MIN_TEMPERATURE <= temperature < math.inf):
        return (
            f"temperature = {params.temperature} must be 0 (greedy) or a finite number of at least {MIN_TEMPERATURE:g}"
        )
    if not 0 < params.top_p <= 1:
        return f"top_p = {params.top_p} must be above 0 and at most 1"
    if not 0 <= params.min_p <= 1:
        return f"min_p = {params.min_p} must be in 0..1"
    if params.top_k != -1 and not 1 <= params.top_k < math.inf:
        return f"top_k = {params.top_k} must be -1 (all) or at least 1"
    for token, bias in params.logit_bias.items():
        if not 0 <= int(token) < vocab_size:
            return f"logit_bias names token {token}, outside the vocabulary of {vocab_size}"
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            return f"logit_bias of token {token} = {bias} must be from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    if request.top_logprobs < 0:
        return f"top_logprobs = {request.top_logprobs} is negative"
    return ""
