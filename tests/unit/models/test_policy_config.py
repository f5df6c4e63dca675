"""Which configs the lean decoder accepts, and why it refuses others."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError
from hotloop.models.config import iter_slots, parse_config

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 12,
}


def test_numbers_are_read_and_the_parameter_count_follows() -> None:
    config = parse_config({**QWEN3, "tie_word_embeddings": True})
    count = sum(rows * (rest[0] if rest else 1) for _, (rows, *rest) in iter_slots(config))
    # embedding 80; a layer: 2 norms 16, q 24x8, k and v 12x8 each, 2 head norms 12, o 8x24, mlp 3x96; final norm 8
    assert count == 80 + 4 * (16 + 192 + 192 + 12 + 192 + 288) + 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"use_sliding_window": True, "sliding_window": 4}, "sliding"),
        ({"layer_types": ["sliding_attention"]}, "sliding"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_the_decoder_would_get_wrong_is_not_native(change: dict[str, object], reason: str) -> None:
    assert parse_config(QWEN3).is_native
    config = parse_config({**QWEN3, **change})
    assert not config.is_native
    assert reason in config.unsupported


def test_an_unused_sliding_window_is_fine() -> None:
    assert parse_config({**QWEN3, "use_sliding_window": False, "sliding_window": 4096}).is_native


def test_mixture_layers_follow_step_and_exceptions() -> None:
    moe = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3}
    config = parse_config({**moe, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [config.is_moe_layer(layer) for layer in range(4)] == [False, True, False, False]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="not a multiple") as caught:
        parse_config({**QWEN3, "num_key_value_heads": 3})
    assert caught.value.code == "policy_config"


def test_rope_scaling_is_read_when_both_spellings_are_there() -> None:
    """transformers lets `rope_scaling` win too; `rope_parameters` then still names the base."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    }
    rope = parse_config({**QWEN3, **both}).rope
    assert (rope.kind, rope.factor, rope.base) == ("linear", 3.0, 500_000.0)
    yarn = parse_config({**QWEN3, **both, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert not yarn.is_native and "yarn" in yarn.unsupported


def test_a_rope_section_that_is_no_object_is_refused() -> None:
    with pytest.raises(InputError, match="rope_scaling") as caught:
        parse_config({**QWEN3, "rope_scaling": [1]})
    assert caught.value.code == "policy_config"
