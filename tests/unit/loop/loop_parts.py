"""A whole loop without torch: the shipped fake engine and trainer, the trainer giving what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engines.fake import TABLE, FakeEngine
from hotloop.loop.checkpoint import LoopState
from hotloop.loop.collecting import Collector
from hotloop.loop.controller import Controller, LoopSettings, Parts
from hotloop.loop.evaluate import Evaluator
from hotloop.loop.progress import SilentProgress
from hotloop.loop.queue import InMemoryQueue
from hotloop.loop.run_folder import RunFolder
from hotloop.loop.sampling import Sampler
from hotloop.loop.source import DrawSource
from hotloop.loop.weight_sync import InMemorySync
from hotloop.models.tokenizer import EOS_ID, char_tokenizer
from hotloop.trainers.base import OptimizerSettings, TrainerSettings
from hotloop.trainers.fake import WEIGHT_NAME, FakeTrainer
from hotloop.types import Rollout, SamplingParams, Score, Task
from hotloop.verifiers.base import Judgement, Verifier

VOCAB = 32
TASKS = [Task(f"t{digit}", f"s{digit}=", str(digit)) for digit in range(8)]


class TableTrainer(FakeTrainer):
    """Gives its one row of logits as the engine's table, the same after every token."""

    def weights(self) -> Mapping[str, Any]:
        row = super().weights()[WEIGHT_NAME]
        return {TABLE: np.tile(row.astype(np.float32), (VOCAB, 1))}


class DigitJudge:
    """Share of the response that is the label's digit; counts what it was asked."""

    name = "digit"

    def __init__(self) -> None:
        self.asked = 0

    def judge(self, rollout: Rollout) -> Judgement:
        self.asked += 1
        return Score(rollout.response.count("7") / 4, "sevens")

    async def close(self) -> None: ...


def make_sampler(engine: FakeEngine | None = None, *, seed: int = 0, **params: Any) -> Sampler:
    settings = SamplingParams(**({"max_new_tokens": 4, "stop_token_ids": (EOS_ID,)} | params))
    return Sampler(engine or FakeEngine(vocab_size=VOCAB), char_tokenizer(), settings, seed, 64)


def make_collector(sampler: Sampler, verifier: Verifier, **changes: Any) -> Collector:
    values: dict[str, Any] = {"num_groups": 4, "group_size": 4, "submission": 4} | changes
    return Collector(DrawSource(TASKS, sampler.seed), sampler, verifier, InMemoryQueue(), **values)


def make_trainer(lr: float = 0.05) -> TableTrainer:
    return TableTrainer(TrainerSettings(kind="fake", optimizer=OptimizerSettings(lr=lr, weight_decay=0.0)))


def make_controller(
    root: Path,
    *,
    rounds: int = 6,
    state: tuple[LoopState, Path] | None = None,
    trainer: TableTrainer | None = None,
    progress: Any = None,
    held_out: Sequence[Task] = TASKS[:2],
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Controller:
    """Build a run in a folder, fresh or from a checkpoint."""
    folder = RunFolder(root) if (root / "rollouts").is_dir() else RunFolder.create(root)
    sampler = make_sampler()
    verifier = changes.pop("verifier", None) or DigitJudge()
    collector = make_collector(sampler, verifier, **changes)
    trainer = trainer or make_trainer()
    if state is not None:
        trainer.load(state[1])
        collector.source.restore(state[0].cursor)
        collector.next_group_id = state[0].next_group_id
    engine = sampler.engine
    parts = Parts(
        collector,
        trainer,
        engine,
        InMemorySync(trainer, engine),
        Evaluator(sampler, verifier, held_out, 2) if held_out else None,
        progress or SilentProgress(),
    )
    numbers = {"num_rounds": rounds, "checkpoint_interval": 2, "eval_interval": 3, **(settings or {})}
    return Controller(LoopSettings(**numbers), parts, folder, state=state[0] if state else None, began=0.0)
