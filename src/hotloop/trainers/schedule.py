"""The learning rate of each optimizer step.

Owns: warm-up and the three decays. Pure arithmetic on the step number, so that a resumed run continues the same
curve from its step counter alone.
"""

from __future__ import annotations

import math

from hotloop.trainers.base import OptimizerSettings


def compute_lr(settings: OptimizerSettings, step: int) -> float:
    """Compute the learning rate of one step.

    Args:
        settings: peak, warm-up, decay and its horizon.
        step: number of the step about to be taken, from 1.

    Formula: lr x min(1, t / warmup) x (m + (1 - m) x decay(p)), with m = `lr_min_frac`, p = min(1, (t - 1) / total);
        decay is 1 (constant, whatever m), 1 - p (linear) or (1 + cos(pi p)) / 2 (cosine).

    Source: default_task recipe, linear form; cosine: Loshchilov and Hutter 2016, arXiv:1608.03983, equation 5.
    """
    warmup = min(1.0, step / settings.lr_warmup_steps) if settings.lr_warmup_steps else 1.0
    if settings.lr_decay_style == "constant":
        return settings.lr * warmup
    progress = min(1.0, (step - 1) / max(1, settings.total_steps))
    decay = 1.0 - progress if settings.lr_decay_style == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    floor = settings.lr_min_frac
    return settings.lr * warmup * (floor + (1.0 - floor) * decay)
