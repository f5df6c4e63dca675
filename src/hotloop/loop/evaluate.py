"""Held-out accuracy: greedy and sampled, always on the same items with the same seed.

Owns: `Evaluator` and the `eval/` metrics, pass@k included.

Promises: two evaluations of one policy version give the same numbers; evaluation draws its own seeds and never touches
the prompt cursor, so it changes nothing that is trained.
Does not do: deciding when (controller.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotloop.loop.sampling import Sampler
from hotloop.loop.scoring import score_groups
from hotloop.types import Group, Task
from hotloop.verifiers.base import Verifier

EVALUATION_SEED = 20_000
"""Same for every run: a seed of the experiment changes what is trained, never how it is measured."""


@dataclass(slots=True)
class Evaluator:
    """Measures one policy on a fixed list of tasks."""

    sampler: Sampler
    """Its engine and parameters; temperature is set to 0 for the greedy pass."""
    verifier: Verifier
    tasks: Sequence[Task]
    num_samples: int
    """Sampled answers per item."""
    reports_pass_rates: bool = True

    async def evaluate(self) -> dict[str, float]:
        """Return the `eval/` metrics of the weights that the engine has now."""
        greedy = await self._run(temperature=0.0, group_size=1, purpose="eval-greedy")
        sampled = await self._run(
            temperature=self.sampler.params.temperature, group_size=self.num_samples, purpose="eval-sampled"
        )
        metrics = {**_describe("eval/greedy", greedy), **_describe("eval/sampled", sampled)}
        if self.reports_pass_rates:
            metrics.update(compute_pass_rates("eval/sampled", sampled))
        metrics["eval/policy_version"] = self.sampler.engine.policy_version
        return metrics

    async def close(self) -> None:
        """Close engine and verifier of an evaluator that has them for itself."""
        await self.sampler.engine.close()
        await self.verifier.close()

    async def _run(self, *, temperature: float, group_size: int, purpose: str) -> list[Group]:
        sampler = replace(self.sampler, params=replace(self.sampler.params, temperature=temperature))
        sampler.seed = EVALUATION_SEED
        groups = await sampler.sample(self.tasks, first_group_id=0, group_size=group_size, purpose=purpose)
        await score_groups(groups, self.verifier)
        return groups


def _describe(name: str, groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.score is not None]
    if not rollouts:
        return {name: 0.0}
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    return {
        name: statistics.fmean(rollout.score.reward for rollout in rollouts if rollout.score is not None),
        f"{name}-truncated_ratio": sum(rollout.status == "truncated" for rollout in rollouts) / len(rollouts),
        f"{name}/response_len/mean": statistics.fmean(lengths),
    }


def compute_pass_rates(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Compute pass@k for k = 1, 2, 4, ... up to the group size; an answer passes when its reward is 1.

    Formula: mean over items of 1 - C(n - c, k) / C(n, k), with c of n answers right.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    rates: dict[str, float] = {}
    size = min((len(group.rollouts) for group in groups), default=0)
    k = 1
    while k <= size:
        values = []
        for group in groups:
            n = len(group.rollouts)
            right = sum(rollout.score is not None and rollout.score.reward == 1 for rollout in group.rollouts)
            miss = 1.0
            for i in range(k):
                miss *= max(0, n - right - i) / (n - i)
            values.append(1.0 - miss)
        rates[f"{name}-pass@{k}"] = statistics.fmean(values)
        k *= 2
    return rates
