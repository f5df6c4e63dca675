"""The lean decoder against transformers: logits, gradients, padding, branching off a past, routes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hf_models
import pytest
import torch

from hotloop.errors import InputError
from hotloop.models.decoder import compute_load_balancing_loss, compute_logits, forward
from hotloop.models.weights import read_policy

ROWS, LENGTH, VOCAB = 3, 11, hf_models.SIZES["vocab_size"]


def make_ids(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted).abs().max() / wanted.abs().max()).detach())


@pytest.mark.parametrize("kind", hf_models.NATIVE)
def test_logits_and_gradients_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = hf_models.save(kind, tmp_path / "policy")
    config, arena = read_policy(tmp_path / "policy")
    assert config.is_native
    whole = arena.enable_gradients()
    ids = make_ids()
    wanted = model(ids).logits
    out = forward(config, arena.params, ids, torch.arange(LENGTH).expand(ROWS, -1))
    found = compute_logits(config, arena.params, out.hidden_BTD)
    assert relative_error(found, wanted) < 1e-5

    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(tmp_path / "gradient")
    _, reference = read_policy(tmp_path / "gradient")
    assert whole.grad is arena.grad
    assert relative_error(arena.grad, reference.flat) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama3_rope"])
def test_padding_on_either_side_changes_nothing(kind: str, tmp_path: Path) -> None:
    hf_models.save(kind, tmp_path)
    config, arena = read_policy(tmp_path)
    ids = make_ids(1, 7)
    plain = forward(config, arena.params, ids, torch.arange(7)[None]).hidden_BTD
    junk = torch.full((1, 3), 5)
    right = forward(
        config,
        arena.params,
        torch.cat((ids, junk), 1),
        torch.arange(10)[None],
        mask_BT=torch.tensor([[True] * 7 + [False] * 3]),
    ).hidden_BTD
    left = forward(
        config,
        arena.params,
        torch.cat((junk, ids), 1),
        torch.cat((torch.zeros(3, dtype=torch.long), torch.arange(7)))[None],
        mask_BT=torch.tensor([[False] * 3 + [True] * 7]),
    ).hidden_BTD
    assert torch.isfinite(right).all() and torch.isfinite(left).all()
    assert relative_error(right[:, :7], plain) < 1e-5
    assert relative_error(left[:, 3:], plain) < 1e-5


def test_a_padded_batch_has_finite_gradients_equal_to_its_rows(tmp_path: Path) -> None:
    hf_models.save("qwen3", tmp_path)
    config, arena = read_policy(tmp_path)
    arena.enable_gradients()
    ids = make_ids(2, 8)
    lengths = (8, 5)
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    out = forward(config, arena.params, ids, torch.arange(8).expand(2, -1), mask_BT=mask)
    compute_logits(config, arena.params, out.hidden_BTD[mask]).square().sum().backward()
    together = arena.grad.clone()
    arena.grad.zero_()
    for row, length in enumerate(lengths):
        part = forward(config, arena.params, ids[row : row + 1, :length], torch.arange(length)[None])
        compute_logits(config, arena.params, part.hidden_BTD).square().sum().backward()
    assert relative_error(together, arena.grad) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_responses_that_branch_off_one_prompt_give_the_plain_gradient(kind: str, tmp_path: Path) -> None:
    hf_models.save(kind, tmp_path)
    config, arena = read_policy(tmp_path)
    arena.enable_gradients()
    prompt, answers = make_ids(1, 6), make_ids(4, 5)
    whole = torch.cat((prompt.expand(4, -1), answers), 1)
    plain = forward(config, arena.params, whole, torch.arange(11).expand(4, -1))
    wanted = compute_logits(config, arena.params, plain.hidden_BTD[:, 6:])
    wanted.square().sum().backward()
    plain_grad = arena.grad.clone()
    arena.grad.zero_()

    first = forward(config, arena.params, prompt, torch.arange(6)[None])
    rows = torch.zeros(4, dtype=torch.long)
    past = [(k[rows], v[rows]) for k, v in first.kv]
    branch = forward(config, arena.params, answers, torch.arange(6, 11).expand(4, -1), past=past)
    found = compute_logits(config, arena.params, branch.hidden_BTD)
    found.square().sum().backward()
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(arena.grad, plain_grad) < 1e-5


def test_a_past_mask_hides_past_tokens(tmp_path: Path) -> None:
    hf_models.save("qwen3", tmp_path)
    config, arena = read_policy(tmp_path)
    ids = make_ids(1, 6)
    wanted = forward(config, arena.params, ids, torch.arange(6)[None]).hidden_BTD[:, 4:]
    prefix = forward(config, arena.params, ids[:, :4], torch.arange(4)[None])
    padded = [(torch.cat((k, k + 7), 1), torch.cat((v, v - 7), 1)) for k, v in prefix.kv]
    seen = torch.tensor([[True] * 4 + [False] * 4])
    found = forward(
        config, arena.params, ids[:, 4:], torch.arange(4, 6)[None], past=padded, past_mask_BS=seen
    ).hidden_BTD
    assert relative_error(found, wanted) < 1e-5


def test_replayed_routes_give_the_same_logits_and_gradients(tmp_path: Path) -> None:
    hf_models.save("qwen3_moe_mixed", tmp_path)
    config, arena = read_policy(tmp_path)
    arena.enable_gradients()
    ids, positions = make_ids(), torch.arange(LENGTH).expand(ROWS, -1)
    first = forward(config, arena.params, ids, positions, record_routes=True)
    assert first.routes_BTLK.shape == (ROWS, LENGTH, 3, 2)
    assert (first.routes_BTLK[:, :, 1] == 0).all(), "a dense layer has zero rows"
    first.hidden_BTD.square().sum().backward()
    wanted = arena.grad.clone()
    arena.grad.zero_()
    again = forward(config, arena.params, ids, positions, routes=first.routes_BTLK)
    again.hidden_BTD.square().sum().backward()
    assert torch.equal(again.hidden_BTD, first.hidden_BTD)
    assert torch.equal(arena.grad, wanted)


def test_other_routes_change_the_output_and_gates_keep_their_gradient(tmp_path: Path) -> None:
    hf_models.save("qwen3_moe", tmp_path)
    config, arena = read_policy(tmp_path)
    arena.enable_gradients()
    ids, positions = make_ids(), torch.arange(LENGTH).expand(ROWS, -1)
    first = forward(config, arena.params, ids, positions, record_routes=True)
    moved = (first.routes_BTLK + 1) % config.num_experts
    other = forward(config, arena.params, ids, positions, routes=moved)
    assert relative_error(other.hidden_BTD, first.hidden_BTD) > 1e-3
    other.hidden_BTD.square().sum().backward()
    assert arena.grad_view("model.layers.0.mlp.gate.weight").abs().max() > 0


def test_load_balancing_loss_is_k_when_even_and_e_when_everything_goes_one_way(tmp_path: Path) -> None:
    hf_models.save("qwen3_moe", tmp_path)
    config, _ = read_policy(tmp_path)
    config = dataclasses.replace(config, num_layers=1)
    even = torch.tensor([[[[0, 1]], [[2, 3]], [[4, 5]]]])
    flat = torch.zeros(1, 3, 6)
    # shares 2/6 each over 3 tokens: E * sum(1/3 * 1/6) = 6 * 6 * 1/18 = 2 = K
    assert compute_load_balancing_loss([flat], even, None, config).item() == pytest.approx(2.0)
    one_way = torch.tensor([[[[0, 1]], [[0, 1]], [[0, 1]]]])
    sure = torch.full((1, 3, 6), -100.0)
    sure[..., 0] = 100.0
    # share_0 = 1, mean_prob_0 = 1: E * 1 = 6
    assert compute_load_balancing_loss([sure], one_way, None, config).item() == pytest.approx(6.0)
    # A padded token counts for nothing.
    mask = torch.tensor([[True, False, True]])
    half = torch.tensor([[[[0, 1]], [[4, 5]], [[0, 1]]]])
    assert compute_load_balancing_loss([sure], half, mask, config).item() == pytest.approx(6.0)


@pytest.mark.parametrize("kind", hf_models.FOREIGN)
def test_other_architectures_run_through_transformers_behind_the_same_call(kind: str, tmp_path: Path) -> None:
    model = hf_models.save(kind, tmp_path)
    config, arena = read_policy(tmp_path)
    assert not config.is_native and config.unsupported
    whole = arena.enable_gradients()
    ids = make_ids()
    wanted = model(ids).logits
    params = arena.forward_params
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    found = compute_logits(config, params, forward(config, params, ids, positions).hidden_BTD)
    assert relative_error(found, wanted) < 1e-5
    prefix = forward(config, params, ids[:, :4], positions[:, :4])
    rest = forward(config, params, ids[:, 4:], positions[:, 4:], past=prefix.kv)
    assert relative_error(compute_logits(config, params, rest.hidden_BTD), wanted[:, 4:]) < 1e-5
    wanted.square().sum().backward()
    found.square().sum().backward()
    norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
    assert float(whole.grad.norm()) == pytest.approx(float(norm), rel=1e-5)
    with pytest.raises(InputError) as caught:
        forward(config, params, ids, positions, record_routes=True)
    assert caught.value.code == "routes_unsupported"


@pytest.mark.parametrize("kind", hf_models.WINDOWED)
def test_a_window_that_is_shorter_than_the_context_is_refused_and_says_what_would_fit(
    kind: str, tmp_path: Path
) -> None:
    hf_models.save(kind, tmp_path)
    _, arena = read_policy(tmp_path)
    with pytest.raises(InputError, match="last 4 of 128 tokens") as caught:
        _ = arena.forward_params
    assert caught.value.code == "policy_unsupported"
    assert "max_position_embeddings to 4" in str(caught.value)


@pytest.mark.parametrize("kind", hf_models.WINDOWED)
def test_a_window_that_holds_the_whole_context_changes_nothing(kind: str, tmp_path: Path) -> None:
    """What the refusal above advises gives the reference's logits."""
    model = hf_models.build(kind)
    if model.config.model_type == "gpt_neo":  # its positions are a table with one row each
        model.transformer.wpe = torch.nn.Embedding(4, 32, _weight=model.transformer.wpe.weight[:4].detach())
    model.config.max_position_embeddings = 4
    model.save_pretrained(tmp_path)
    config, arena = read_policy(tmp_path)
    ids = make_ids()[:, :4]
    params = arena.forward_params
    found = compute_logits(config, params, forward(config, params, ids, torch.arange(4).expand(ROWS, -1)).hidden_BTD)
    assert relative_error(found, model(ids).logits) < 1e-5


def test_a_policy_with_a_recurrent_state_is_refused_before_it_runs(tmp_path: Path) -> None:
    import transformers as t

    t.MambaForCausalLM(t.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    _, arena = read_policy(tmp_path)
    with pytest.raises(InputError) as caught:
        _ = arena.forward_params
    assert caught.value.code == "policy_unsupported"
