"""The catalogue is data: every fact has a source, a TOML table is a model, and a config.json becomes a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotloop.errors import InputError
from hotloop.experiment.catalog.hf_arch import parse_arch
from hotloop.experiment.catalog.load import find_gpu, find_model, load_catalog, parse_catalog
from hotloop.experiment.catalog.propose import propose_entry, propose_recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.parameters import count_active_params
from hotloop.experiment.plan import build_plan

CATALOG = load_catalog()

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "tie_word_embeddings": False,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
QWEN_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
    "tie_word_embeddings": False, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def test_the_catalogue_has_all_models_and_gpus() -> None:
    assert len(CATALOG.models) == 19
    assert len(CATALOG.gpus) == 17
    lab = [model.id for model in CATALOG.models.values() if model.in_lab]
    assert lab == ["flash", "dense", "glm47", "glm5", "deepseek", "qwen38"]


def test_every_table_names_its_source() -> None:
    for model in CATALOG.models.values():
        assert model.source and model.recipe.source and model.convert.source and model.hf_repo
        assert model.script_recipe is None or model.script_recipe.source
    assert all(gpu.source and gpu.memory_bytes > 0 for gpu in CATALOG.gpus.values())
    assert CATALOG.images["source"] and CATALOG.data["source"]


@pytest.mark.parametrize("model", sorted(CATALOG.models))
def test_active_parameters_are_those_of_the_dimensions(model: str) -> None:
    arch = CATALOG.models[model].arch
    assert count_active_params(arch) == arch.params_active


def test_index_layers_of_glm5_are_the_21_of_its_note() -> None:
    layers = CATALOG.models["glm5"].arch.index_layers
    assert layers[:5] == (1, 2, 3, 7, 11) and layers[-1] == 75 and len(layers) == 21


def test_fp8_and_blackwell_are_facts_of_the_gpu() -> None:
    assert not CATALOG.gpus["a100-80"].has_fp8 and not CATALOG.gpus["a100-40"].has_fp8
    assert CATALOG.gpus["h100"].has_fp8
    blackwell = {gpu.id for gpu in CATALOG.gpus.values() if gpu.is_blackwell}
    assert blackwell == {"b200", "b200-180", "gb200", "b300", "gb10"}


def test_adding_a_model_is_adding_a_table(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(propose_entry("mine-8b", QWEN3_8B, "me/Mine-8B", "scripts/models/mine.sh"), encoding="utf-8")
    catalog = load_catalog([table])
    assert "mine-8b" in catalog.models and "mine-8b" not in load_catalog().models
    plan = build_plan(Experiment(model="mine-8b"), catalog=catalog)
    assert plan.errors == ()
    assert plan.resolved.hf_path == "/data/models/Mine-8B"
    assert plan.layout.stages[0].num_layers == 36


def test_a_model_without_a_script_can_only_be_served(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(propose_entry("mine-8b", QWEN3_8B, "me/Mine-8B"), encoding="utf-8")
    plan = build_plan(Experiment(model="mine-8b"), catalog=load_catalog([table]))
    assert [error.code for error in plan.errors] == ["rollout_only"]


def test_a_further_file_may_replace_a_gpu(tmp_path: Path) -> None:
    table = tmp_path / "gpu.toml"
    gpu = CATALOG.gpus["h100"]._replace(memory_bytes=40 * 10**9)
    lines = [f'{name} = {str(v).lower() if isinstance(v, bool) else repr(v)}'
             for name, v in gpu._asdict().items() if name != "id" and v != ""]  # fmt: skip
    table.write_text("[gpus.h100]\n" + "\n".join(lines).replace("'", '"') + "\n", encoding="utf-8")
    plan = build_plan(Experiment(), catalog=load_catalog([table]))
    assert plan.memory_plan.total("train").capacity_bytes == 40 * 10**9
    assert load_catalog().gpus["h100"].memory_bytes == 85_520_809_984


@pytest.mark.parametrize(
    ("config", "model"), [(QWEN3_8B, "qwen3-8b"), (DEEPSEEK, "deepseek"), (QWEN_NEXT, "qwen3-next-80b-a3b")]
)
def test_a_config_gives_the_dimensions_that_the_catalogue_has(config: dict[str, Any], model: str) -> None:
    ours, known = parse_arch(config), CATALOG.models[model].arch
    assert (ours.params_total, ours.params_active, ours.params_expert) == (
        known.params_total, known.params_active, known.params_expert,
    )  # fmt: skip
    assert ours.kv_bytes_per_token_bf16 == known.kv_bytes_per_token_bf16
    assert (ours.attention, ours.linear_layers, ours.gdn_state_values_per_layer) == (
        known.attention, known.linear_layers, known.gdn_state_values_per_layer,
    )  # fmt: skip


def test_a_proposed_entry_reads_back_as_what_was_written() -> None:
    catalog = parse_catalog({"x": propose_entry("r1", DEEPSEEK, "deepseek-ai/DeepSeek-R1")}, CATALOG)
    model = catalog.models["r1"]
    assert model.arch == parse_arch(DEEPSEEK)
    assert model.recipe._replace(extra={}) == propose_recipe(model.arch)._replace(extra={})
    assert (model.published_precision, model.has_mtp) == ("fp8", True)


@pytest.mark.parametrize("model", sorted(CATALOG.models))
def test_proposed_sizes_divide_and_fit(model: str) -> None:
    known = CATALOG.models[model]
    recipe = propose_recipe(known.arch)
    catalog = CATALOG._replace(models={**CATALOG.models, model: known._replace(recipe=recipe, rollout_only=False)})
    plan = build_plan(Experiment(model=model, nodes=recipe.nodes, cpu_adam=True, response_tokens=2048), catalog=catalog)
    codes = {error.code for error in plan.errors}
    assert not codes & {"train_grid", "expert_grid", "engine_multiple", "memory"}
    if not known.arch.index_layers:
        assert "stage_layers" not in codes


def test_a_config_without_a_dimension_names_it() -> None:
    config = {key: value for key, value in QWEN3_8B.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(InputError) as caught:
        parse_arch(config)
    assert caught.value.code == "config_unsupported"
    assert {problem.where for problem in caught.value.problems} == {
        "config.json: hidden_size", "config.json: vocab_size",
    }  # fmt: skip


def test_a_config_with_layers_that_no_formula_covers_is_refused() -> None:
    with pytest.raises(InputError, match="mamba"):
        parse_arch({**QWEN3_8B, "layer_types": ["mamba", "full_attention"]})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[models.x]\nlabel = "X"\n[models.x.arch]\nlayer = 3\n', 'models."x".arch.layer'),
        ('[gpus.x]\nlabel = "X"\nmemory = 1\n', 'gpus."x".memory'),
        ("[gpus.x]\nlabel = 3\n", 'gpus."x".label'),
    ],
)
def test_a_misspelt_fact_is_an_error_that_names_it(text: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_catalog({"f.toml": text}, CATALOG)
    assert caught.value.code == "catalog_entry"
    assert any(where in problem.where for problem in caught.value.problems)


def test_a_file_that_is_absent_or_no_toml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="catalog_entry"):
        load_catalog([tmp_path / "none.toml"])
    bad = tmp_path / "bad.toml"
    bad.write_text("[models", encoding="utf-8")
    with pytest.raises(InputError, match="not TOML"):
        load_catalog([bad])


def test_an_unknown_model_or_gpu_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown_model.*Did you mean qwen3-8b"):
        find_model(CATALOG, "qwen3-8")
    with pytest.raises(InputError, match=r"unknown_gpu.*Did you mean h100"):
        find_gpu(CATALOG, "h10")
    with pytest.raises(InputError, match="unknown_model"):
        build_plan(Experiment(model="gpt"))


def test_a_name_that_is_no_name_is_refused() -> None:
    with pytest.raises(InputError, match="catalog_entry"):
        propose_entry('x"]\n[evil', QWEN3_8B, "me/x")


def test_text_of_a_repository_name_cannot_break_the_table() -> None:
    text = propose_entry("x", QWEN3_8B, 'me/"]\n[models.evil]\nlabel = "')
    assert set(parse_catalog({"x": text}, CATALOG).models) - set(CATALOG.models) == {"x"}
