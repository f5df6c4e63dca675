"""Every choice of an experiment: the one schema of the page, the planner, the export and the run.

Owns: `Experiment`, schema 1: the flat choices and the sections. A choice of `None` follows the model's recipe
(`catalog/`), so changing the model resets it; `resolve` in this package fills it in.

Promises: frozen; unknown keys refused; keys are snake_case (load.py also reads camelCase). Validators check one field;
rules across fields are `checks.py`, dependency rules are `apply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from hotloop.experiment.sections import (
    Algorithm,
    Data,
    DeepscalerReward,
    Export,
    Grpo,
    Laptop,
    Optimizer,
    Reward,
    Sampling,
    Section,
)

SCHEMA = 1
MAX_TEXT = 2048
NUL_FAULT: Final = "nul_character"
"""Type of the validation error for NUL in any text."""


class Experiment(Section):
    """One experiment. The first value of each choice is its default."""

    slime_target: Literal["v0.4.0", "624b824a"] = "v0.4.0"
    model: str = "flash"
    task: Literal["math", "custom"] = "math"
    generate_hook: str = Field("", max_length=MAX_TEXT)
    reward_hook: str = Field("", max_length=MAX_TEXT)
    layout: Literal["colocate", "separate", "external"] = "colocate"
    external_addrs: str = Field("", max_length=MAX_TEXT)
    schedule: Literal["sync", "async"] = "sync"
    nodes: int | None = Field(None, ge=1, le=512)
    rollout_gpus: int | None = Field(None, ge=1, le=8192)
    precision: Literal["bf16", "fp8", "fp8train", "int4"] | None = None
    kv_dtype: Literal["auto", "fp8"] | None = None
    ssm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    ssm_ratio: float | None = None
    correction: Literal["tis", "none", "icepop"] = "tis"
    r3: bool = False
    sc: bool = False
    deterministic: bool = False
    pd: bool = False
    prefill_gpus: int | None = Field(None, ge=1, le=8192)
    rdma_device: str = Field("", max_length=MAX_TEXT)
    hicache: bool = False
    eagle: Literal["off", "builtin", "external"] = "off"
    eagle_steps: int | None = Field(None, ge=1, le=8)
    draft_path: str = Field("", max_length=MAX_TEXT)
    transport: Literal["nccl", "disk", "delta"] = "nccl"
    weight_dir: str = Field("", max_length=MAX_TEXT)
    local_weight_dir: str = Field("", max_length=MAX_TEXT)
    straw: bool = False
    straw_dir: str = Field("", max_length=MAX_TEXT)
    straw_run_id: str = Field("", max_length=MAX_TEXT)
    straw_declaration: str = Field("", max_length=MAX_TEXT)
    partial: bool = False
    mask_prefix: bool = False
    cpu_adam: bool | None = None
    recompute: bool = True
    concurrency: int = Field(128, ge=1, le=8192)
    response_tokens: int = Field(4096, ge=1, le=131072)
    rounds: int = Field(3, ge=0, le=100000)
    hf_path: str | None = Field(None, max_length=MAX_TEXT)
    train_path: str | None = Field(None, max_length=MAX_TEXT)
    data_path: str | None = Field(None, max_length=MAX_TEXT)
    save_path: str | None = Field(None, max_length=MAX_TEXT)
    megatron_path: str | None = Field(None, max_length=MAX_TEXT)
    image: Literal["cuda", "rocm", "gb10"] = "cuda"
    gpu: str = "h100"
    max_staleness: int | None = Field(None, ge=0)
    eval_mode: Literal["off", "inline", "side"] = "off"
    eval_data: str = Field("", max_length=MAX_TEXT)
    eval_interval: int = Field(20, ge=1)
    eval_samples: int = Field(8, ge=1)
    resume_from: str = Field("", max_length=MAX_TEXT)
    rounds_more: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _refuse_nul(cls, values: Any) -> Any:
        """No path, address or name can hold NUL: the system's calls end at it, and a script cannot carry it."""
        waiting = [("", values)]
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, str) and "\0" in value:
                raise PydanticCustomError(NUL_FAULT, "{path} must not hold a NUL character", {"path": path})
            if isinstance(value, Mapping):
                waiting.extend((f"{path}.{key}" if path else str(key), inner) for key, inner in value.items())
                waiting.extend((path or "key", key) for key in value if isinstance(key, str) and "\0" in key)
            elif isinstance(value, list | tuple):
                waiting.extend((path, inner) for inner in value)
        return values

    sampling: Sampling = Sampling.model_construct()
    algorithm: Algorithm = Grpo.model_construct()
    optimizer: Optimizer = Optimizer.model_construct()
    data: Data = Data.model_construct()
    reward: Reward = DeepscalerReward.model_construct()
    export: Export = Export.model_construct()
    laptop: Laptop = Laptop.model_construct()


Experiment.model_rebuild()
