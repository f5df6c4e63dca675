"""Shared starts of the fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_harness import Deployment, Trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer with an empty bucket."""
    return Trainer(tmp_path, tmp_path / "bucket")


@pytest.fixture
def deploy(tmp_path: Path, trainer: Trainer) -> Iterator[Callable[..., Deployment]]:
    """Starts deployments of the trainer's bucket, and ends them."""
    started: list[Deployment] = []

    def start(**options: Any) -> Deployment:
        root = tmp_path / f"deployment{len(started)}"
        started.append(Deployment(root, options.pop("bucket", trainer.url), **options))
        return started[-1].start()

    yield start
    for deployment in started:
        deployment.stop()
