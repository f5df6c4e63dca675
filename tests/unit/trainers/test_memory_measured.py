"""X01 by measurement: the planner's account of a tiny policy against our own trainer and engine.

Byte for byte for parameters, gradients, optimizer, logits and KV; within 10 % for activations, which are counted by
hooks on every tensor that autograd saves.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hotloop.engines.base import EngineSettings
from hotloop.engines.torch.engine import TorchEngine
from hotloop.experiment.backends import TORCH
from hotloop.experiment.catalog.hf_arch import parse_arch
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.memory import PROMPT_TOKENS, compute_memory
from hotloop.experiment.records import MemoryPlan
from hotloop.models.config import parse_config
from hotloop.models.weights import Arena, write_policy
from hotloop.trainers.base import Batch, OptimizerSettings, TrainerSettings
from hotloop.trainers.torch.trainer import TorchTrainer
from hotloop.types import Sample

RESPONSE = 64
ROWS = 2
LENGTH = PROMPT_TOKENS + RESPONSE
VOCAB = 97

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": VOCAB,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
MOE: dict[str, Any] = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
TIED: dict[str, Any] = {**DENSE, "tie_word_embeddings": True}
BIASED: dict[str, Any] = {**DENSE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

POLICIES = {"dense": DENSE, "moe": MOE, "tied": TIED, "biased": BIASED}


def plan_of(config: dict[str, Any]) -> MemoryPlan:
    """The account with the torch record: one process, a microbatch of ROWS rows."""
    catalog = load_catalog()
    base = catalog.models["qwen3-0.6b"]
    recipe = base.recipe._replace(max_tokens_per_gpu=ROWS * LENGTH)
    model = base._replace(id="tiny", arch=parse_arch(config), recipe=recipe)
    tiny: Catalog = catalog._replace(models=MappingProxyType({**catalog.models, "tiny": model}))
    experiment = Experiment(model="tiny", response_tokens=RESPONSE, cpu_adam=False)
    return compute_memory(experiment, tiny, backend=TORCH)


def size_of(plan: MemoryPlan, phase: str, item: str) -> int:
    return sum(row.bytes for row in plan.rows if (row.phase, row.item) == (phase, item))


def write_tiny(directory: Path, config: dict[str, Any]) -> Path:
    source = directory / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arena = Arena(parse_config(config))
    arena.flat.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    write_policy(directory / "policy", parse_config(config), arena, source)
    return directory / "policy"


def open_tiny(directory: Path) -> TorchTrainer:
    torch.set_num_threads(1)
    return TorchTrainer(
        TrainerSettings(policy_dir=str(directory), exact_savings=False, optimizer=OptimizerSettings(lr=1e-4))
    )


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    samples = [
        Sample(
            ids=torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist(),
            mask=[0] * PROMPT_TOKENS + [1] * RESPONSE,
            behaviour_logprobs=[0.0] * PROMPT_TOKENS + [-4.0] * RESPONSE,
            advantages=[0.0] * PROMPT_TOKENS + [1.0 - 2 * index] * RESPONSE,
            rollout_id=index,
            group_id=0,
            oldest_policy_version=0,
        )
        for index in range(ROWS)
    ]
    return Batch(round=0, samples=samples, num_rollouts=ROWS)


def measure_saved_bytes(trainer: TorchTrainer) -> dict[tuple[int, ...], int]:
    """Train one round; return the storage bytes of every tensor that autograd saved, by its shape.

    Storages are counted once. Parameters are not activations.
    """
    parameters = trainer.arena.flat.untyped_storage().data_ptr()
    storages: dict[int, tuple[tuple[int, ...], int]] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != parameters and storage.nbytes():
            alive.append(tensor)
            storages.setdefault(storage.data_ptr(), (tuple(tensor.shape), storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.train_round(make_batch())
    by_shape: dict[tuple[int, ...], int] = {}
    for shape, size in storages.values():
        by_shape[shape] = by_shape.get(shape, 0) + size
    return by_shape


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_x01_parameters_gradients_and_optimizer_equal_the_trainer_to_the_byte(name: str, tmp_path: Path) -> None:
    plan = plan_of(POLICIES[name])
    trainer = open_tiny(write_tiny(tmp_path, POLICIES[name]))
    arena = trainer.arena
    assert arena.grad is not None
    assert size_of(plan, "train", "weights") == arena.flat.nbytes
    assert size_of(plan, "train", "gradients") == arena.grad.nbytes
    trainer.save_optimizer(tmp_path / "optimizer.safetensors")
    state = load_file(tmp_path / "optimizer.safetensors")
    assert size_of(plan, "train", "optimizer") == state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_x01_logits_equal_the_trainer_to_the_byte_and_activations_to_a_tenth(name: str, tmp_path: Path) -> None:
    plan = plan_of(POLICIES[name])
    saved = measure_saved_bytes(open_tiny(write_tiny(tmp_path, POLICIES[name])))
    cells = ROWS * RESPONSE
    logits = saved.pop((cells, VOCAB))
    assert size_of(plan, "train", "logits") == TORCH.logit_copies * logits
    activations = sum(saved.values())
    assert size_of(plan, "train", "activations") == pytest.approx(activations, rel=0.1)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_x01_kv_and_engine_weights_equal_the_engine_to_the_byte(name: str, tmp_path: Path) -> None:
    plan = plan_of(POLICIES[name])
    config = parse_config(POLICIES[name])
    slots, context = 3, 128
    arena = Arena(config)
    engine = TorchEngine(config, arena, EngineSettings(max_slots=slots, max_context=context))
    cache = engine._core._runner.kv.all  # the allocation itself is what is compared
    assert plan.kv_bytes_per_token * slots * context == cache.nbytes
    assert size_of(plan, "rollout", "weights") == arena.flat.nbytes
