"""Policies and trainers that the trainer tests share: made here, never read from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from hotloop.trainers.base import LossSettings, OptimizerSettings, TrainerSettings

MakeTrainer = Callable[..., Any]


@pytest.fixture(scope="session")
def policy_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a directory with a random policy of a kind, made once."""
    import torch

    from hotloop.models.builtin import builtin_config
    from hotloop.models.weights import Arena, write_policy

    made: dict[str, Path] = {}

    def policy(kind: Literal["dense", "moe"] = "dense") -> Path:
        if kind not in made:
            config = builtin_config(kind)
            arena = Arena(config)
            arena.flat.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(3))
            for name in arena.slots:
                if "norm" in name:
                    arena.view(name).fill_(1.0)
            directory = tmp_path_factory.mktemp("policy") / kind
            write_policy(directory, config, arena, {})
            made[kind] = directory
        return made[kind]

    return policy


@pytest.fixture
def make_trainer(policy_dirs: Callable[[str], Path]) -> MakeTrainer:
    """Build a torch trainer on one thread from loss and optimizer settings by name."""
    from hotloop.trainers.torch.trainer import TorchTrainer

    loss_names = set(LossSettings.__dataclass_fields__)
    optimizer_names = set(OptimizerSettings.__dataclass_fields__)

    def make(policy: str = "dense", **settings: Any) -> TorchTrainer:
        loss = {name: settings.pop(name) for name in loss_names & set(settings)}
        optimizer = {name: settings.pop(name) for name in optimizer_names & set(settings)}
        return TorchTrainer(
            TrainerSettings(
                policy_dir=str(policy_dirs(policy)),
                loss=LossSettings(**loss),
                optimizer=OptimizerSettings(**{"lr": 1e-3, **optimizer}),
                **settings,
            )
        )

    return make
