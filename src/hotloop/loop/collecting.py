"""The groups of one round: sampled, scored, filtered, until there are enough.

    source --tasks--> sampler --groups--> scorer --> queue --filter--> batch
                                                        |
                                                        +--> dropped, each with a reason

Owns: `Collector` and the rule of over-sampling: submit some groups at a time, take the good ones in the order
of their ids until the round is full, drop the rest.

Promises: which groups enter a batch depends on rewards and ids, never on which answer came first. After
`MAX_SUBMISSIONS` rejected groups are taken after all, because a solved task would never fill a round.
Does not do: advantages (batching.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hotloop.algorithms.filters import decide_zero_std
from hotloop.errors import RunError
from hotloop.loop.batching import is_usable
from hotloop.loop.queue import RolloutQueue
from hotloop.loop.sampling import Sampler
from hotloop.loop.scoring import score_groups
from hotloop.loop.source import PromptSource
from hotloop.loop.staleness import compute_age, find_oldest_version, is_too_old
from hotloop.loop.stop import StopSignal
from hotloop.types import Group
from hotloop.verifiers.base import Verifier

MAX_SUBMISSIONS = 16


@dataclass(slots=True)
class Collected:
    """What was sampled for one round."""

    groups: list[Group] = field(default_factory=list)
    """Everything, in the order of group ids."""
    batch: list[Group] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    """Group id -> why it is not in the batch."""
    generate_s: float = 0.0
    reward_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, those of dropped groups included."""
        return sum(len(rollout.completion.token_ids) for group in self.groups for rollout in group.rollouts)

    def measure(self) -> dict[str, float]:
        """Return the metrics of collecting."""
        metrics: dict[str, float] = {"rollout/groups_sampled": len(self.groups)}
        for reason in self.dropped.values():
            name = f"rollout/dynamic_filter/drop_{reason}"
            metrics[name] = metrics.get(name, 0) + 1
        metrics["perf/generate_time"] = self.generate_s
        metrics["perf/reward_time"] = self.reward_s
        metrics["perf/tokens_per_gpu_per_sec"] = self.num_tokens / max(1e-9, self.generate_s)
        return metrics


@dataclass(slots=True)
class Collector:
    """Fills one round after the other."""

    source: PromptSource
    sampler: Sampler
    verifier: Verifier
    queue: RolloutQueue
    num_groups: int
    group_size: int
    submission: int
    """Groups submitted at a time."""
    drops_zero_std: bool = False
    max_staleness: int | None = None
    next_group_id: int = 0

    async def collect(self, round_: int, *, trainer_version: int, stop: StopSignal) -> Collected:
        """Sample, score and filter until the round has its groups.

        Raises:
            RunError: `no_usable_rollouts`, and those of `score_groups`.
            Stopped: a stop was asked for.
        """
        found = Collected()
        rejected: list[Group] = []
        for _ in range(MAX_SUBMISSIONS):
            await self._submit(found, stop)
            while len(found.batch) < self.num_groups and (group := self.queue.take()) is not None:
                reason = self._why_drop(group, trainer_version)
                if reason:
                    found.dropped[group.group_id] = reason
                    rejected.append(group)
                else:
                    found.batch.append(group)
            while (group := self.queue.take()) is not None:
                found.dropped[group.group_id] = "surplus"
            if len(found.batch) == self.num_groups:
                break
        for group in rejected[: self.num_groups - len(found.batch)]:
            if found.dropped[group.group_id] != "staleness":
                del found.dropped[group.group_id]
                found.batch.append(group)
        found.batch.sort(key=lambda group: group.group_id)
        if not any(is_usable(rollout) for group in found.batch for rollout in group.rollouts):
            reasons = {rollout.failure for group in found.groups for rollout in group.rollouts if rollout.failure}
            raise RunError(
                "no_usable_rollouts",
                "every rollout of the round failed" + (f" ({sorted(reasons)[0]})" if reasons else ""),
                where=f"round {round_}",
                do="Resume when the engine answers again.",
            )
        return found

    async def _submit(self, found: Collected, stop: StopSignal) -> None:
        began = time.perf_counter()
        tasks = self.source.take(self.submission)
        groups = await stop.guard(
            self.sampler.sample(tasks, first_group_id=self.next_group_id, group_size=self.group_size)
        )
        self.next_group_id += self.submission
        sampled = time.perf_counter()
        await stop.guard(score_groups(groups, self.verifier))
        found.generate_s += sampled - began
        found.reward_s += time.perf_counter() - sampled
        found.groups.extend(groups)
        self.queue.put(groups)

    def _why_drop(self, group: Group, trainer_version: int) -> str:
        """Say why a group does not enter the batch; empty when it does."""
        if self.max_staleness is not None:
            oldest = [find_oldest_version(rollout.completion) for rollout in group.rollouts]
            ages = [compute_age(version, trainer_version) for version in oldest if version is not None]
            if ages and is_too_old(max(ages), self.max_staleness):
                return "staleness"
        if not self.drops_zero_std:
            return ""
        return decide_zero_std([r.score.reward for r in group.rollouts if r.score is not None]).reason
