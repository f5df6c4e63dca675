"""How far work runs ahead of its consumer: enough that no thread idles beside a large tensor, and no further."""

from __future__ import annotations

import threading

import pytest

from hotloop.snapshots.codecs.parallel import _may_run_ahead, map_in_order


@pytest.mark.parametrize(
    ("weights", "threads", "wanted"),
    [
        ([], 2, True),
        ([1, 1, 1], 2, True),
        ([1, 1, 1, 1], 2, False),  # twice the threads, all alike
        ([100, 30, 30, 30], 2, True),  # the other thread would idle while the first is at work
        ([100, 30, 30, 40], 2, False),
        ([100, 30, 30, 30, 30, 30], 3, True),
        ([100, 50, 50, 50, 50, 50], 3, False),
        ([10**9] + [1] * 63, 2, False),  # results of tiny items take memory, too
    ],
)
def test_work_runs_ahead_by_what_the_oldest_weighs(weights: list[int], threads: int, wanted: bool) -> None:
    assert _may_run_ahead(weights, threads) is wanted


def test_light_items_are_done_beside_a_heavy_one_and_results_keep_their_order() -> None:
    all_light_begun = threading.Event()
    begun: list[int] = []

    def work(item: int) -> int:
        if item == 0:
            assert all_light_begun.wait(60), f"only {begun} were begun beside the heavy item"
        else:
            begun.append(item)
            if len(begun) == 9:
                all_light_begun.set()
        return item

    weights = [100] + [10] * 9
    assert list(map_in_order(work, range(10), workers=2, weigh=weights.__getitem__)) == list(range(10))


def test_an_error_comes_at_its_place_and_drops_what_was_not_begun() -> None:
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 2:
            raise ValueError("two")
        return item

    results = map_in_order(work, range(1000), workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)
    assert len(begun) < 20
