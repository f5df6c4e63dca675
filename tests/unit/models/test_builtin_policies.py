"""The built-in policies: sizes, determinism, cache, warm-up."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from hotloop.errors import InputError
from hotloop.models.builtin import builtin_config, cache_root, make_policy
from hotloop.models.decoder import compute_logits, forward
from hotloop.models.weights import Arena, read_policy


def sorting_pairs(count: int, digits: int = 5, seed: int = 0) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    strings = ["".join(rng.choice("0123456789") for _ in range(digits)) for _ in range(count)]
    return [(f"s{text}=", "".join(sorted(text))) for text in strings]


@pytest.mark.parametrize(("kind", "count"), [("dense", 100_736), ("moe", 224_640)])
def test_sizes_are_those_of_the_default_task(kind: str, count: int) -> None:
    assert Arena(builtin_config(kind)).num_params == count


def test_the_cache_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "hotloop" / "policies"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_same_inputs_give_the_same_weights_and_other_seeds_others(kind: str, tmp_path: Path) -> None:
    items, gate = sorting_pairs(300), sorting_pairs(20, seed=1)
    made = []
    for name, seed, cache in (("a", 0, "c1"), ("b", 0, "c2"), ("c", 1, "c1")):
        report = make_policy(
            tmp_path / name, kind=kind, seed=seed, items=items, gate=gate, warmup_max_steps=3, cache=tmp_path / cache
        )
        assert (report.warmup_steps, report.reached_gate, report.from_cache) == (3, False, False)
        made.append(read_policy(tmp_path / name)[1].flat)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_the_weights_do_not_depend_on_the_caller_s_threads(tmp_path: Path) -> None:
    items, gate = sorting_pairs(300), sorting_pairs(20, seed=1)
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            where = tmp_path / f"{threads}"
            make_policy(where, items=items, gate=gate, warmup_max_steps=3, cache=tmp_path / f"cache{threads}")
            assert torch.get_num_threads() == threads
            made.append(read_policy(where)[1].flat)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_the_second_time_it_comes_from_the_cache_and_says_so(tmp_path: Path) -> None:
    first = make_policy(tmp_path / "a", cache=tmp_path / "cache")
    second = make_policy(tmp_path / "b", cache=tmp_path / "cache")
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.content_hash == second.content_hash
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "b" / "policy.json").read_text())["seed"] == 0
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"dense-{first.content_hash}"]


@pytest.mark.parametrize(("kind", "name"), [("dense", "Qwen3ForCausalLM"), ("moe", "Qwen3MoeForCausalLM")])
def test_transformers_opens_it_with_the_same_logits(kind: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_policy(tmp_path / "p", kind=kind, cache=tmp_path / "cache")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float32)
    assert type(theirs).__name__ == name
    config, arena = read_policy(tmp_path / "p")
    ids = torch.tensor([[1, 13, 8, 5, 14]])
    ours = compute_logits(config, arena.params, forward(config, arena.params, ids, torch.arange(5)[None]).hidden_BTD)
    torch.testing.assert_close(ours, theirs(ids).logits, rtol=1e-5, atol=1e-6)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(InputError) as caught:
        make_policy(tmp_path / "full", cache=tmp_path / "cache")
    assert caught.value.code == "policy_exists"
    with pytest.raises(InputError) as caught:
        make_policy(tmp_path / "a", items=sorting_pairs(3), cache=tmp_path / "cache")
    assert caught.value.code == "warmup_data"
    with pytest.raises(InputError, match="need 14 tokens") as caught:
        make_policy(
            tmp_path / "a", items=sorting_pairs(3), gate=sorting_pairs(3), max_positions=13, cache=tmp_path / "cache"
        )
    assert caught.value.code == "warmup_data"
    assert not (tmp_path / "a").exists()


def test_prompts_of_different_lengths_are_padded(tmp_path: Path) -> None:
    items = [("1+2=", "3"), ("10+25=", "35"), ("7+8=", "15"), ("100+1=", "101")] * 40
    seen: list[float | None] = []
    report = make_policy(
        tmp_path / "p",
        items=items,
        gate=items[:4],
        warmup_accuracy=0.99,
        warmup_max_steps=90,
        cache=tmp_path / "cache",
        progress=lambda step, most, accuracy: seen.append(accuracy),
    )
    # Four sums can be learned by heart; a mask or position slip would keep the longer ones wrong.
    assert report.reached_gate and report.gate_accuracy == 1.0
    assert len(seen) == report.warmup_steps and seen[28] is None and seen[29] is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_warm_up_stops_at_the_gate(kind: str, tmp_path: Path) -> None:
    report = make_policy(
        tmp_path / "p",
        kind=kind,
        items=sorting_pairs(17_000),
        gate=sorting_pairs(512, seed=1),
        cache=tmp_path / "cache",
    )
    assert report.reached_gate
    assert 0.40 <= report.gate_accuracy < 0.65
    assert 40 <= report.warmup_steps <= 120
