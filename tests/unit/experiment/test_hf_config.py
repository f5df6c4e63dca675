"""The row of 4.2 on a checkpoint's config.json: each value that slime compares, and the neighbour that agrees."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.hf_config import check_hf_config

DENSE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "intermediate_size": 13696,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
}


def findings(config: dict[str, Any], model: str) -> list[str]:
    return [finding.message for finding in check_hf_config(config, find_model(load_catalog(), model))]


def test_a_config_that_agrees_has_no_finding() -> None:
    assert findings(DENSE, "dense") == []
    assert findings(DEEPSEEK, "deepseek") == []


@pytest.mark.parametrize("name", sorted(DENSE))
def test_each_value_of_a_dense_model_is_compared(name: str) -> None:
    value = DENSE[name]
    (message,) = findings({**DENSE, name: not value if isinstance(value, bool) else value * 2}, "dense")
    assert f"config.json: {name}" in message
    assert "[hf_config]" in message


@pytest.mark.parametrize(("name", "value"), [("moe_intermediate_size", 1024), ("n_shared_experts", 2)])
def test_expert_sizes_are_compared(name: str, value: int) -> None:
    assert findings({**DEEPSEEK, name: value}, "deepseek")


def test_the_ffn_is_not_compared_where_no_layer_is_dense() -> None:
    config = {"hidden_size": 2048, "intermediate_size": 1, "moe_intermediate_size": 768}
    assert findings(config, "qwen3-30b-a3b") == []


def test_rope_parameters_and_a_nested_text_config_are_read() -> None:
    nested = {"text_config": {**DENSE, "rope_theta": 1, "rope_parameters": {"rope_theta": 10000}}}
    assert findings(nested, "dense") == []
    nested["text_config"]["rope_parameters"] = {"rope_theta": 1}
    assert len(findings(nested, "dense")) == 1


def test_values_that_a_config_leaves_out_are_not_compared() -> None:
    assert findings({"hidden_size": DENSE["hidden_size"]}, "dense") == []
    assert len(findings({"hidden_size": 1}, "dense")) == 1


def test_a_config_with_nothing_to_compare_does_not_count_as_agreeing() -> None:
    for config in ({}, {"model_type": "qwen3"}, {"text_config": {}}):
        assert len(findings(config, "dense")) == 1
