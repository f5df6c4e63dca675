"""The preset `laptop`: what `hotloop run` does without a file.

Owns: recipe A of the default task: sort five digits, a built-in dense policy of 0.1 M parameters, 500 rounds of 32 x
16 rollouts. Its numbers were chosen by measurement on ten seeds; exported for a cluster it is `qwen2.5-0.5b`.
Does not do: the other presets (presets.py).
"""

from __future__ import annotations

from hotloop.experiment.choices import Experiment
from hotloop.experiment.sections import Data, ExactReward, Grpo, Laptop, Optimizer, Sampling

LAPTOP_PRESET = "preset laptop"


def make_laptop_preset() -> Experiment:
    """Return the experiment; every choice not named here has the schema's default."""
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
