"""Named starting points of an experiment (L15).

Owns: `PRESETS`, `find_preset`, and one function per preset. A preset is a whole experiment; putting it in place is one
undoable edit of the page.

Promises: `agent` has empty hooks and so stays blocked for export until the user names them. `laptop` is what
`hotloop run` does without a file; its numbers were chosen by measurement on ten seeds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from hotloop.errors import InputError
from hotloop.experiment.choices import Experiment
from hotloop.experiment.sections import Data, ExactReward, Grpo, Laptop, Optimizer, Sampling

LAPTOP_PRESET = "preset laptop"
"""What `hotloop run --explain` calls the origin of its values."""


def make_start_preset() -> Experiment:
    """Return the default experiment: flash, math, colocate, sync, BF16, TIS."""
    return Experiment()


def make_scale_preset() -> Experiment:
    """Return a large run: GLM-5.3, FP8 rollouts, prefill and decode apart, IcePop, separate pools."""
    return Experiment(model="glm5", precision="fp8", layout="separate", pd=True, correction="icepop")


def make_agent_preset() -> Experiment:
    """Return an agent run: custom hooks (still empty), separate, async, persistent queue, partial rollouts, FP8, PD."""
    return Experiment(
        task="custom",
        layout="separate",
        schedule="async",
        straw=True,
        partial=True,
        precision="fp8",
        pd=True,
        hicache=True,
        rollout_gpus=16,
    )


def make_laptop_preset() -> Experiment:
    """Return recipe A of the default task: sort five digits, a dense policy of 0.1 M parameters, 500 rounds of 32 x 16.

    Exported for a cluster it is `qwen2.5-0.5b`.
    """
    return Experiment(
        model="qwen2.5-0.5b",
        correction="none",
        rounds=500,
        response_tokens=128,
        eval_mode="inline",
        eval_interval=50,
        eval_samples=8,
        sampling=Sampling(num_groups=32, group_size=16),
        algorithm=Grpo(eps_clip=0.2, eps_clip_high=0.2, aggregation="per_token"),
        optimizer=Optimizer(
            lr=5e-4,
            lr_decay_style="linear",
            lr_min_frac=0.05,
            lr_warmup_steps=5,
            weight_decay=0.0,
            beta1=0.9,
            beta2=0.98,
            clip_grad=1.0,
        ),
        data=Data(apply_chat_template=False),
        reward=ExactReward(),
        laptop=Laptop(policy="dense", task="sort5"),
    )


PRESETS: dict[str, Callable[[], Experiment]] = {
    "start": make_start_preset,
    "scale": make_scale_preset,
    "agent": make_agent_preset,
    "laptop": make_laptop_preset,
}


def find_preset(name: str) -> Experiment:
    """Return a preset by its name.

    Raises: InputError `unknown_preset`.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        do = f"{hint}Presets: {', '.join(PRESETS)}."
        raise InputError("unknown_preset", "is not a preset", where=f"preset = {name}", do=do)
    return PRESETS[name]()
