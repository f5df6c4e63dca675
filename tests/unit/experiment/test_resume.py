"""Resume arithmetic, against the worked example of the loop specification."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError
from hotloop.experiment.resume import (
    check_resume,
    compare_for_resume,
    compute_end_for_more,
    compute_resume,
    is_save_due,
)


def test_interval_20_of_100_rounds_stopped_in_round_57() -> None:
    before = compute_resume(None, 100, interval=20, num_groups=8, group_size=8)
    assert [r for r in before.saves if r < 57] == [19, 39]
    after = compute_resume(39, 100, interval=20, num_groups=8, group_size=8)
    assert (after.first_round, after.rounds_to_run, after.saves) == (40, 60, (59, 79, 99))
    assert after.prompts_consumed == 320


def test_a_short_run_saves_once_at_its_end() -> None:
    assert compute_resume(None, 3, interval=20, num_groups=8, group_size=8).saves == (2,)


def test_latest_2_of_3_rounds_runs_nothing_and_says_the_corrected_value() -> None:
    plan = compute_resume(2, 3, interval=20, num_groups=8, group_size=8)
    assert plan.rounds_to_run == 0
    with pytest.raises(InputError, match=r"resume_runs_nothing.*set rounds to 3 \+ k, at least 4"):
        check_resume(plan)


def test_a_fresh_run_of_no_rounds_is_no_resume_error() -> None:
    check_resume(compute_resume(None, 0, interval=20, num_groups=8, group_size=8))


def test_more_rounds_are_counted_from_the_first_one_to_run() -> None:
    assert compute_end_for_more(40, 25) == 65


@pytest.mark.parametrize(("global_batch", "steps"), [(None, 1), (64, 1), (32, 2), (16, 4)])
def test_optimizer_steps_per_round(global_batch: int | None, steps: int) -> None:
    plan = compute_resume(None, 10, interval=5, num_groups=8, group_size=8, global_batch=global_batch)
    assert plan.steps_per_round == steps


def test_saves_are_due_at_the_interval_and_at_the_end() -> None:
    assert [r for r in range(7) if is_save_due(r, interval=3, num_rounds=7)] == [2, 5, 6]


def test_changed_batch_sizes_move_the_horizon_and_parallel_sizes_are_allowed() -> None:
    before = {"sampling.num_groups": 8, "nodes": 1, "optimizer.lr": 1e-6, "rounds": 5}
    after = {"sampling.num_groups": 16, "nodes": 2, "optimizer.lr": 1e-6, "rounds": 9}
    notes = [(note.code, note.where) for note in compare_for_resume(before, after)]
    assert notes == [
        ("resume_parallel", "nodes: 1 -> 2"),
        ("resume_changed", "rounds: 5 -> 9"),
        ("resume_horizon", "sampling.num_groups: 8 -> 16"),
    ]


def test_the_line_before_the_first_round_names_start_rest_and_saves() -> None:
    plan = compute_resume(39, 100, interval=20, num_groups=8, group_size=8)
    assert plan.render() == (
        "resume at round 40: 60 of 100 rounds left, 320 prompts consumed, saves after rounds 59, 79, 99"
    )
