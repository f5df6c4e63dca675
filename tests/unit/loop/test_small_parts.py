"""Queue, staleness, seeds, stop signal, pass rates, progress, explanation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hotloop.experiment.load import load_experiment
from hotloop.experiment.presets import make_laptop_preset
from hotloop.loop.evaluate import compute_pass_rates
from hotloop.loop.explain import render_explanation
from hotloop.loop.progress import MAX_PLAIN_LINES, PlainProgress, UnbreakableProgress, render_curve
from hotloop.loop.queue import InMemoryQueue
from hotloop.loop.seeds import derive_seed
from hotloop.loop.staleness import compute_age, find_oldest_version, is_too_old
from hotloop.loop.stop import Stopped, StopSignal
from hotloop.types import Completion, Group, Rollout, Score, Task, VersionSpan

TASK = Task("t", "p")


def test_groups_leave_the_queue_in_the_order_of_their_ids() -> None:
    queue = InMemoryQueue()
    queue.put([Group(5, TASK, []), Group(2, TASK, [])])
    queue.put([Group(3, TASK, [])])
    assert len(queue) == 3
    taken = [queue.take() for _ in range(4)]
    assert [group.group_id if group else None for group in taken] == [2, 3, 5, None]


def test_a_group_is_in_the_queue_once() -> None:
    queue = InMemoryQueue()
    queue.put([Group(5, TASK, [])])
    with pytest.raises(ValueError, match="group 5"):
        queue.put([Group(5, TASK, [])])


def test_draining_says_how_much_was_dropped() -> None:
    queue = InMemoryQueue()
    queue.put([Group(1, TASK, []), Group(2, TASK, [])])
    assert (queue.drain(), len(queue)) == (2, 0)


def test_age_counts_from_the_oldest_token() -> None:
    spans = [VersionSpan(0, 3, 7), VersionSpan(3, 5, 9)]
    completion = Completion([1] * 5, [0.0] * 5, [0.0] * 5, spans, "stop")
    oldest = find_oldest_version(completion)
    assert oldest == 7
    assert compute_age(oldest, 10) == 3
    assert find_oldest_version(Completion([], [], [], [], "stop")) is None


@pytest.mark.parametrize(("age", "bound", "too_old"), [(0, 0, False), (1, 0, True), (9, None, False), (2, 2, False)])
def test_a_bound_admits_ages_up_to_it(age: int, bound: int | None, too_old: bool) -> None:
    assert is_too_old(age, bound) is too_old


def test_seeds_are_fixed_and_told_apart() -> None:
    assert derive_seed(0, "rollout", 1, 2) == derive_seed(0, "rollout", 1, 2)
    seeds = {derive_seed(0, purpose, group, index) for purpose in "ab" for group in range(50) for index in range(50)}
    assert len(seeds) == 5000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stop_cancels_what_is_waited_for() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        stop = StopSignal()
        asyncio.get_running_loop().call_soon(stop.request)
        with pytest.raises(Stopped):
            await stop.guard(work())

    asyncio.run(run())
    assert cancelled == [True]


def test_work_that_is_done_counts_as_done_and_errors_pass() -> None:
    async def run() -> int:
        stop = StopSignal()

        async def fail() -> int:
            raise RuntimeError("x")

        with pytest.raises(RuntimeError, match="x"):
            await stop.guard(fail())
        return await stop.guard(asyncio.sleep(0, 7))

    assert asyncio.run(run()) == 7


def _answered(rewards: list[float]) -> Group:
    completion = Completion([1], [0.0], [0.0], [VersionSpan(0, 1, 0)], "stop")
    return Group(
        0, TASK, [Rollout(i, 0, i, TASK, [1], completion, "", "completed", Score(r)) for i, r in enumerate(rewards)]
    )


def test_pass_at_k_is_the_chance_that_one_of_k_draws_is_right() -> None:
    rates = compute_pass_rates("eval/x", [_answered([1, 0, 0, 0]), _answered([1, 1, 1, 1])])
    assert rates == pytest.approx(
        {"eval/x-pass@1": (1 / 4 + 1) / 2, "eval/x-pass@2": (1 / 2 + 1) / 2, "eval/x-pass@4": 1}
    )


def test_plain_progress_thins_out_rounds_and_has_no_control_characters() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append, clock=lambda: 5.0)
    progress.started(0, 500)
    progress.evaluated(-1, {"eval/greedy": 0.5, "eval/sampled": 0.25})
    record = {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 6.0, "perf/step_time": 0.1}
    for round_ in range(500):
        progress.round_done({"round": round_, **record})
    progress.saved(499, Path("iter_0000499"))
    assert lines[0] == "held-out before training: greedy 0.500, sampled 0.250"
    assert len(lines) <= MAX_PLAIN_LINES + 2
    assert lines[-2].startswith("round 500/500  reward 0.500")
    assert all(line.isprintable() for line in lines)


def test_a_failing_output_is_told_nothing_more_and_ends_nothing() -> None:
    tries: list[str] = []

    def write(line: str) -> None:
        tries.append(line)
        raise BrokenPipeError

    progress = UnbreakableProgress(PlainProgress(write))
    progress.started(0, 2)
    progress.evaluated(-1, {"eval/greedy": 0.5, "eval/sampled": 0.25})
    progress.round_done({"round": 0})  # lacks every number: it must not be looked at
    progress.saved(0, Path("iter_0000000"))
    progress.closed()
    assert tries == ["held-out before training: greedy 0.500, sampled 0.250"]


def test_the_curve_rises_with_its_values() -> None:
    assert render_curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(render_curve([0.5] * 1000)) == 40
    assert render_curve([]) == ""


def test_an_explanation_names_every_value_and_its_origin() -> None:
    loaded = load_experiment(None, ["rounds=20"], base=make_laptop_preset(), base_name="preset laptop")
    lines = {line.split("  ")[0].strip(): line for line in render_explanation(loaded).splitlines()}
    assert lines["rounds"].endswith("20  --set") or "--set" in lines["rounds"]
    assert "preset laptop" in lines["sampling.group_size"]
    assert "default" in lines["sampling.top_p"]
    assert "cluster only" in lines["gpu"]
    assert "512" in lines["rollouts per round"] and "derived" in lines["rollouts per round"]
