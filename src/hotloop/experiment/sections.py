"""The sections of an experiment file that the export and the loop both read, and the one that only the laptop reads.

Owns: `[sampling] [algorithm] [optimizer] [data] [reward] [export] [laptop]` as frozen pydantic records. Their
defaults are the values that the export always writes, so a file with and without them exports the same bytes.

Promises: validators check and never change another field; rules across fields live in `checks.py`.
Does not do: the flat choices (choices.py), reading files (load.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every record of the experiment file: frozen, unknown keys refused.

    A section's own validator is built when a section is first made by itself, which few commands do; the one of
    `Experiment` holds them all and is built at once (choices.py).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Sampling(Section):
    """How many rollouts a round collects and how their tokens are drawn."""

    num_groups: int = Field(8, ge=1, le=65536)
    """Groups (prompts) collected per round; slime's rollout batch size."""
    group_size: int = Field(8, ge=1, le=4096)
    """Rollouts of one prompt that share a baseline."""
    over_sampling: int | None = Field(None, ge=1, le=65536)
    """Groups submitted at a time while collecting; empty means `num_groups`."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    """-1 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Stop strings, beside the policy's own stop tokens."""
    drop_zero_std: bool = False
    """DAPO's dynamic filter: groups whose rewards are all equal are replaced by fresh ones."""


class _PolicyGradient(Section):
    eps_clip: float = Field(0.2, gt=0)
    eps_clip_high: float = Field(0.28, gt=0)
    """Upper clip width; above `eps_clip` it is clip-higher."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c of the dual clip for negative advantages; empty means off."""
    kl_coef: float = Field(0.0, ge=0)
    """KL in the reward."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """KL in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coef: float = Field(0.0, ge=0)
    normalize_std: bool = True
    """Divide the centred reward by the group's sample standard deviation."""
    aggregation: Literal["per_sample", "per_token"] = "per_sample"
    """per_sample: mean over a rollout's tokens, then over rollouts. per_token: mean over all tokens of the batch."""


class Grpo(_PolicyGradient):
    """Group-relative policy optimisation."""

    kind: Literal["grpo"] = "grpo"


class Gspo(_PolicyGradient):
    """Sequence-level ratios in place of token-level ones."""

    kind: Literal["gspo"] = "gspo"


class Cispo(_PolicyGradient):
    """Clipped, detached importance weights on plain policy gradient."""

    kind: Literal["cispo"] = "cispo"


class ReinforcePlusPlus(_PolicyGradient):
    """Raw rewards with token-level KL and discounted returns."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    normalize_advantages: bool = True
    gamma: float = Field(1.0, gt=0, le=1)


class ReinforcePlusPlusBaseline(_PolicyGradient):
    """Group-mean baseline with token-level KL."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    normalize_advantages: bool = True


Algorithm = Annotated[Grpo | Gspo | Cispo | ReinforcePlusPlus | ReinforcePlusPlusBaseline, Field(discriminator="kind")]


class Optimizer(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_min_frac: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of `lr`."""
    lr_warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""
    steps_per_round: int = Field(1, ge=1)
    """Optimizer steps that one round's batch is split into."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1)
    """Rows of a step are cut into microbatches of at most this many tokens; empty means one microbatch."""


class Data(Section):
    """Where prompts come from and which keys hold what."""

    prompt_key: str = "prompt"
    label_key: str = "label"
    apply_chat_template: bool = True
    shuffle: bool = True
    slice: str = ""
    """Rows `[a:b]` of the file, as in slime's `path@[a:b]`."""
    held_out_path: str = ""
    """JSONL file for the held-out evaluation."""
    held_out_rows: int = Field(0, ge=0)
    """Rows cut from the end of the training file for the held-out evaluation, when there is no `held_out_path`."""


class DeepscalerReward(Section):
    """Math answer after the think-end tag, boxed; slime's `deepscaler`."""

    kind: Literal["deepscaler"] = "deepscaler"


class ExactReward(Section):
    """1 if the response equals the label after trimming white space, else 0."""

    kind: Literal["exact"] = "exact"


class MathReward(Section):
    """1 if the response's answer is mathematically equal to the label."""

    kind: Literal["math"] = "math"


class FormatReward(Section):
    """1 if the whole response matches a regular expression."""

    kind: Literal["format"] = "format"
    pattern: str


class ProgramReward(Section):
    """1 if the program in the response passes the label's tests, run in a child process with limits; no sandbox."""

    kind: Literal["program"] = "program"


class PythonReward(Section):
    """Any Python function `f(task, response) -> float | Score`, sync or async."""

    kind: Literal["python"] = "python"
    function: str
    """Dotted path `module.function`."""


class RemoteReward(Section):
    """An HTTP service that scores `{prompt, response, label}` and answers `{reward}`."""

    kind: Literal["remote"] = "remote"
    url: str


Reward = Annotated[
    DeepscalerReward | ExactReward | MathReward | FormatReward | ProgramReward | PythonReward | RemoteReward,
    Field(discriminator="kind"),
]


class Export(Section):
    """What only the cluster reads."""

    slime_args: tuple[str, ...] = ()
    """Extra flags for slime; refused unless flags.json knows them."""
    publish: str = ""
    """Bucket that the cluster's trainer publishes snapshots into."""


class Laptop(Section):
    """What only `hotloop run` reads."""

    policy: str = ""
    """`dense` or `moe` (built in), or a Hugging Face directory. Empty: this is a cluster experiment."""
    task: str = ""
    """Built-in task: `sort5`, `sort8` (any `sortN`), `addition`, `countdown`. Empty: `data_path`."""
    seed: int = Field(0, ge=0, lt=2**31)
    threads: int = Field(1, ge=1, le=256)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the engine's copy of the weights; the trainer's master weights are fp32."""
    warmup_accuracy: float = Field(0.40, ge=0, le=1)
    """The supervised warm-up of a built-in policy stops at this sampled accuracy; 0 skips the warm-up."""
    warmup_max_steps: int = Field(400, ge=0)
    max_slots: int = Field(512, ge=1)
    """Sequences that the engine decodes at a time."""
    exact_savings: bool = True
    """Compute shared prompts, equal responses and zero-advantage groups once; switched off where not exact."""
    checkpoint_interval: int = Field(100, ge=1)
    """Rounds between checkpoints; the last round is always saved."""
    keep_checkpoints: int = Field(2, ge=1)
    eval_rows: int = Field(512, ge=1)
    """Held-out items evaluated, greedy and sampled."""
    publish: str = ""
    """Bucket that this run publishes its policy versions into; empty: none (`separate`: a folder of the run)."""
    publish_full_every: int = Field(25, ge=1)
    service_url: str = ""
    """Address of the deployment for `layout = external`."""
    replicas: int = Field(1, ge=1, le=64)
    """Replicas that a `separate` run starts."""
    hooks: dict[str, str] = Field(default_factory=dict)
    """Hook name of loop.md section 4 -> dotted path."""


JsonObject = dict[str, Any]
