"""The Engine port over SGLang and vLLM stand-ins: the suite of every engine where it applies, then what only they do.

Left out, because one logprob a token cannot describe it (the adapters refuse it, tested below): truncation and its
support, biases, prompt logprobs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_stand_ins import SglangStandIn, StandIn, VllmStandIn, route_of
from safetensors.numpy import load_file, save_file
from test_engine_contract import (
    ask,
    read,
    swap_in_flight,
    test_a_pause_keeps_requests_and_changes_nothing,
    test_a_seed_gives_the_same_tokens_whatever_else_runs,
    test_a_stop_string_ends_an_answer_and_its_tokens_stay_whole,
    test_a_stop_token_ends_an_answer_and_stays_in_it,
    test_a_waiting_request_can_be_aborted,
    test_a_write_needs_a_pause_while_requests_run_and_is_all_or_nothing,
    test_abort_returns_what_was_drawn_and_spares_others,
    test_an_answer_ends_where_the_context_ends,
    test_bad_requests_are_input_errors_and_nothing_stays_behind,
    test_each_completion_has_one_last_chunk_and_equal_lengths,
    test_greedy_repeats_itself_and_its_sampling_logprob_is_zero,
    test_info_describes_the_policy,
    test_more_requests_than_slots_all_finish,
    test_nothing_is_drawn_while_paused,
    test_ranges_and_whole_tensors_lead_to_the_same_policy,
    test_streaming_gives_the_same_tokens_piece_by_piece,
    test_weights_are_swapped_in_flight_and_every_token_says_by_whom,
)

from hotloop.engines.base import EngineSettings, WeightUpdate, collect, open_engine
from hotloop.engines.vllm import make_salt
from hotloop.errors import HotloopError, InputError
from hotloop.models.builtin import make_policy

__all__ = [  # the suite of every engine, collected here again with this file's `run`
    "test_a_pause_keeps_requests_and_changes_nothing",
    "test_a_seed_gives_the_same_tokens_whatever_else_runs",
    "test_a_stop_string_ends_an_answer_and_its_tokens_stay_whole",
    "test_a_stop_token_ends_an_answer_and_stays_in_it",
    "test_a_waiting_request_can_be_aborted",
    "test_a_write_needs_a_pause_while_requests_run_and_is_all_or_nothing",
    "test_abort_returns_what_was_drawn_and_spares_others",
    "test_an_answer_ends_where_the_context_ends",
    "test_bad_requests_are_input_errors_and_nothing_stays_behind",
    "test_each_completion_has_one_last_chunk_and_equal_lengths",
    "test_greedy_repeats_itself_and_its_sampling_logprob_is_zero",
    "test_info_describes_the_policy",
    "test_more_requests_than_slots_all_finish",
    "test_nothing_is_drawn_while_paused",
    "test_ranges_and_whole_tensors_lead_to_the_same_policy",
    "test_streaming_gives_the_same_tokens_piece_by_piece",
    "test_weights_are_swapped_in_flight_and_every_token_says_by_whom",
]
SERVERS = {"sglang": SglangStandIn, "vllm": VllmStandIn}
Scenario = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for kind in ("dense", "moe"):
        make_policy(folder / kind, kind=kind, warmup_max_steps=0, cache=folder / "cache", max_positions=64)
    return folder


@pytest.fixture
def policy_dir(made: Path, tmp_path: Path) -> Path:
    """A copy for each test, since adapters patch their checkpoint."""
    return copy_policy(made / "dense", tmp_path / "policy")


def copy_policy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def start(kind: str, policy_dir: Path, scenario: Scenario, **options: Any) -> Any:
    """Run a scenario on an adapter and its stand-in, in one event loop."""

    async def whole() -> Any:
        stand_in = SERVERS[kind](policy_dir, **options)
        await stand_in.start()
        engine = open_engine(EngineSettings(kind=kind, policy_dir=str(policy_dir), url=stand_in.url, max_slots=16))  # type: ignore[arg-type]  # one of two words
        try:
            return await asyncio.wait_for(scenario(engine, stand_in), 60)
        finally:
            await engine.close()
            await stand_in.stop()

    return asyncio.run(whole())


@pytest.fixture(params=sorted(SERVERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(kind: str, policy_dir: Path) -> Callable[..., Any]:
    """The suite's way to run a scenario."""
    return lambda scenario: start(kind, policy_dir, lambda engine, stand_in: scenario(engine))


def changed(policy_dir: Path) -> dict[str, Any]:
    return {name: value * 3 + 0.1 for name, value in load_file(policy_dir / "model.safetensors").items()}


def test_what_one_logprob_a_token_cannot_describe_is_refused(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        for options in (
            {"temperature": 0.7},
            {"top_p": 0.9},
            {"top_k": 4},
            {"min_p": 0.1},
            {"logit_bias": {7: 5.0}},
            {"return_prompt_logprobs": True},
        ):
            with pytest.raises(InputError) as caught:
                await collect(engine, ask(**options))  # type: ignore[arg-type]  # one of several types
            assert caught.value.code == "not_offered_by_engine"

    start(kind, policy_dir, scenario)


def test_top_logprobs_are_the_k_best_of_each_position(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        (answer,) = await collect(engine, ask(top_logprobs=3))
        last = 4  # the prompt's last token; the fake's logits depend on the last token only
        for at, token in enumerate(answer.token_ids):
            raw = stand_in.engine.distribution(last)
            best = sorted(range(32), key=lambda one: (-raw[one], one))[:3]
            assert answer.top_logprobs.token_ids[at] == best
            assert answer.top_logprobs.logprobs[at] == pytest.approx([raw[one] for one in best])
            assert answer.logprobs[at] == answer.sampling_logprobs[at] == pytest.approx(raw[token])
            last = token
        (greedy,) = await collect(engine, ask(top_logprobs=3, temperature=0.0))
        assert greedy.top_logprobs.token_ids == [[token] for token in greedy.token_ids]
        assert greedy.top_logprobs.logprobs == [[0.0]] * 8

    start(kind, policy_dir, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_routes_have_a_row_for_every_position_but_the_last(kind: str, made: Path, tmp_path: Path, stream: bool) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        chunks = await read(engine, ask(return_routed_experts=True), stream=stream)
        routes = chunks[-1].completion.routed_experts
        assert routes.shape == (3 + 8 - 1, stand_in.layers, stand_in.top_k) and routes.dtype == np.uint8
        assert routes[9, 1, 1] == route_of(9, 1, 1, stand_in.experts)
        assert all(chunk.completion.routed_experts is None for chunk in chunks[:-1])

    start(kind, copy_policy(made / "moe", tmp_path / "moe"), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_without_spans_is_believed_until_weights_change_under_a_request(
    kind: str, policy_dir: Path, stream: bool
) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        await engine.write_weights(WeightUpdate(3, "step000003"))
        chunks = await read(engine, ask(), stream=stream)
        spans = [span for chunk in chunks for span in chunk.completion.version_spans]
        assert [(span.policy_version, span.snapshot_identity) for span in spans] == [(3, "step000003")] * len(spans)
        assert spans[0].start == 0 and spans[-1].end == 8
        reader = engine.generate(ask(tokens=40), stream=True)
        await anext(reader)
        await engine.pause()
        await engine.write_weights(WeightUpdate(4, "step000004", tensors=changed(policy_dir)))
        await engine.resume()
        with pytest.raises(HotloopError, match="which token is whose"):
            async for chunk in reader:
                assert {span.policy_version for span in chunk.completion.version_spans} == {3}
        (fresh,) = await collect(engine, ask())
        assert [span.policy_version for span in fresh.version_spans] == [4]

    start(kind, policy_dir, scenario, sends_spans=False)


def test_the_first_write_makes_the_server_read_the_checkpoint(kind: str, made: Path, tmp_path: Path) -> None:
    """A server may have been started on other weights than those of the snapshot that is opened."""
    other = copy_policy(made / "dense", tmp_path / "other")
    save_file(changed(other), other / "model.safetensors", metadata={"format": "pt"})
    mine = copy_policy(made / "dense", tmp_path / "mine")

    async def scenario(engine: Any, stand_in: StandIn) -> None:
        opened = open_engine(EngineSettings(kind=kind, policy_dir=str(mine), url=stand_in.url))  # type: ignore[arg-type]  # one of two words
        await opened.pause()
        await opened.write_weights(WeightUpdate(1, "step000001"))
        await opened.resume()
        name = "model.norm.weight"
        assert stand_in.engine.tensor_bytes(name) == load_file(mine / "model.safetensors")[name].tobytes()
        assert stand_in.label == "1"
        await opened.write_weights(WeightUpdate(2, "step000002"))
        assert stand_in.label == "2" and [call for call, _ in stand_in.calls].count("label") >= 1
        (answer,) = await collect(opened, ask())
        assert [span.policy_version for span in answer.version_spans] == [2]
        await opened.close()

    start(kind, other, scenario)


def test_an_update_without_bytes_spares_requests(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        await engine.write_weights(WeightUpdate(1, "step000001"))
        reader = engine.generate(ask(tokens=40), stream=True)
        chunks = [await anext(reader)]
        await engine.pause()
        await engine.write_weights(WeightUpdate(2, "step000002"))
        await engine.resume()
        chunks += [chunk async for chunk in reader]
        spans = [span for chunk in chunks for span in chunk.completion.version_spans]
        assert {span.policy_version for span in spans} == {1, 2} and spans[-1].end == 40
        assert chunks[-1].finish_reason == "length"

    start(kind, policy_dir, scenario)


def test_pauses_and_resumes_may_be_repeated_and_keep_requests(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        await engine.resume()
        for _ in range(2):
            await engine.pause()
        body = next(body for call, body in stand_in.calls if call == "pause")
        assert body["mode"] == {"sglang": "in_place", "vllm": "keep"}[kind]
        for _ in range(2):
            await engine.resume()
        assert len((await collect(engine, ask()))[0].token_ids) == 8
        assert [call for call, _ in stand_in.calls] == ["pause", {"sglang": "continue", "vllm": "resume"}[kind]]

    start(kind, policy_dir, scenario)


def test_no_call_id_is_a_prefix_of_another_and_unknown_ids_send_nothing(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        await engine.abort("nobody")
        assert stand_in.calls == []
        await engine.pause()
        tasks = [asyncio.create_task(collect(engine, ask(request_id=name, n=3))) for name in ("r1", "r10")]
        while len(stand_in._running) < 6:
            await asyncio.sleep(0.001)
        assert {len(call_id) for call_id in stand_in._running} == {32}
        await engine.abort("r1")
        await engine.resume()
        assert [one.finish_reason for one in await tasks[0]] == ["abort"] * 3
        assert [one.finish_reason for one in await tasks[1]] == ["length"] * 3

    start(kind, policy_dir, scenario)


def test_a_reader_that_goes_away_ends_its_request_at_the_server(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        reader = engine.generate(ask(tokens=60), stream=True)
        await anext(reader)
        await reader.aclose()
        while stand_in.engine.num_active:
            await asyncio.sleep(0.001)

    start(kind, policy_dir, scenario)


def test_prefixes_are_reused_within_a_version_and_namespace_only(kind: str, policy_dir: Path) -> None:
    prompt = [1, 13, 4, 9, 8, 5]

    async def scenario(engine: Any, stand_in: StandIn) -> None:
        salts = []
        run = stand_in.run

        def spy(call_id: str, request: Any) -> Any:
            salts.append(request.cache_namespace)
            return run(call_id, request)

        stand_in.run = spy  # type: ignore[method-assign]  # reads what the server is asked
        await engine.write_weights(WeightUpdate(1, "step000001"))
        for namespace in ("a", "b"):
            await collect(engine, ask(prompt, cache_namespace=namespace))
        await engine.write_weights(WeightUpdate(2, "step000002", tensors=changed(policy_dir)))
        await collect(engine, ask(prompt, cache_namespace="a"))
        expected = [(1, "a"), (1, "b"), (2, "a")]
        assert salts == [make_salt(*each) if kind == "vllm" else "{}/{}".format(*each) for each in expected]

    start(kind, policy_dir, scenario)


@pytest.mark.parametrize("status", ["200", "400"])
def test_sglang_refusing_an_update_leaves_version_and_checkpoint(policy_dir: Path, status: str) -> None:
    before = (policy_dir / "model.safetensors").read_bytes()

    async def scenario(engine: Any, stand_in: StandIn) -> None:
        await engine.write_weights(WeightUpdate(1, "step000001"))
        stand_in.refuses_updates = status
        with pytest.raises(HotloopError) as caught:
            await engine.write_weights(WeightUpdate(2, "step000002", tensors=changed(policy_dir)))
        assert caught.value.code == "engine_error" and "out of memory" in str(caught.value)
        assert engine.policy_version == 1 and (policy_dir / "model.safetensors").read_bytes() == before
        (answer,) = await collect(engine, ask())
        assert [span.policy_version for span in answer.version_spans] == [1]

    start("sglang", policy_dir, scenario)


def test_vllm_failing_a_reload_leaves_weights_that_nobody_can_name(policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        stand_in.refuses_updates = "500"
        with pytest.raises(HotloopError) as caught:
            await engine.write_weights(WeightUpdate(2, "step000002", tensors=changed(policy_dir)))
        assert caught.value.code == "install_failed" and engine.policy_version == 0

    start("vllm", policy_dir, scenario)


def policy_with_head(policy_dir: Path, *, ties_head: bool) -> None:
    """Tie the head of a policy to its embedding, or give it one of its own."""
    config = json.loads((policy_dir / "config.json").read_text())
    tensors = load_file(policy_dir / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if not ties_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, policy_dir / "model.safetensors", metadata={"format": "pt"})
    (policy_dir / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": ties_head}))


@pytest.mark.parametrize("with_bytes", [True, False], ids=["delta", "first read"])
def test_vllm_on_a_cpu_is_not_given_a_version_that_its_tied_head_would_not_have(
    policy_dir: Path, with_bytes: bool
) -> None:
    policy_with_head(policy_dir, ties_head=True)
    before = (policy_dir / "model.safetensors").read_bytes()

    async def scenario(engine: Any, stand_in: Any) -> None:
        stand_in.device = "cpu"
        tensors = changed(policy_dir) if with_bytes else {}
        with pytest.raises(HotloopError, match="tied to the embedding") as caught:
            await engine.write_weights(WeightUpdate(2, "step000002", tensors=tensors))
        assert caught.value.code == "engine_error" and not caught.value.retryable
        assert "HeadReload" in str(caught.value)
        assert [call for call, _ in stand_in.calls] == ["server_info"], "nothing was reloaded or labelled"
        assert engine.policy_version == 0 and (policy_dir / "model.safetensors").read_bytes() == before
        (answer,) = await collect(engine, ask())
        assert [span.policy_version for span in answer.version_spans] == [0]

    start("vllm", policy_dir, scenario)


@pytest.mark.parametrize(
    ("device", "ties_head", "options"),
    [
        ("cuda", True, {}),
        ("cpu", False, {}),
        ("cpu", True, {"reload_method": "reload_with_head"}),
    ],
    ids=["gpu", "own head", "head reload"],
)
def test_vllm_holds_every_tensor_of_the_version_that_it_is_given(
    policy_dir: Path, device: str, ties_head: bool, options: dict[str, Any]
) -> None:
    policy_with_head(policy_dir, ties_head=ties_head)

    async def scenario(engine: Any, stand_in: Any) -> None:
        stand_in.device = device
        settings = EngineSettings(kind="vllm", policy_dir=str(policy_dir), url=stand_in.url, options=options)
        opened = open_engine(settings)
        tensors = changed(policy_dir)
        await opened.write_weights(WeightUpdate(2, "step000002", tensors=tensors))
        for name, values in tensors.items():
            assert stand_in.engine.tensor_bytes(name) == values.tobytes(), name
        assert opened.policy_version == 2 and stand_in.label == "2"
        await opened.write_weights(WeightUpdate(3, "step000003", tensors=changed(policy_dir)))
        assert [call for call, _ in stand_in.calls].count("server_info") == (0 if options else 1)
        await opened.close()

    start("vllm", policy_dir, scenario)


def test_a_server_that_was_relabelled_by_others_is_not_believed(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        await engine.write_weights(WeightUpdate(1, "step000001"))
        await stand_in.relabel("default")
        with pytest.raises(HotloopError, match="was it restarted"):
            await collect(engine, ask())

    start(kind, policy_dir, scenario)


def test_a_server_that_is_gone_is_an_engine_error_and_a_write_to_it_a_failed_install(
    kind: str, policy_dir: Path
) -> None:
    engine = open_engine(EngineSettings(kind=kind, policy_dir=str(policy_dir), url="http://127.0.0.1:9"))  # type: ignore[arg-type]  # one of two words

    async def scenario() -> None:
        with pytest.raises(HotloopError) as caught:
            await collect(engine, ask())
        assert caught.value.code == "engine_error" and caught.value.retryable
        with pytest.raises(HotloopError) as caught:
            await engine.write_weights(WeightUpdate(1, "step000001", tensors=changed(policy_dir)))
        assert caught.value.code == "install_failed" and engine.policy_version == 0
        await engine.close()

    asyncio.run(scenario())


def test_an_engine_without_an_address_or_a_checkpoint_is_refused(kind: str, policy_dir: Path, tmp_path: Path) -> None:
    for folder, url, code in (
        (policy_dir, "localhost:30000", "engine_address"),
        (tmp_path, "http://127.0.0.1:9", "checkpoint_unreadable"),
    ):
        with pytest.raises(InputError) as caught:
            open_engine(EngineSettings(kind=kind, policy_dir=str(folder), url=url))  # type: ignore[arg-type]  # one of two words
        assert caught.value.code == code


def test_an_event_may_be_longer_than_any_buffer(policy_dir: Path) -> None:
    """SGLang repeats everything so far; 30 best tokens a position make events of many kilobytes."""

    async def scenario(engine: Any, stand_in: StandIn) -> None:
        answer = stand_in._answer  # type: ignore[attr-defined]  # of the SGLang stand-in
        stand_in._answer = lambda *given: {**answer(*given), "text": "x" * 400_000}  # type: ignore[attr-defined]  # as above
        chunks = await read(engine, ask(tokens=6), stream=True)
        assert sum(len(chunk.completion.token_ids) for chunk in chunks) == 6

    start("sglang", policy_dir, scenario)


def test_a_swap_in_flight_leaves_spans_without_gaps(kind: str, policy_dir: Path) -> None:
    async def scenario(engine: Any, stand_in: StandIn) -> None:
        for parts in await swap_in_flight(engine, WeightUpdate(4, "step000004", tensors=changed(policy_dir))):
            spans = [span for part in parts for span in part.version_spans]
            assert [(a.end, b.start) for a, b in itertools.pairwise(spans) if a.end != b.start] == []
            assert spans[0].start == 0 and spans[-1].end == sum(len(part.token_ids) for part in parts) == 40
            for part in parts:
                assert sum(span.end - span.start for span in part.version_spans) == len(part.token_ids)

    start(kind, policy_dir, scenario)
