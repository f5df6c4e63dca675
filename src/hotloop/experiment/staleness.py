"""X04: how old a sample is predicted to be when it is trained.

Owns: `predict_staleness`, and the knobs that lower it.

Promises: pure; 0 for a sync schedule without partial rollouts, where every token comes from the current version; an
estimate otherwise. Does not do: enforce a bound (the loop does; slime 624b824a has no flag for one).

Formula: age = ceil(latency of a response / round time) + queued rounds. A trainer that is slower than its rollouts
lets finished groups pile up to slime's cap, concurrency x engines groups (loop.md 3.2).
Source: experiment.md X04; algorithms.md 9.
"""

from __future__ import annotations

import math

from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import Layout
from hotloop.experiment.records import Staleness
from hotloop.experiment.throughput import Timings

PARTIAL_OVER_SAMPLING = 16
"""Groups that the export submits for partial rollouts when the file names no number."""


def count_ready_cap(experiment: Experiment, layout: Layout) -> int:
    """Groups that slime's async worker lets pile up: concurrency x engines."""
    return experiment.concurrency * max(1, layout.num_engines)


def _count_queued_rounds(experiment: Experiment, layout: Layout, timings: Timings) -> int:
    if experiment.schedule == "sync" or timings.rollout_s >= timings.train_s:
        return 0
    return count_ready_cap(experiment, layout) // experiment.sampling.num_groups


def predict_staleness(experiment: Experiment, layout: Layout, timings: Timings) -> Staleness:
    """Predict the age of a sample in policy versions.

    Args: experiment: resolved.
    """
    latency, round_s = timings.response_latency_s, timings.round_s
    queued = _count_queued_rounds(experiment, layout, timings)
    if experiment.schedule == "async":
        age = math.ceil(latency / round_s) + queued
        mixed = min(1.0, latency / round_s)
    elif experiment.partial:
        submitted = experiment.sampling.over_sampling or PARTIAL_OVER_SAMPLING
        surplus = max(0, submitted - experiment.sampling.num_groups)
        age = math.ceil(latency / max(timings.rollout_s, 1e-9)) if surplus else 0
        mixed = surplus / submitted
    else:
        age, mixed = 0, 0.0
    return Staleness(experiment.max_staleness, age, latency, round_s, queued, mixed)
