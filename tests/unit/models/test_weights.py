"""The arena and Hugging Face directories: layout, round trips, and every way a directory can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotloop.errors import InputError, RunError
from hotloop.models import weights
from hotloop.models.builtin import builtin_config
from hotloop.models.weights import Arena, read_checkpoint_dtypes, read_policy, write_policy


def test_fused_matrices_are_views_on_the_checkpoint_tensors() -> None:
    arena = Arena(builtin_config("moe"))
    at = "model.layers.1."
    arena.view(at + "self_attn.k_proj.weight").fill_(3.0)
    arena.view(at + "mlp.experts.5.up_proj.weight").fill_(7.0)
    arena.view(at + "mlp.experts.5.down_proj.weight").fill_(9.0)
    layer = arena.params.layers[1]
    rows = arena.config.num_heads * arena.config.head_dim
    assert (layer.qkv[rows : rows + 32] == 3.0).all() and layer.qkv.sum() == 3.0 * 32 * 64
    assert (layer.experts_gate_up[5, 64:] == 7.0).all() and layer.experts_gate_up.sum() == 7.0 * 64 * 64
    assert (layer.experts_down[5] == 9.0).all() and layer.experts_down.sum() == 9.0 * 64 * 64


def test_gradients_of_views_accumulate_in_the_flat_buffer() -> None:
    arena = Arena(builtin_config("dense"))
    whole = arena.enable_gradients()
    arena.params.layers[0].qkv.sum().backward()
    assert whole.grad.sum().item() == 128 * 64
    assert arena.grad_view("model.layers.0.self_attn.v_proj.weight").sum().item() == 32 * 64
    arena.grad.zero_()
    arena.params.embed.sum().backward()
    assert whole.grad.sum().item() == 32 * 64


def test_an_optimizer_step_on_the_flat_parameter_moves_the_views() -> None:
    arena = Arena(builtin_config("dense"))
    whole = arena.enable_gradients()
    optimizer = torch.optim.SGD([whole], lr=1.0)
    arena.grad.fill_(2.0)
    optimizer.step()
    assert (arena.params.layers[1].down == -2.0).all()


@pytest.mark.parametrize("kind", hf_models.NATIVE)
def test_a_policy_survives_writing_and_reading_and_opens_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = hf_models.save(kind, tmp_path / "a")
    config, arena = read_policy(tmp_path / "a")
    assert arena.num_params == sum(parameter.numel() for parameter in model.parameters())
    write_policy(tmp_path / "b", config, arena, {"tokenizer.json": b"{}"})
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == b"{}"
    names = set(load_file(tmp_path / "b" / "model.safetensors"))
    assert ("lm_head.weight" in names) is not config.tied_embeddings
    again_config, again = read_policy(tmp_path / "b")
    assert again_config == config
    assert torch.equal(again.flat, arena.flat)
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(reopened(ids).logits, model(ids).logits)


def test_bf16_on_disk_is_read_into_fp32_and_back_without_change(tmp_path: Path) -> None:
    hf_models.save("qwen3", tmp_path / "a")
    config, arena = read_policy(tmp_path / "a")
    write_policy(tmp_path / "b", config, arena, {}, dtype=torch.bfloat16)
    assert set(read_checkpoint_dtypes(tmp_path / "b").values()) == {torch.bfloat16}
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    _, again = read_policy(tmp_path / "b")
    assert torch.equal(again.flat, arena.flat.bfloat16().float())


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    model = hf_models.build("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert torch.equal(read_policy(tmp_path / "one")[1].flat, read_policy(tmp_path / "many")[1].flat)
    shard = sorted((tmp_path / "many").glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(InputError, match=shard.name) as caught:
        read_policy(tmp_path / "many")
    assert caught.value.code == "policy_weights"


def spoil(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, directory / "model.safetensors")


def test_all_wrong_tensors_are_reported_at_once(tmp_path: Path) -> None:
    hf_models.save("qwen3", tmp_path)
    spoil(
        tmp_path,
        {
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2),
            "model.layers.0.mlp.surprise": torch.zeros(1),
        },
    )
    with pytest.raises(InputError) as caught:
        read_policy(tmp_path)
    text = str(caught.value)
    assert len(caught.value.problems) == 3 and {one.code for one in caught.value.problems} == {"policy_weights"}
    assert "model.norm.weight" in text and "[2, 2]" in text and "surprise" in text


def test_a_tied_head_that_was_written_twice_is_ignored(tmp_path: Path) -> None:
    hf_models.save("qwen3", tmp_path)
    before = read_policy(tmp_path)[1].flat
    spoil(tmp_path, {"lm_head.weight": torch.ones(96, 32)})
    assert torch.equal(read_policy(tmp_path)[1].flat, before)


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "policy_not_found"),
        ({"config.json": "{"}, "policy_config"),
        ({"config.json": '{"model_type": "qwen3"}'}, "policy_config"),
        ({"config.json": "CONFIG"}, "policy_weights"),
        ({"config.json": "CONFIG", "pytorch_model.bin": "x"}, "policy_pickle"),
        ({"config.json": "CONFIG", "model.safetensors": "not a header"}, "policy_weights"),
        ({"config.json": "CONFIG", "model.safetensors.index.json": "{}"}, "policy_weights"),
    ],
)
def test_a_directory_that_is_no_policy_gives_one_clear_error(files: dict[str, str], code: str, tmp_path: Path) -> None:
    config = json.dumps(dict(builtin_config("dense").hf))
    for name, text in files.items():
        (tmp_path / name).write_text(config if text == "CONFIG" else text)
    with pytest.raises(InputError) as caught:
        read_policy(tmp_path)
    assert caught.value.code == code
    assert caught.value.exit_code == 2


def test_a_policy_that_does_not_fit_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_models.save("qwen3", tmp_path)
    monkeypatch.setattr(weights, "measure_free_bytes", lambda device="cpu": 1000)
    monkeypatch.setattr(weights, "Arena", lambda *a, **k: pytest.fail("allocated"))
    with pytest.raises(InputError, match="1000 B is free") as caught:
        read_policy(tmp_path)
    assert caught.value.code == "policy_too_large"


def test_free_memory_is_measured() -> None:
    assert 2**20 < weights.measure_free_bytes() < 2**50


def test_a_failed_write_leaves_the_old_directory_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(builtin_config("dense"))
    write_policy(tmp_path / "p", arena.config, arena, {})
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_sync", refuse)
    with pytest.raises(RunError, match="No space left") as caught:
        write_policy(tmp_path / "p", arena.config, arena, {})
    assert caught.value.code == "policy_write_failed"
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert torch.equal(read_policy(tmp_path / "p")[1].flat, arena.flat)
