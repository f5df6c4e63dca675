"""Whatever is skipped, merged, shared or cut: the pull on every token of every distinct sequence stays the same."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.trainers.microbatch import cut_microbatches
from hotloop.trainers.packing import Savings, build_rows, split_steps
from hotloop.types import Sample

TOKENS = st.integers(1, 4)


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    """Few tokens, prompts and advantages, so that equal samples and shared prompts are common."""
    made = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(st.sampled_from([[1], [1, 2], [3, 1, 2]]))
        response = draw(st.lists(TOKENS, min_size=0, max_size=4))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
        advantage = draw(st.sampled_from([0.0, 0.0, 1.0, -0.5]))
        padding = [0.0] * len(prompt)
        made.append(
            Sample(
                ids=prompt + response,
                mask=[0] * len(prompt) + mask,
                behaviour_logprobs=padding + [-1.0 * kept for kept in mask],
                advantages=padding + [advantage] * len(response),
                rollout_id=draw(st.integers(0, number)),
                group_id=draw(st.integers(0, 2)),
                oldest_policy_version=0,
            )
        )
    return made


def pulls_of(rows_of: list[Sample], choice: Savings, max_tokens: int | None) -> dict[tuple[int, ...], float]:
    """Sum of weight x advantage per (tokens up to and including the target), read back from the passes' own inputs."""
    rows = build_rows(
        rows_of,
        num_rollouts=len(rows_of),
        aggregation="per_sample",
        savings=choice,
        compare_behaviour=True,
        replay_routes=False,
    )
    pulls: dict[tuple[int, ...], float] = defaultdict(float)
    for part in cut_microbatches(rows, share_prompts=choice.share_prompts, max_tokens=max_tokens):
        num_prefixes, width = part.prefix_ids_GP.shape
        branch_width = part.branch_ids_BW.shape[1]
        shape = part.mask_BR.shape
        for source, cell, target in zip(part.gather_C, part.cells_C, part.targets_C, strict=True):
            row, column = divmod(int(cell), shape[1])
            prefix = int(part.prefix_of_B[row])
            if source < num_prefixes * width:
                assert source // width == prefix
                context = part.prefix_ids_GP[prefix, : source % width + 1].tolist()
            else:
                branch_row, place = divmod(int(source) - num_prefixes * width, branch_width)
                assert branch_row == row
                context = part.prefix_ids_GP[prefix, : part.prefix_lengths_G[prefix]].tolist()
                assert part.branch_positions_BW[row, 0] == len(context)
                context += part.branch_ids_BW[row, : place + 1].tolist()
            pulls[*context, int(target)] += float(part.weights_BR[row, column] * part.advantages_BR[row, column])
        assert part.mask_BR.sum() == len(part.cells_C)
    return {key: value for key, value in pulls.items() if abs(value) > 1e-7}


@settings(max_examples=150, deadline=None)
@given(samples(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([None, 1, 6, 15]))
def test_every_token_is_pulled_as_in_the_plain_layout(
    made: list[Sample], skip: bool, merge: bool, share: bool, max_tokens: int | None
) -> None:
    plain = pulls_of(made, Savings(), None)
    saved = pulls_of(made, Savings(skip, merge, share), max_tokens)
    assert saved.keys() == plain.keys()
    for key, value in plain.items():
        assert saved[key] == pytest.approx(value, rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(samples(), st.integers(1, 4))
def test_steps_divide_a_round_without_loss_and_never_a_rollout(made: list[Sample], num_steps: int) -> None:
    distinct = {sample.rollout_id for sample in made}
    if len(distinct) < num_steps:
        return
    one_group_each = [
        Sample(s.ids, s.mask, s.behaviour_logprobs, s.advantages, s.rollout_id, s.rollout_id, 0) for s in made
    ]
    parts = split_steps(one_group_each, 2 * len(distinct), num_steps)
    assert sorted(position for chosen, _ in parts for position in chosen) == list(range(len(made)))
    owners = [{made[position].rollout_id for position in chosen} for chosen, _ in parts]
    assert all(owners)
    assert sum(len(owner) for owner in owners) == len(distinct)
    assert sum(count for _, count in parts) == pytest.approx(2 * len(distinct))
    np.testing.assert_allclose([count for _, count in parts], [2 * len(owner) for owner in owners])
