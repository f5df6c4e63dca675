"""Which trainer a name means; implementations are imported when they are built, so that this module needs no torch."""

from __future__ import annotations

import importlib.util

from hotloop.errors import MissingExtra
from hotloop.trainers.base import Trainer, TrainerSettings


def build(settings: TrainerSettings) -> Trainer:
    """Build the trainer that the settings name.

    Raises:
        MissingExtra: kind `torch` without torch.
        InputError: the policy directory is not usable.
    """
    if settings.kind == "fake":
        from hotloop.trainers.fake import FakeTrainer

        return FakeTrainer(settings)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the torch trainer", "torch", "torch")
    from hotloop.trainers.torch.trainer import TorchTrainer

    return TorchTrainer(settings)
