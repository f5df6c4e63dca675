"""An install is ready before it is written: positions, values and casts are in the plan, and only writes are left."""

from __future__ import annotations

import tracemalloc
from typing import Any

import engine_policies as policies
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.engines.base import TensorRange, WeightUpdate
from hotloop.engines.torch.install import plan_install
from hotloop.models.weights import Arena

NAME = "model.layers.1.self_attn.k_proj.weight"  # 16 x 32 elements


def as_bytes(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def plan_of(arena: Arena, *ranges: TensorRange, dtype: torch.dtype = torch.float32, **tensors: Any) -> Any:
    update = WeightUpdate(7, "step000007", tensors=tensors, ranges=ranges)
    return plan_install(arena, update, dict.fromkeys(arena.slots, dtype))


def words(tensor: torch.Tensor, *elements: int) -> TensorRange:
    """The 8-byte words around some fp32 elements, as a delta's decoder names them."""
    data = as_bytes(tensor)
    offsets = np.array(sorted({element * 4 // 8 * 8 for element in elements}))
    return TensorRange(NAME, offsets, np.full(len(offsets), 8), b"".join(data[at : at + 8] for at in offsets))


def test_a_plan_names_the_elements_that_differ_and_not_their_neighbours() -> None:
    arena = policies.make_arena()
    new = arena.view(NAME).clone().view(-1)
    new[[3, 8, 9, 200]] += 1
    plan = plan_of(arena, words(new, 3, 8, 9, 200))
    begin = arena.slots[NAME].offset
    assert plan.runs == () and plan.num_elements == 4
    assert plan.index.tolist() == [begin + 3, begin + 8, begin + 9, begin + 200]
    assert torch.equal(plan.values, new[[3, 8, 9, 200]])


def test_a_plan_changes_nothing_until_it_is_written() -> None:
    arena = policies.make_arena()
    before, new = arena.flat.clone(), arena.view(NAME).clone().view(-1)
    new[5] = 9
    plan = plan_of(arena, words(new, 5))
    assert torch.equal(arena.flat, before)
    plan.write(arena)
    before[arena.slots[NAME].offset + 5] = 9
    assert torch.equal(arena.flat, before)


def test_a_plan_of_equal_values_is_empty() -> None:
    arena = policies.make_arena()
    assert plan_of(arena, words(arena.view(NAME), 1, 2, 300)).num_elements == 0


def test_positions_rise_over_all_tensors_whatever_the_order_of_the_update() -> None:
    arena, new = policies.make_arena(), policies.make_arena(seed=1)
    names = [NAME, "model.layers.0.self_attn.k_proj.weight", "model.layers.2.self_attn.o_proj.weight"]
    one = np.array([40])
    ranges = [TensorRange(name, one, one // 10, bytes(as_bytes(new.view(name))[40:44])) for name in names]
    plan = plan_of(arena, *ranges)
    assert plan.index.tolist() == sorted(arena.slots[name].offset + 10 for name in names)


def test_a_tensor_with_many_changes_is_written_in_one_run() -> None:
    arena, new = policies.make_arena(), policies.make_arena(seed=1)
    wanted = arena.view(NAME).clone().view(-1)
    chosen = list(range(0, 512, 20))  # one in twenty
    wanted[chosen] = new.view(NAME).view(-1)[chosen]
    plan = plan_of(arena, words(wanted, *chosen))
    assert [(run.begin, run.values.numel()) for run in plan.runs] == [(arena.slots[NAME].offset, 512)]
    plan.write(arena)
    assert torch.equal(arena.view(NAME).view(-1), wanted)


def test_bytes_that_are_named_twice_end_as_the_last_one_says() -> None:
    arena = policies.make_arena()
    old = arena.view(NAME).view(-1)[0].clone()
    zero, four = np.array([0, 0]), np.array([4, 4])
    there_and_back = np.array([5.0, old.item()], dtype=np.float32).tobytes()
    plan_of(arena, TensorRange(NAME, zero, four, there_and_back)).write(arena)
    assert arena.view(NAME).view(-1)[0] == old
    twice = [TensorRange(NAME, zero[:1], four[:1], np.float32(value).tobytes()) for value in (5.0, 6.0)]
    plan_of(arena, *twice).write(arena)
    assert arena.view(NAME).view(-1)[0] == 6.0
    over_whole = plan_of(arena, twice[0], **{NAME: torch.zeros(16, 32)})
    over_whole.write(arena)
    assert arena.view(NAME).view(-1)[:2].tolist() == [5.0, 0.0]


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_two_ranges_that_meet_inside_an_element_give_both_halves(shift: int) -> None:
    arena = policies.make_arena()
    data = as_bytes(policies.make_arena(seed=1).view(NAME))
    ends = np.array([0, 400 + shift, 1200])
    cut = TensorRange(NAME, ends[:-1], np.diff(ends), bytes(data[:1200]))
    plan_of(arena, cut).write(arena)
    assert as_bytes(arena.view(NAME))[:1200] == data[:1200]


def test_ranges_longer_than_a_piece_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.engines.torch.install._PIECE_BYTES", 64)
    arena, new = policies.make_arena(), policies.make_arena(seed=1)
    data = as_bytes(new.view(NAME))
    offsets, lengths = np.array([0, 32, 1003]), np.array([8, 902, 500])
    pieces = b"".join(data[at : at + size] for at, size in zip(offsets, lengths, strict=True))
    plan_of(arena, TensorRange(NAME, offsets, lengths, pieces)).write(arena)
    expected = as_bytes(policies.make_arena().view(NAME))
    for at, size in zip(offsets, lengths, strict=True):
        expected[at : at + size] = data[at : at + size]
    assert as_bytes(arena.view(NAME)) == expected


def test_casts_are_done_when_the_plan_is_made() -> None:
    arena = Arena(policies.make_arena().config, torch.bfloat16)
    whole = torch.full((16, 32), 1.01)
    plan = plan_of(arena, words(torch.full((512,), 1.01), 0), **{"model.norm.weight": torch.full((32,), 1.01)})
    assert {run.values.dtype for run in plan.runs} == {plan.values.dtype} == {torch.bfloat16}
    later = plan_install(arena, WeightUpdate(1, tensors={NAME: whole}), {}, casts=False)
    assert later.runs[0].values is whole, "an install at once saves the copy"


class CreatedBytes(TorchDispatchMode):
    """Bytes of the tensors that operators create; views create none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.total += result.untyped_storage().nbytes()
        return result


def test_a_write_decodes_and_allocates_nothing() -> None:
    shapes = {"a.weight": (2000, 200), "b.weight": (1000, 200)}
    arena = Arena(policies.make_arena().config, shapes=shapes.items())
    chosen = torch.arange(0, arena.flat.numel(), 40)
    wanted = arena.flat.clone()
    wanted[chosen] = chosen.float() + 1
    ranges = []
    for name, slot in arena.slots.items():
        inside = chosen[(chosen >= slot.offset) & (chosen < slot.offset + slot.size)]
        source = bytearray(wanted[inside].numpy().tobytes())
        offsets = (inside - slot.offset).numpy() * 4
        ranges.append(TensorRange(name, offsets, np.full(len(offsets), 4), source))
    plan = plan_of(arena, *ranges)
    assert plan.index.numel() == plan.num_elements == 15_000
    for one in ranges:  # nothing is decoded later: what came is not needed any more
        one.data[:] = bytes(len(one.data))
    with CreatedBytes() as created:
        plan.write(arena)
    assert torch.equal(arena.flat, wanted)
    assert created.total == 0
    tracemalloc.start()
    try:
        plan.write(arena)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < plan.num_elements, "less than a byte for each element"
