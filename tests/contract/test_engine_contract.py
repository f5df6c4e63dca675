"""One suite for every engine: what engines/base.py promises, on the torch engine (both drivers) and the fake."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotloop.engines.base import (
    Chunk,
    Engine,
    EngineSettings,
    GenerateRequest,
    TensorRange,
    WeightUpdate,
    collect,
    open_engine,
)
from hotloop.errors import HotloopError, InputError
from hotloop.models.builtin import make_policy
from hotloop.types import SamplingParams

ENGINES = {
    "fake": {"kind": "fake"},
    "torch inline": {"kind": "torch"},
    "torch thread": {"kind": "torch", "driver": "thread"},
    "torch unmerged": {"kind": "torch", "merges_prefixes": False},
}


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder / "p", cache=folder / "cache", max_positions=64)
    return folder / "p"


@pytest.fixture(params=sorted(ENGINES))
def run(request: pytest.FixtureRequest, policy_dir: Path) -> Callable[..., Any]:
    """Run one scenario on a fresh engine and close it."""

    def runner(scenario: Callable[[Engine], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            settings = EngineSettings(policy_dir=str(policy_dir), max_slots=16, **ENGINES[request.param])
            engine = open_engine(settings)
            try:
                return await asyncio.wait_for(scenario(engine), 60)
            finally:
                await engine.close()

        return asyncio.run(whole())

    return runner


def ask(prompt: list[int] | None = None, tokens: int = 8, **options: Any) -> GenerateRequest:
    params = {name: options.pop(name) for name in list(options) if name in SamplingParams.__dataclass_fields__}
    options.setdefault("request_id", "a")
    return GenerateRequest(
        prompt_ids=prompt or [1, 13, 4], params=SamplingParams(tokens, **{"seed": 5, **params}), **options
    )


async def read(engine: Engine, request: GenerateRequest, *, stream: bool = False) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request, stream=stream)]


def test_info_describes_the_policy(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        assert (engine.info.vocab_size, engine.info.max_context, engine.policy_version) == (32, 64, 0)

    run(scenario)


def test_each_completion_has_one_last_chunk_and_equal_lengths(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        chunks = await read(engine, ask(n=5))
        assert sorted(chunk.index for chunk in chunks) == [0, 1, 2, 3, 4]
        for chunk in chunks:
            answer = chunk.completion
            assert chunk.is_last and chunk.finish_reason == answer.finish_reason == "length"
            assert len(answer.token_ids) == len(answer.logprobs) == len(answer.sampling_logprobs) == 8
            assert answer.logprobs == pytest.approx(answer.sampling_logprobs, abs=1e-5)
            assert [(span.start, span.end, span.policy_version) for span in answer.version_spans] == [(0, 8, 0)]
            assert all(value <= 0 for value in answer.logprobs)

    run(scenario)


def test_streaming_gives_the_same_tokens_piece_by_piece(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        whole = await collect(engine, ask(n=3))
        pieces: dict[int, list[int]] = {0: [], 1: [], 2: []}
        chunks = await read(engine, ask(n=3), stream=True)
        for chunk in chunks:
            pieces[chunk.index] += chunk.completion.token_ids
        assert [pieces[index] for index in range(3)] == [answer.token_ids for answer in whole]
        assert sum(chunk.is_last for chunk in chunks) == 3 and len(chunks) > 3

    run(scenario)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        alone = await collect(engine, ask(n=2))
        other = [ask([1, 3 + i], request_id=f"o{i}", seed=i, n=2, tokens=3 + i) for i in range(6)]
        together = (await asyncio.gather(*(collect(engine, one) for one in [*other, ask(n=2)])))[-1]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert alone[0].token_ids != alone[1].token_ids
        swapped = await collect(engine, ask(n=2, seeds=[8, 9]))
        single = await collect(engine, ask(n=1, seeds=[9]))
        assert swapped[1].token_ids == single[0].token_ids

    run(scenario)


def test_more_requests_than_slots_all_finish(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        requests = [ask(request_id=str(i), seed=i, n=7, tokens=4) for i in range(9)]
        answers = await asyncio.gather(*(collect(engine, one) for one in requests))
        assert [len(group) for group in answers] == [7] * 9
        assert all(len(answer.token_ids) == 4 for group in answers for answer in group)

    run(scenario)


def test_greedy_repeats_itself_and_its_sampling_logprob_is_zero(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        first, second = await collect(engine, ask(n=2, temperature=0.0, seed=None))
        assert first.token_ids == second.token_ids
        assert first.sampling_logprobs == [0.0] * 8 and max(first.logprobs) < 0

    run(scenario)


def test_a_stop_token_ends_an_answer_and_stays_in_it(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        (free,) = await collect(engine, ask(tokens=20))
        stop = free.token_ids[6]
        (answer,) = await collect(engine, ask(tokens=20, stop_token_ids=(stop,)))
        cut = free.token_ids.index(stop) + 1
        assert answer.token_ids == free.token_ids[:cut]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)

    run(scenario)


def test_a_stop_string_ends_an_answer_and_its_tokens_stay_whole(run: Callable[..., Any], policy_dir: Path) -> None:
    from hotloop.models.tokenizer import open_tokenizer

    async def scenario(engine: Engine) -> None:
        tokenizer = open_tokenizer(policy_dir)
        (free,) = await collect(engine, ask(tokens=30))
        stop = tokenizer.decode(free.token_ids)[5:7]
        (answer,) = await collect(engine, ask(tokens=30, stop=(stop,)))
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
        assert tokenizer.decode(answer.token_ids).endswith(stop) and stop not in tokenizer.decode(answer.token_ids[:-1])

    run(scenario)


def test_truncation_is_recorded_with_its_support_and_best_tokens(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        (answer,) = await collect(engine, ask(top_k=4, top_p=0.9, return_support=True, top_logprobs=6))
        assert answer.support is not None and answer.top_logprobs is not None
        assert len(answer.support.offsets) == 9 and answer.support.offsets[0] == 0
        for at, token in enumerate(answer.token_ids):
            kept = answer.support.token_ids[answer.support.offsets[at] : answer.support.offsets[at + 1]]
            best, values = answer.top_logprobs.token_ids[at], answer.top_logprobs.logprobs[at]
            assert token in kept and kept == sorted(kept) and 1 <= len(kept) <= 4
            assert sorted(best) == kept and values == sorted(values, reverse=True)
            assert sum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-4)
            assert values[best.index(token)] == pytest.approx(answer.sampling_logprobs[at], abs=1e-5)
            assert answer.sampling_logprobs[at] >= answer.logprobs[at]
        (raw,) = await collect(engine, ask(top_k=4, top_logprobs=6, top_logprobs_kind="raw", return_support=False))
        assert raw.support is None and raw.top_logprobs is not None
        assert all(len(row) == 6 for row in raw.top_logprobs.token_ids)
        (plain,) = await collect(engine, ask(return_support=True))
        assert plain.support is None, "nothing was removed"

    run(scenario)


def test_a_bias_moves_the_draw_and_not_the_raw_logprob(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        (answer,) = await collect(engine, ask(logit_bias={7: 60.0}))
        assert answer.token_ids == [7] * 8
        assert max(map(abs, answer.sampling_logprobs)) < 1e-4 and max(answer.logprobs) < -0.1

    run(scenario)


def test_bad_requests_are_input_errors_and_nothing_stays_behind(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        for request, code in (
            (GenerateRequest("a", [], SamplingParams(1)), "empty_prompt"),
            (ask([1] * 64), "prompt_too_long"),
            (ask([99]), "token_out_of_vocabulary"),
            (ask(n=0), "too_many_completions"),
            (ask(n=17), "too_many_completions"),
        ):
            with pytest.raises(InputError) as caught:
                await read(engine, request)
            assert caught.value.code == code
        assert len((await collect(engine, ask()))[0].token_ids) == 8

    run(scenario)


def test_an_answer_ends_where_the_context_ends(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        (answer,) = await collect(engine, ask([1] * 60, tokens=50))
        assert (len(answer.token_ids), answer.finish_reason) == (4, "length")

    run(scenario)


def test_prompt_logprobs_come_on_the_first_chunk(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        prompt = [1, 13, 4, 9]
        chunks = await read(engine, ask(prompt, return_prompt_logprobs=True), stream=True)
        first = chunks[0].prompt_logprobs
        assert first is not None and first[0] is None and len(first) == 4
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
        # The logprob of the last prompt token is what drawing it would have recorded.
        (drawn,) = await collect(engine, ask(prompt[:-1], tokens=1, top_logprobs=32, top_logprobs_kind="raw"))
        assert drawn.top_logprobs is not None
        wanted = dict(zip(drawn.top_logprobs.token_ids[0], drawn.top_logprobs.logprobs[0], strict=True))[9]
        assert first[3] == pytest.approx(wanted, abs=1e-4)

    run(scenario)


def test_abort_returns_what_was_drawn_and_spares_others(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.abort("nobody")
        long, short = ask(request_id="r1", tokens=50, n=2), ask(request_id="r10", tokens=6)
        other = asyncio.create_task(collect(engine, short))
        chunks: list[Chunk] = []
        async for chunk in engine.generate(long, stream=True):
            chunks.append(chunk)
            if len(chunks) == 4:
                await engine.abort("r1")
        last = [chunk for chunk in chunks if chunk.is_last]
        assert [chunk.finish_reason for chunk in last] == ["abort", "abort"]
        for index in (0, 1):
            ids = [token for chunk in chunks if chunk.index == index for token in chunk.completion.token_ids]
            assert 1 <= len(ids) < 50
            assert ids == (await collect(engine, ask(request_id="again", tokens=50, n=2)))[index].token_ids[: len(ids)]
        assert (await other)[0].finish_reason == "length"

    run(scenario)


def test_a_waiting_request_can_be_aborted(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.pause()
        task = asyncio.create_task(collect(engine, ask(request_id="w", n=3)))
        await asyncio.sleep(0.01)
        await engine.abort("w")
        answers = await asyncio.wait_for(task, 5)
        assert [(answer.token_ids, answer.version_spans, answer.finish_reason) for answer in answers] == [
            ([], [], "abort")
        ] * 3
        await engine.resume()
        assert len((await collect(engine, ask()))[0].token_ids) == 8

    run(scenario)


async def swap_in_flight(engine: Engine, update: WeightUpdate) -> list[Any]:
    """Write an update after the first tokens of a request have come; return its completions."""
    chunks: list[Chunk] = []
    async for chunk in engine.generate(ask(tokens=40, n=3, request_id="s"), stream=True):
        chunks.append(chunk)
        if len(chunks) == 6:
            await engine.pause()
            await engine.write_weights(update)
            await engine.resume()
    return [[chunk.completion for chunk in chunks if chunk.index == index] for index in range(3)]


def test_weights_are_swapped_in_flight_and_every_token_says_by_whom(run: Callable[..., Any], policy_dir: Path) -> None:
    tensors = {name: value * 3 + 0.1 for name, value in load_file(policy_dir / "model.safetensors").items()}

    async def scenario(engine: Engine) -> None:
        before = await collect(engine, ask(tokens=40, n=3))
        answers = await swap_in_flight(engine, WeightUpdate(4, "step000004", tensors=tensors))
        assert engine.policy_version == 4
        for answer, old in zip(answers, before, strict=True):
            ids = [token for part in answer for token in part.token_ids]
            spans = [span for part in answer for span in part.version_spans]
            assert [at for span in spans for at in range(span.start, span.end)] == list(range(40))
            kept = sum(span.end - span.start for span in spans if span.policy_version == 0)
            assert 2 <= kept < 40 and {span.policy_version for span in spans} == {0, 4}
            assert {span.snapshot_identity for span in spans} == {"", "step000004"}
            assert ids[:kept] == old.token_ids[:kept] and ids != old.token_ids
        fresh = await collect(engine, ask(tokens=5))
        assert [(span.start, span.end, span.policy_version) for span in fresh[0].version_spans] == [(0, 5, 4)]

    run(scenario)


def test_a_pause_keeps_requests_and_changes_nothing(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = await collect(engine, ask(tokens=30, n=2))
        task = asyncio.create_task(collect(engine, ask(tokens=30, n=2)))
        await asyncio.sleep(0.002)
        await engine.pause()
        await engine.pause()
        await asyncio.sleep(0.01)
        await engine.resume()
        await engine.resume()
        assert [one.token_ids for one in await task] == [one.token_ids for one in wanted]
        assert [one.logprobs for one in await task] == [pytest.approx(one.logprobs, abs=1e-4) for one in wanted]

    run(scenario)


def test_nothing_is_drawn_while_paused(run: Callable[..., Any]) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.pause()
        task = asyncio.create_task(collect(engine, ask()))
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        await engine.resume()
        assert len((await task)[0].token_ids) == 8

    run(scenario)


def test_a_write_needs_a_pause_while_requests_run_and_is_all_or_nothing(
    run: Callable[..., Any], policy_dir: Path
) -> None:
    tensors = load_file(policy_dir / "model.safetensors")
    name = "model.norm.weight"

    async def scenario(engine: Engine) -> None:
        reader = engine.generate(ask(tokens=60), stream=True)
        await anext(reader)
        with pytest.raises(HotloopError) as caught:
            await engine.write_weights(WeightUpdate(1, tensors=tensors))
        assert caught.value.code == "not_paused"
        await engine.pause()
        bad = [
            WeightUpdate(1, tensors={name: tensors[name] * 9, "nobody": tensors[name]}),
            WeightUpdate(1, tensors={name: tensors[name][:-1]}),
            WeightUpdate(1, ranges=[TensorRange(name, np.array([4 * 64]), np.array([4]), b"1234")]),
            WeightUpdate(1, ranges=[TensorRange(name, np.array([0]), np.array([8]), b"1234")]),
        ]
        for update in bad:
            with pytest.raises(HotloopError) as caught:
                await engine.write_weights(update)
            assert caught.value.code == "install_failed"
            assert engine.policy_version == 0
        await engine.resume()
        await reader.aclose()
        assert (await collect(engine, ask()))[0].logprobs == pytest.approx(
            (await collect(engine, ask()))[0].logprobs, abs=1e-5
        )

    run(scenario)


def test_ranges_and_whole_tensors_lead_to_the_same_policy(run: Callable[..., Any], policy_dir: Path) -> None:
    old = load_file(policy_dir / "model.safetensors")
    rng = np.random.default_rng(0)
    new = {name: value + (rng.random(value.shape) < 0.05).astype(np.float32) for name, value in old.items()}
    ranges = []
    for name, value in new.items():
        where = np.flatnonzero((value != old[name]).reshape(-1))
        data = value.reshape(-1)[where].tobytes()
        ranges.append(TensorRange(name, where * 4, np.full(len(where), 4), data))

    async def scenario(engine: Engine) -> None:
        first = await collect(engine, ask(tokens=20))
        await engine.write_weights(WeightUpdate(1, tensors=new))
        whole = await collect(engine, ask(tokens=20))
        await engine.write_weights(WeightUpdate(2, tensors=old))
        assert (await collect(engine, ask(tokens=20)))[0].token_ids == first[0].token_ids
        await engine.write_weights(WeightUpdate(3, "step000003", ranges=ranges))
        by_range = await collect(engine, ask(tokens=20))
        assert by_range[0].token_ids == whole[0].token_ids != first[0].token_ids
        assert by_range[0].logprobs == pytest.approx(whole[0].logprobs, abs=1e-6)
        assert by_range[0].version_spans[0].snapshot_identity == "step000003"

    run(scenario)
