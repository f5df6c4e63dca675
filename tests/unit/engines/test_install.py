"""Weights written in place: whole tensors and byte ranges, into arenas of the same and of another dtype."""

from __future__ import annotations

import engine_policies as policies
import numpy as np
import pytest
import torch

from hotloop.engines.base import TensorRange, WeightUpdate
from hotloop.engines.byte_ranges import expand_ranges
from hotloop.engines.torch.install import install
from hotloop.errors import HotloopError
from hotloop.models.weights import Arena

NAME = "model.layers.1.self_attn.k_proj.weight"


def byte_view(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def dtypes(arena: Arena, dtype: torch.dtype) -> dict[str, torch.dtype]:
    return dict.fromkeys(arena.slots, dtype)


def test_ranges_are_expanded_in_order() -> None:
    assert expand_ranges(np.array([5, 0, 9]), np.array([2, 3, 0])).tolist() == [5, 6, 0, 1, 2]


@pytest.mark.parametrize("arena_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpoint_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.002, 0.2, 1.0])
def test_changed_ranges_give_the_new_checkpoint_exactly(
    arena_dtype: torch.dtype, checkpoint_dtype: torch.dtype, share: float
) -> None:
    old, new = (policies.make_arena(seed=seed) for seed in (0, 1))
    arena = Arena(old.config, arena_dtype)
    arena.flat.copy_(old.flat.to(checkpoint_dtype))
    chosen = torch.rand(old.flat.shape, generator=torch.Generator().manual_seed(2)) < share
    wanted = torch.where(chosen, new.flat, old.flat).to(checkpoint_dtype)
    ranges = []
    for name, slot in arena.slots.items():
        span = slice(slot.offset, slot.offset + slot.size)
        before, after = byte_view(old.flat[span].to(checkpoint_dtype)), byte_view(wanted[span])
        if arena_dtype == checkpoint_dtype or checkpoint_dtype == torch.bfloat16:
            positions = np.flatnonzero(before != after)  # single bytes: ranges cut through elements
            width = 1
        else:
            width = checkpoint_dtype.itemsize
            changed = (before != after).reshape(-1, width).any(1)
            positions = np.flatnonzero(changed) * width
        data = np.concatenate([after[at : at + width] for at in positions] or [np.zeros(0, np.uint8)])
        ranges.append(TensorRange(name, positions, np.full(len(positions), width), data.tobytes()))
    update = WeightUpdate(1, ranges=ranges)
    for _ in range(2):  # absolute values: twice is the same as once
        install(arena, update, dtypes(arena, checkpoint_dtype))
        assert torch.equal(arena.flat, wanted.to(arena_dtype))


def test_a_long_run_is_written_like_its_elements() -> None:
    old, new = (policies.make_arena(seed=seed) for seed in (0, 1))
    slot = old.slots[NAME]
    data = byte_view(new.view(NAME))
    install(
        old,
        WeightUpdate(1, ranges=[TensorRange(NAME, [7], [1001], data[7:1008].tobytes())]),
        dtypes(old, torch.float32),
    )
    found, before = byte_view(old.view(NAME)), byte_view(policies.make_arena(seed=0).view(NAME))
    assert np.array_equal(found[7:1008], data[7:1008])
    assert np.array_equal(found[:7], before[:7]) and np.array_equal(found[1008:], before[1008:])
    assert slot.size * 4 == len(found)


@pytest.mark.parametrize("as_numpy", [True, False])
def test_whole_tensors_are_cast_on_write(as_numpy: bool) -> None:
    arena, new = Arena(policies.make_arena().config, torch.bfloat16), policies.make_arena(seed=1)
    tensors = {name: view.numpy() if as_numpy else view for name, view in new.tensors().items()}
    install(arena, WeightUpdate(1, tensors=tensors), dtypes(arena, torch.bfloat16))
    assert torch.equal(arena.flat, new.flat.bfloat16())


def test_a_tied_head_is_skipped() -> None:
    arena = policies.make_arena()
    before = arena.flat.clone()
    install(arena, WeightUpdate(1, tensors={"lm_head.weight": torch.ones(32, 32)}), dtypes(arena, torch.float32))
    assert torch.equal(arena.flat, before)


ONE = np.array([0])


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (WeightUpdate(1, tensors={"nobody": torch.ones(1)}), "no such tensor"),
        (WeightUpdate(1, tensors={NAME: torch.ones(3)}), "shape"),
        (WeightUpdate(1, tensors={NAME: torch.ones(16, 32, dtype=torch.int32)}), "not a float"),
        (WeightUpdate(1, tensors={NAME: "text"}), "not an array"),
        (WeightUpdate(1, ranges=[TensorRange("nobody", ONE, ONE + 4, b"1234")]), "no such tensor"),
        (WeightUpdate(1, ranges=[TensorRange(NAME, ONE + 2047, ONE + 2, b"12")]), "outside"),
        (WeightUpdate(1, ranges=[TensorRange(NAME, ONE - 1, ONE + 2, b"12")]), "outside"),
        (WeightUpdate(1, ranges=[TensorRange(NAME, ONE, ONE + 4, b"12")]), "2 came"),
        (WeightUpdate(1, ranges=[TensorRange(NAME, np.array([0, 8]), ONE + 4, b"1234")]), "differ in number"),
    ],
)
def test_a_bad_update_changes_nothing_at_all(update: WeightUpdate, words: str) -> None:
    arena = policies.make_arena()
    before = arena.flat.clone()
    good = {"model.norm.weight": torch.zeros(32)}
    mixed = WeightUpdate(1, tensors={**good, **update.tensors}, ranges=update.ranges)
    with pytest.raises(HotloopError, match=words) as caught:
        install(arena, mixed, dtypes(arena, torch.float32))
    assert caught.value.code == "install_failed"
    assert torch.equal(arena.flat, before)


def test_half_an_element_cannot_go_into_a_rounded_arena() -> None:
    arena = Arena(policies.make_arena().config, torch.bfloat16)
    with pytest.raises(HotloopError, match="cuts through"):
        install(arena, WeightUpdate(1, ranges=[TensorRange(NAME, ONE, ONE + 2, b"12")]), dtypes(arena, torch.float32))
