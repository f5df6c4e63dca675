"""A real deployment of the small built-in policy, for tests that ask over HTTP."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "fault"))
from deployment_harness import Deployment, Trainer

from hotloop.models.builtin import make_policy

Change = Callable[[np.random.Generator, Any], Any]


def nudge(rng: np.random.Generator, values: Any) -> Any:
    """Change about a twentieth of a tensor by a few hundredths."""
    moved = values + rng.normal(0, 0.05, values.shape).astype(np.float32)
    return np.where(rng.random(values.shape) < 0.05, moved, values)


@dataclass
class PolicyTrainer(Trainer):
    """Publishes changed versions of one built-in policy: step000001 is an anchor, the rest deltas."""

    kind: Any = "dense"
    change: Change = nudge

    def directory(self, version: int) -> Path:
        """The checkpoint of a version."""
        return self.root / "policies" / f"step{version:06d}"

    def publish_policy(self) -> str:
        """Publish the next version and return its identity; the first is named for start-up."""
        self.version += 1
        target = self.directory(self.version)
        if self.version == 1:
            make_policy(target, kind=self.kind, warmup_max_steps=0, cache=self.root / "made")
        else:
            shutil.copytree(self.directory(self.version - 1), target)
            rng = np.random.default_rng(self.version)
            tensors = {name: self.change(rng, value) for name, value in load_file(target / "model.safetensors").items()}
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        self.publisher.publish(target, target.name, self.version)
        if self.version == 1:
            self.publisher.set_startup(target.name)
        return target.name


def start_policy(trainer: PolicyTrainer, root: Path, **config: Any) -> Deployment:
    """Publish the first version and serve it with the torch engine."""
    identity = trainer.publish_policy()
    engine = {"kind": "torch", "prefix_cache_tokens": 4096, **config.pop("engine", {})}
    deployment = Deployment(root, trainer.url, config={"engine": engine, **config}).start()
    deployment.wait_ready(identity)
    return deployment
