"""The rounds of a run, one after the other, in one process.

    collector --groups--> batch --> trainer --new weights--> weight sync --> engine
        ^                   |          |                                       |
        |             rollout file     +--> checkpoint                         v
        +----------------------- samples with it ----------------------- evaluation

    a round:  collect | train | rollout file | save if due | push | evaluate if due | its line in metrics.jsonl

One task runs the rounds. It consumes prompts and produces the record of a round; it waits for the engine's completions
(unblocked by the last one, or by a stop request) and for asynchronous verifiers. Nothing else runs beside it: trainer
and engine take turns.

Promises: what a round does follows from the seed, the cursor and the weights alone. A checkpoint holds the round's
metrics without what comes after the save (push, evaluation), so a run that is killed in between finishes that round
when it is resumed. A stop request ends the run at the last finished round, saved.
Does not do: building the parts (assembly.py), the arithmetic of resuming (experiment/resume.py).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hotloop.engines.base import Engine
from hotloop.errors import HotloopError
from hotloop.experiment.resume import is_save_due
from hotloop.loop.batching import build_batch, measure_rollouts
from hotloop.loop.checkpoint import LoopState, save_checkpoint
from hotloop.loop.collecting import Collected, Collector
from hotloop.loop.evaluate import Evaluator
from hotloop.loop.progress import Progress
from hotloop.loop.rollout_file import write_rollouts
from hotloop.loop.run_folder import RunFolder, write_json
from hotloop.loop.stop import Stopped, StopSignal
from hotloop.loop.weight_sync import HotLoadSync, PublishingSync, Pushed, WeightSync, make_identity
from hotloop.telemetry.events import EventLog
from hotloop.telemetry.jsonl import JsonLines
from hotloop.telemetry.metrics import read_metrics
from hotloop.trainers.base import Trainer

if TYPE_CHECKING:
    from hotloop.loop.publishing import RunPublisher


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The numbers of an experiment that the rounds themselves need."""

    num_rounds: int
    """Absolute end: the last round is `num_rounds - 1`."""
    seed: int = 0
    normalizes_std: bool = True
    checkpoint_interval: int = 100
    keep_checkpoints: int = 2
    eval_interval: int = 20


@dataclass(slots=True)
class Parts:
    """What the rounds are made of."""

    collector: Collector
    trainer: Trainer
    engine: Engine
    sync: WeightSync
    evaluator: Evaluator | None
    """None: the run is not evaluated."""
    progress: Progress
    publisher: RunPublisher | None = None
    """Set when the run publishes its versions into a bucket, after they are in the engine."""
    hot_load: Callable[[str, int], Awaitable[None]] | None = None
    """Set when the sampler is a deployment: moves it to a published identity and version."""


class Controller:
    """Runs the rounds of one run."""

    def __init__(
        self, settings: LoopSettings, parts: Parts, folder: RunFolder, *, state: LoopState | None, began: float
    ) -> None:
        """Prepare.

        Args:
            state: of the checkpoint to continue from, its weights and cursor already restored; None for a fresh run.
            began: reading of `time.perf_counter` that the run's wall time counts from.
        """
        self._settings = settings
        self._parts = parts
        self._folder = folder
        self._state = state
        self._began = began
        self._wall_before_s = state.wall_s if state else 0.0
        self._version = state.policy_version if state else 0
        self._sync = parts.sync
        if parts.publisher is not None:
            self._sync = PublishingSync(parts.sync, parts.trainer, parts.publisher.publish, self._note_published)
            if parts.hot_load is not None:
                self._sync = HotLoadSync(self._sync, parts.hot_load)
            if state is not None:
                self._version = parts.publisher.next_version(state.policy_version)
        self._before: dict[str, float] = dict(state.evaluation_before) if state else {}
        self._after: dict[str, float] = {}
        self.stop = StopSignal()
        """Request it to end the run at the last finished round."""

    async def run(self) -> bool:
        """Run the rounds that are left and write the summary.

        Returns: False when a stop request ended the run before its last round.

        Raises:
            HotloopError: whatever ended the run; earlier checkpoints stay.
        """
        self._metrics, self._events = JsonLines(self._folder.metrics), EventLog(self._folder.events)
        try:
            return await self._run()
        except HotloopError as error:
            self._events.record("failed", code=error.code, message=str(error))
            raise
        finally:
            self._metrics.close()
            self._events.close()
            await self._parts.engine.close()
            await self._parts.collector.verifier.close()
            self._parts.trainer.close()

    async def _run(self) -> bool:
        settings = self._settings
        first = self._state.round + 1 if self._state else 0
        self._events.record("resumed" if self._state else "started", round=first, num_rounds=settings.num_rounds)
        try:
            await self._push({})
            if self._state is not None:
                await self._finish_interrupted_round(self._state)
            else:
                self._before = self._after = await self._evaluate(-1)
            for round_ in range(first, settings.num_rounds):
                await self._run_round(round_)
                if self.stop.is_requested:
                    raise Stopped
        except Stopped:
            if self._state is not None:
                self._save(self._state)
            self._events.record("interrupted", round=self._state.round if self._state else -1)
            return False
        write_json(self._folder.summary, self._summarize())
        self._events.record("finished", round=settings.num_rounds - 1)
        return True

    async def _run_round(self, round_: int) -> None:
        """One round, from prompts to its line in metrics.jsonl."""
        parts, settings = self._parts, self._settings
        began = time.perf_counter()
        collected = await parts.collector.collect(round_, trainer_version=self._version, stop=self.stop)
        sampled = time.perf_counter()
        built = build_batch(round_, collected.batch, normalize_std=settings.normalizes_std)
        record: dict[str, Any] = {"round": round_, "policy_version": self._version + 1}
        record.update(measure_rollouts(collected.batch, built, trainer_version=self._version))
        record.update(collected.measure())
        laid_out = time.perf_counter()
        record.update(parts.trainer.train_round(built.batch))
        trained = time.perf_counter()
        self._version += 1
        path, given = self._folder.rollout_file(round_), parts.trainer.round_logprobs()
        write_rollouts(path, collected.groups, built.advantages, collected.dropped, given)
        written = time.perf_counter()
        trained_tokens = sum(len(sample.ids) for sample in built.batch.samples)
        record["perf/rollout_time"] = sampled - began
        record["perf/data_time"] = laid_out - sampled
        record["perf/train_time"] = trained - laid_out
        record["perf/record_time"] = written - trained
        record["perf/actor_train_tok_per_s"] = trained_tokens / max(1e-9, trained - laid_out)
        record["perf/step_time"] = written - began  # without what follows, should the run die in it
        self._state = self._next_state(record, collected, trained_tokens)
        if is_save_due(round_, interval=settings.checkpoint_interval, num_rounds=settings.num_rounds):
            self._save(self._state)
            record["perf/save_time"] = time.perf_counter() - written
        await self._push(record)
        await self._finish_round(round_, record)
        record["perf/step_time"] = time.perf_counter() - began
        self._metrics.append(record)
        parts.progress.round_done(record)

    def _next_state(self, record: dict[str, Any], collected: Collected, trained_tokens: int) -> LoopState:
        """What a checkpoint of this moment would remember."""
        before, collector = self._state, self._parts.collector
        return LoopState(
            round=record["round"],
            policy_version=self._version,
            seed=self._settings.seed,
            cursor=collector.source.state(),
            next_group_id=collector.next_group_id,
            evaluation_before=self._before,
            record=record,
            published_identity=make_identity(self._version) if self._parts.publisher else "",
            sampled_tokens=(before.sampled_tokens if before else 0) + collected.num_tokens,
            sampling_s=(before.sampling_s if before else 0.0) + collected.generate_s,
            trained_tokens=(before.trained_tokens if before else 0) + trained_tokens,
            training_s=(before.training_s if before else 0.0) + record["perf/train_time"],
        )

    async def _push(self, record: dict[str, Any]) -> None:
        began = time.perf_counter()
        record.update(await self._sync.push(self._version))
        record["perf/update_weights_time"] = time.perf_counter() - began

    async def _evaluate(self, round_: int) -> dict[str, float]:
        if self._parts.evaluator is None:
            return {}
        metrics = await self.stop.guard(self._parts.evaluator.evaluate())
        self._events.record("evaluated", round=round_, **metrics)
        self._parts.progress.evaluated(round_, metrics)
        return metrics

    async def _finish_round(self, round_: int, record: dict[str, Any]) -> None:
        """Evaluate if it is due: what comes after the save and the push."""
        is_last = round_ == self._settings.num_rounds - 1
        if self._parts.evaluator is None or not (is_last or (round_ + 1) % self._settings.eval_interval == 0):
            return
        began = time.perf_counter()
        self._after = await self._evaluate(round_)
        record.update(self._after)
        record["perf/eval_time"] = time.perf_counter() - began

    async def _finish_interrupted_round(self, state: LoopState) -> None:
        """After a resume: write the round's line if the run died between its save and that line."""
        written = read_metrics(self._folder.metrics)
        if written and written[-1]["round"] == state.round:
            evaluated = [record for record in written if "eval/greedy" in record]
            self._after = evaluated[-1] if evaluated else self._before
            return
        record = dict(state.record)
        await self._finish_round(state.round, record)
        self._metrics.append(record)

    def _save(self, state: LoopState) -> None:
        self._metrics.sync()
        state = replace(state, wall_s=self._wall_s())
        path = save_checkpoint(self._folder, state, self._parts.trainer, keep=self._settings.keep_checkpoints)
        self._events.record("saved", round=state.round, path=path.name)
        self._parts.progress.saved(state.round, path)

    def _note_published(self, policy_version: int, pushed: Pushed) -> None:
        self._events.record(
            "published",
            policy_version=policy_version,
            identity=pushed.identity,
            kind=pushed.kind,
            stored_bytes=pushed.stored_bytes,
        )

    def _wall_s(self) -> float:
        return self._wall_before_s + time.perf_counter() - self._began

    def _summarize(self) -> Mapping[str, Any]:
        state = self._state
        rss_unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
        return {
            "eval_greedy_before": self._before.get("eval/greedy"),
            "eval_greedy_after": self._after.get("eval/greedy"),
            "eval_sampled_before": self._before.get("eval/sampled"),
            "eval_sampled_after": self._after.get("eval/sampled"),
            "rounds": state.round + 1 if state else 0,
            "wall_s": self._wall_s(),
            "sampling_tokens_per_s": state.sampled_tokens / max(1e-9, state.sampling_s) if state else 0.0,
            "train_tokens_per_s": state.trained_tokens / max(1e-9, state.training_s) if state else 0.0,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * rss_unit,
            "policy_version": self._version,
        }
