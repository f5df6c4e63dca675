"""Groups: seeds, text, status; and which of them fill a round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loop_parts import TASKS, VOCAB, DigitJudge, make_collector, make_sampler

from hotloop.engines.base import Chunk, GenerateRequest
from hotloop.engines.fake import FakeEngine
from hotloop.errors import InputError, RunError, ServiceError
from hotloop.loop.collecting import MAX_SUBMISSIONS
from hotloop.loop.sampling import encode_prompt, find_longest_prompt
from hotloop.loop.stop import Stopped, StopSignal
from hotloop.models.tokenizer import EOS_ID, build_char_tokenizer, char_tokenizer, open_tokenizer
from hotloop.types import Completion, Rollout, Score, Task, VersionSpan
from hotloop.verifiers.base import Judgement


def _sample(sampler: Any, **kwargs: Any) -> Any:
    return asyncio.run(sampler.sample(TASKS[:3], first_group_id=kwargs.pop("first", 0), group_size=3, **kwargs))


def test_groups_come_back_in_order_with_unique_ids() -> None:
    groups = _sample(make_sampler(), first=10)
    assert [group.group_id for group in groups] == [10, 11, 12]
    assert [rollout.rollout_id for group in groups for rollout in group.rollouts] == list(range(30, 39))
    assert [rollout.index for rollout in groups[1].rollouts] == [0, 1, 2]
    assert groups[0].rollouts[0].prompt_ids == char_tokenizer().encode("s0=")


def test_the_same_group_is_sampled_alike_whatever_is_sampled_beside_it() -> None:
    both = _sample(make_sampler())
    alone = asyncio.run(make_sampler().sample(TASKS[1:2], first_group_id=1, group_size=3))
    assert [r.completion.token_ids for r in both[1].rollouts] == [r.completion.token_ids for r in alone[0].rollouts]


def test_siblings_groups_purposes_and_seeds_draw_differently() -> None:
    base = [r.completion.token_ids for group in _sample(make_sampler()) for r in group.rollouts]
    assert len({tuple(ids) for ids in base}) > 3
    assert base != [r.completion.token_ids for g in _sample(make_sampler(), purpose="other") for r in g.rollouts]
    assert base != [r.completion.token_ids for g in _sample(make_sampler(seed=1)) for r in g.rollouts]


def test_the_end_token_is_no_part_of_the_text_and_other_special_tokens_stay_visible() -> None:
    sampler = make_sampler()
    ended = Completion([4, 5, EOS_ID], [0.0] * 3, [0.0] * 3, [VersionSpan(0, 3, 0)], "stop")
    cut = Completion([4, 0, 5], [0.0] * 3, [0.0] * 3, [VersionSpan(0, 3, 0)], "length")
    assert sampler.text_of(ended) == "12"
    assert sampler.text_of(cut) == "1<pad>2"


def test_a_stop_string_cuts_the_text_and_not_the_tokens() -> None:
    sampler = make_sampler(stop=("3",))
    completion = Completion([4, 6, 5], [0.0] * 3, [0.0] * 3, [VersionSpan(0, 3, 0)], "stop", "3")
    assert sampler.text_of(completion) == "1"


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    for name, content in build_char_tokenizer().items():
        (tmp_path / name).write_bytes(content)
    tokenizer = open_tokenizer(tmp_path)
    chat = Task("t", ({"role": "user", "content": "s1="},))
    assert encode_prompt(tokenizer, chat, False) == encode_prompt(tokenizer, TASKS[1], True) == tokenizer.encode("s1=")


def test_every_prompt_without_room_for_an_answer_is_named() -> None:
    tasks = [Task("short", "s1="), Task("long", "s" + "1" * 20), Task("longer", "s" + "1" * 30)]
    assert find_longest_prompt(char_tokenizer(), tasks, False, 64) == 32
    with pytest.raises(InputError) as caught:
        find_longest_prompt(char_tokenizer(), tasks, False, 22)
    assert [problem.where for problem in caught.value.problems] == ["long", "longer"]


class _FailingEngine(FakeEngine):
    """Fails its first requests."""

    def __init__(self, failures: int) -> None:
        super().__init__(vocab_size=VOCAB)
        self.failures = failures

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        if self.failures:
            self.failures -= 1
            raise ServiceError("replica_lost", "the replica is gone")
        async for chunk in super().generate(request, stream=stream):
            yield chunk


def test_a_failed_request_is_made_once_more() -> None:
    groups = _sample(make_sampler(_FailingEngine(1)))
    assert all(rollout.status != "failed" for group in groups for rollout in group.rollouts)


def test_after_two_failures_the_rollouts_are_failed_with_the_reason_and_never_scored() -> None:
    judge = DigitJudge()
    collector = make_collector(make_sampler(_FailingEngine(2)), judge, num_groups=1, submission=1)
    with pytest.raises(RunError, match=r"every rollout of the round failed \(the replica is gone"):
        asyncio.run(collector.collect(0, trainer_version=0, stop=StopSignal()))
    assert judge.asked == 0


class _Scripted:
    """Gives every rollout of a group the rewards that the group's id says."""

    name = "scripted"

    def __init__(self, same: set[int]) -> None:
        self.same = same

    def judge(self, rollout: Rollout) -> Judgement:
        return Score(0.0 if rollout.group_id in self.same else float(rollout.index % 2))

    async def close(self) -> None: ...


def _collect(verifier: Any, **changes: Any) -> Any:
    collector = make_collector(make_sampler(), verifier, **changes)
    return asyncio.run(collector.collect(0, trainer_version=0, stop=StopSignal())), collector


def test_without_a_filter_a_round_is_one_submission() -> None:
    found, collector = _collect(_Scripted({0, 1, 2, 3}))
    assert [group.group_id for group in found.batch] == [0, 1, 2, 3]
    assert (found.dropped, collector.next_group_id) == ({}, 4)


def test_groups_without_a_signal_are_replaced_in_the_order_of_ids() -> None:
    found, collector = _collect(_Scripted({1, 2, 5}), drops_zero_std=True)
    assert [group.group_id for group in found.batch] == [0, 3, 4, 6]
    assert found.dropped == {1: "zero_std_0.0", 2: "zero_std_0.0", 5: "zero_std_0.0", 7: "surplus"}
    assert collector.next_group_id == 8 and len(found.groups) == 8
    metrics = found.measure()
    assert metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 3
    assert metrics["rollout/dynamic_filter/drop_surplus"] == 1
    assert metrics["rollout/groups_sampled"] == 8


def test_over_sampling_drops_what_is_left_over() -> None:
    found, collector = _collect(_Scripted(set()), submission=6)
    assert [group.group_id for group in found.batch] == [0, 1, 2, 3]
    assert found.dropped == {4: "surplus", 5: "surplus"} and collector.next_group_id == 6


def test_a_solved_task_still_fills_its_rounds() -> None:
    found, collector = _collect(_Scripted(set(range(1000))), drops_zero_std=True)
    assert [group.group_id for group in found.batch] == [0, 1, 2, 3]
    assert collector.next_group_id == 4 * MAX_SUBMISSIONS
    assert 0 not in found.dropped and found.dropped[4] == "zero_std_0.0"


def test_groups_that_are_too_old_are_dropped() -> None:
    collector = make_collector(make_sampler(), _Scripted(set()), max_staleness=1)
    with pytest.raises(RunError, match="no_usable_rollouts"):
        asyncio.run(collector.collect(0, trainer_version=2, stop=StopSignal()))
    collector = make_collector(make_sampler(), _Scripted(set()), max_staleness=2)
    assert len(asyncio.run(collector.collect(0, trainer_version=2, stop=StopSignal())).batch) == 4


def test_a_stop_ends_the_waiting_and_frees_the_engine() -> None:
    async def run() -> int:
        engine = FakeEngine(vocab_size=VOCAB, manual=True)  # never steps by itself
        collector = make_collector(make_sampler(engine), DigitJudge())
        stop = StopSignal()
        asyncio.get_running_loop().call_later(0.01, stop.request)
        with pytest.raises(Stopped):
            await collector.collect(0, trainer_version=0, stop=stop)
        await asyncio.sleep(0)
        return engine.num_active

    assert asyncio.run(run()) == 0
