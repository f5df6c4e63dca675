"""Plans of rows, worked out by hand, and their invariant on random splits."""

from __future__ import annotations

import numpy as np

from hotloop.engines.torch.rows import plan_rows


def test_the_eldest_child_stays_and_the_others_take_free_places() -> None:
    # Rows 0 and 2 go on (1 has ended); the completions of row 0 drew a, b, a.
    rows = np.array([0, 0, 2, 0])
    plan = plan_rows(rows, np.array([10, 11, 30, 10]))
    assert plan.parent.tolist() == [0, 0, 2]
    assert plan.target.tolist() == [0, 1, 2]
    assert plan.moves.tolist() == [False, True, False]
    assert plan.row_of.tolist() == [0, 1, 2, 0]


def test_a_row_beyond_the_new_count_moves_into_a_hole() -> None:
    plan = plan_rows(np.array([5, 1]), np.array([50, 10]))
    assert plan.parent.tolist() == [1, 5]
    assert plan.target.tolist() == [1, 0]
    assert plan.row_of.tolist() == [0, 1]


def test_without_names_every_completion_gets_its_own_row() -> None:
    plan = plan_rows(np.array([1, 0, 1]), None)
    assert sorted(plan.row_of.tolist()) == [0, 1, 2]
    assert plan.parent.tolist() == [0, 1, 1]


def test_rows_are_dense_and_no_place_is_both_read_and_written() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = rng.integers(0, 12, size=int(rng.integers(1, 20)))
        names = rows * 3 + rng.integers(0, 3, size=len(rows))
        plan = plan_rows(rows, names)
        assert sorted(plan.target.tolist()) == list(range(len(plan.target)))
        assert not set(plan.target[plan.moves].tolist()) & set(plan.parent.tolist())
        assert (plan.parent[~plan.moves] == plan.target[~plan.moves]).all()
        new_row = dict(zip(names.tolist(), plan.row_of.tolist(), strict=True))
        assert len(set(new_row.values())) == len(new_row)
        source = dict(zip(plan.target.tolist(), plan.parent.tolist(), strict=True))
        assert [source[row] for row in plan.row_of.tolist()] == rows.tolist()
