"""The embedded engine against plain forward passes and transformers: tokens, logprobs, swaps, routes, reuse."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path

import engine_policies as policies
import numpy as np
import pytest
import torch

from hotloop.engines.base import EngineSettings, GenerateRequest, WeightUpdate, collect
from hotloop.engines.torch.engine import TorchEngine, build_engine
from hotloop.engines.torch.foreign import ForeignRunner
from hotloop.engines.torch.runner import NativeRunner, Prefill
from hotloop.engines.torch.small import SmallDecoder
from hotloop.errors import HotloopError, InputError
from hotloop.models.decoder import forward
from hotloop.models.weights import Arena, read_policy
from hotloop.types import Completion, SamplingParams


def make_prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, policies.VOCAB, size=rng.integers(1, longest)).tolist() for _ in range(count)]


def make_engine(arena: Arena, **settings: object) -> TorchEngine:
    return TorchEngine(arena.config, arena, EngineSettings(**{"max_slots": 16, **settings}))


def mixed_requests(count: int = 20) -> list[GenerateRequest]:
    """Requests of different lengths, sizes and stops, more than the slots hold at once."""
    rng = np.random.default_rng(3)
    return [
        GenerateRequest(
            str(index),
            prompt,
            SamplingParams(max_new_tokens=int(rng.integers(1, 25)), temperature=0.8, seed=index, stop_token_ids=(5, 6)),
            n=int(rng.integers(1, 9)),
        )
        for index, prompt in enumerate(make_prompts(count))
    ]


def tokens_of(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[one.token_ids for one in group] for group in answers]


def join(parts: Iterable[list]) -> list:
    return list(itertools.chain.from_iterable(parts))


def check_logprobs(arena: Arena, request: GenerateRequest, answer: Completion) -> None:
    """Compare both logprobs with one full forward pass, within 1e-4."""
    prompt = list(request.prompt_ids)
    rows = policies.full_logits(arena.config, arena, prompt + answer.token_ids)[len(prompt) - 1 : -1]
    chosen = torch.tensor(answer.token_ids)[:, None]
    raw = torch.log_softmax(rows, -1).gather(1, chosen)[:, 0]
    scaled = torch.log_softmax(rows / request.params.temperature, -1).gather(1, chosen)[:, 0]
    np.testing.assert_allclose(answer.logprobs, raw, atol=1e-4, rtol=0)
    np.testing.assert_allclose(answer.sampling_logprobs, scaled, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_greedy_equals_transformers_generate_token_for_token(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    arena = policies.save_policy(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = make_prompts(9)
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    answers = make_engine(arena, max_slots=4).run(
        [GenerateRequest(str(i), one, params) for i, one in enumerate(prompts)]
    )
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert answer.token_ids == wanted[0, len(prompt) :].tolist()
        assert answer.sampling_logprobs == [0.0] * 24


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logprobs_equal_a_full_forward_across_padding_and_slot_reuse(kind: str) -> None:
    arena = policies.make_arena(kind)
    requests = mixed_requests()
    assert sum(request.n for request in requests) > 3 * 16
    for request, group in zip(requests, make_engine(arena).run(requests), strict=True):
        assert len(group) == request.n
        for answer in group:
            check_logprobs(arena, request, answer)
            stopped = answer.token_ids[-1] in (5, 6)
            assert answer.finish_reason == ("stop" if stopped else "length")
            assert answer.stop_reason == (answer.token_ids[-1] if stopped else None)
            assert stopped or len(answer.token_ids) == request.params.max_new_tokens


def test_tokens_do_not_depend_on_what_runs_beside_nor_on_sharing_rows() -> None:
    arena = policies.make_arena()
    requests = mixed_requests()
    together = make_engine(arena)
    wanted = tokens_of(together.run(requests))
    separate = make_engine(arena, merges_prefixes=False)
    assert tokens_of(separate.run(requests)) == wanted
    assert together.counters.row_tokens < separate.counters.row_tokens
    assert together.counters.drawn_tokens == separate.counters.drawn_tokens
    alone = make_engine(arena, max_slots=8)
    assert [tokens_of(alone.run([request]))[0] for request in requests] == wanted

    async def gather() -> list[list[Completion]]:
        return await asyncio.gather(*(collect(together, request) for request in requests))

    assert tokens_of(asyncio.run(gather())) == wanted


def test_explicit_seeds_name_completions_one_by_one() -> None:
    engine = make_engine(policies.make_arena())
    params = SamplingParams(max_new_tokens=12)
    many = engine.run([GenerateRequest("a", [1, 2], params, n=3, seeds=[11, 12, 11])])[0]
    one = engine.run([GenerateRequest("b", [1, 2], params, n=1, seeds=[12])])[0]
    assert many[0].token_ids == many[2].token_ids != many[1].token_ids
    assert one[0].token_ids == many[1].token_ids
    free = engine.run([GenerateRequest("c", [1, 2], params, n=8)])[0]
    assert len({tuple(answer.token_ids) for answer in free}) > 1


def test_a_group_prefills_its_prompt_once_and_equal_prompts_share() -> None:
    engine = make_engine(policies.make_arena())
    prompt = make_prompts(1, seed=5)[0] + [1] * 10
    params = SamplingParams(max_new_tokens=4, seed=0)
    engine.run([GenerateRequest("a", prompt, params, n=8)])
    assert engine.counters.prompt_tokens == len(prompt)
    group = engine.run([GenerateRequest(str(i), prompt, params, seeds=[i]) for i in range(8)])
    assert engine.counters.prompt_tokens == 2 * len(prompt)
    seeded = engine.run([GenerateRequest("b", prompt, params, n=8, seeds=range(8))])[0]
    assert [answers[0].token_ids for answers in group] == [answer.token_ids for answer in seeded]


def replay(
    first: Arena, second: Arena, prompt: list[int], answer: Completion, switch: int
) -> tuple[list[float], list[list[int]]]:
    """Feed the sequence with KV kept and weights switched at answer token `switch`: the oracle of a swap."""
    logprobs, routes = [], []
    past = None
    ids = prompt + answer.token_ids
    position = 0
    for index, token in enumerate(answer.token_ids):
        arena = first if index < switch else second
        piece = ids[position : len(prompt) + index]
        with torch.no_grad():
            out = forward(
                arena.config,
                arena.params,
                torch.tensor([piece]),
                torch.arange(position, position + len(piece))[None],
                past=past,
                record_routes=arena.config.num_experts > 0,
            )
        past = [
            (k, v) if past is None else (torch.cat((past[layer][0], k), 1), torch.cat((past[layer][1], v), 1))
            for layer, (k, v) in enumerate(out.kv)
        ]
        if out.routes_BTLK is not None:
            routes.extend(out.routes_BTLK[0].tolist())
        logits = out.hidden_BTD[0, -1] @ arena.params.head.T
        logprobs.append(float(torch.log_softmax(logits, -1)[token]))
        position += len(piece)
    return logprobs, routes


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("switch", [1, 2, 7])
def test_a_swap_in_the_middle_equals_a_replay_with_kv_kept(kind: str, switch: int) -> None:
    old, new = policies.make_arena(kind, seed=0), policies.make_arena(kind, seed=9)
    requests = [
        GenerateRequest(str(i), prompt, SamplingParams(14, seed=i), n=3, return_routed_experts=kind == "moe")
        for i, prompt in enumerate(make_prompts(4))
    ]

    async def scenario() -> list[list[Completion]]:
        engine = make_engine(policies.make_arena(kind, seed=0))
        work = asyncio.gather(*(collect(engine, request) for request in requests))
        await asyncio.sleep(0)
        while engine.counters.drawn_tokens < 12 * switch:
            await asyncio.sleep(0)
        await engine.pause()
        drawn = engine.counters.drawn_tokens
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.counters.drawn_tokens == drawn, "nothing is drawn while paused"
        await engine.write_weights(WeightUpdate(3, "step000003", tensors=new.tensors()))
        assert engine.policy_version == 3
        await engine.resume()
        return await work

    for request, group in zip(requests, asyncio.run(scenario()), strict=True):
        for answer in group:
            first, second = answer.version_spans
            assert (first.start, first.policy_version, first.snapshot_identity) == (0, 0, "")
            assert (second.start, second.policy_version, second.snapshot_identity) == (first.end, 3, "step000003")
            assert second.end == 14 and first.end >= switch
            wanted, routes = replay(old, new, list(request.prompt_ids), answer, first.end)
            np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4, rtol=0)
            if kind == "moe":
                assert answer.routed_experts.tolist() == routes


def test_routes_equal_those_of_the_decoder() -> None:
    arena = policies.make_arena("moe")
    prompts = make_prompts(6)
    requests = [
        GenerateRequest(str(i), one, SamplingParams(10, seed=i), n=4, return_routed_experts=True)
        for i, one in enumerate(prompts)
    ]
    used = set()
    for request, group in zip(requests, make_engine(arena).run(requests), strict=True):
        for answer in group:
            ids = list(request.prompt_ids) + answer.token_ids
            out = forward(
                arena.config, arena.params, torch.tensor([ids]), torch.arange(len(ids))[None], record_routes=True
            )
            assert answer.routed_experts.dtype == np.uint8
            assert answer.routed_experts.shape == (len(ids) - 1, 3, 2)
            assert answer.routed_experts.tolist() == out.routes_BTLK[0, :-1].tolist()
            used |= set(answer.routed_experts[:, 0].ravel().tolist())
    assert len(used) > 3, "the test means little if routes hardly vary"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_streamed_chunks_join_to_the_whole_record(kind: str) -> None:
    engine = make_engine(policies.make_arena(kind))
    request = GenerateRequest(
        "a",
        make_prompts(1)[0] + [3],
        SamplingParams(9, seed=4, top_k=5, stop_token_ids=(7,)),
        n=4,
        top_logprobs=3,
        return_support=True,
        return_routed_experts=kind == "moe",
        return_prompt_logprobs=True,
    )

    async def read() -> dict[int, list]:
        parts: dict[int, list] = {index: [] for index in range(4)}
        async for chunk in engine.generate(request, stream=True):
            parts[chunk.index].append(chunk)
        return parts

    whole = engine.run([request])[0]
    for index, chunks in asyncio.run(read()).items():
        wanted = whole[index]
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert len(chunks) == len(wanted.token_ids)
        assert chunks[0].prompt_logprobs is not None and chunks[-1].finish_reason == wanted.finish_reason
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
        records = [chunk.completion for chunk in chunks]
        for name in ("token_ids", "logprobs", "sampling_logprobs"):
            assert join(getattr(one, name) for one in records) == getattr(wanted, name)
        assert join(one.top_logprobs.token_ids for one in records) == wanted.top_logprobs.token_ids
        assert join(one.support.token_ids for one in records) == wanted.support.token_ids
        assert [one.version_spans[0].start for one in records] == list(range(len(records)))
        if kind == "moe":
            assert np.concatenate([one.routed_experts for one in records]).tolist() == wanted.routed_experts.tolist()
            starts = np.cumsum([0] + [len(one.routed_experts) for one in records])[:-1]
            assert [one.routed_experts_start for one in records] == starts.tolist()


def test_requests_of_different_shapes_run_side_by_side() -> None:
    arena = policies.make_arena()
    engine = make_engine(arena)
    prompt = [4, 9, 2, 17]
    variants = [
        SamplingParams(10, seed=1),
        SamplingParams(10, seed=1, temperature=0.0),
        SamplingParams(10, seed=1, temperature=0.5),
        SamplingParams(10, seed=1, top_p=0.6),
        SamplingParams(10, seed=1, top_k=2, min_p=0.1),
        SamplingParams(10, seed=1, logit_bias={3: 4.0}),
    ]
    requests = [GenerateRequest(str(i), prompt, params, n=2) for i, params in enumerate(variants)]
    together = tokens_of(engine.run(requests))
    assert together == [tokens_of(engine.run([request]))[0] for request in requests]
    assert engine.counters.prompt_tokens == 7 * len(prompt), "equal prompts of one batch are prefilled once"


def test_truncated_sampling_logprobs_and_support_follow_the_logits() -> None:
    arena = policies.make_arena()
    request = GenerateRequest(
        "a", [4, 9], SamplingParams(12, seed=2, top_p=0.7, temperature=1.3), n=3, return_support=True
    )
    for answer in make_engine(arena).run([request])[0]:
        rows = policies.full_logits(arena.config, arena, [4, 9, *answer.token_ids])[1:-1]
        for at, token in enumerate(answer.token_ids):
            kept = answer.support.token_ids[answer.support.offsets[at] : answer.support.offsets[at + 1]]
            assert token in kept and kept == sorted(kept)
            scaled = torch.softmax(rows[at] / 1.3, -1)
            order = scaled.argsort(descending=True).tolist()
            assert set(kept) == set(order[: len(kept)])
            assert scaled[order[: len(kept)]].sum() >= 0.7 - 1e-5 > scaled[order[: len(kept) - 1]].sum() - 2e-5
            wanted = torch.log(scaled[token] / scaled[kept].sum())
            assert answer.sampling_logprobs[at] == pytest.approx(float(wanted), abs=1e-4)


def test_the_answer_ends_with_the_context() -> None:
    engine = make_engine(policies.make_arena(), max_context=20)
    (answer,) = engine.run([GenerateRequest("a", [1] * 15, SamplingParams(100, seed=0))])[0]
    assert (len(answer.token_ids), answer.finish_reason) == (5, "length")
    check_logprobs(policies.make_arena(), GenerateRequest("a", [1] * 15, SamplingParams(100)), answer)


def test_prompt_logprobs_and_no_new_tokens_score_a_prompt() -> None:
    arena = policies.make_arena()
    prompt = make_prompts(1, seed=8)[0] + [1, 2, 3]
    engine = make_engine(arena)

    async def read() -> list:
        request = GenerateRequest("a", prompt, SamplingParams(0), n=2, return_prompt_logprobs=True)
        return [chunk async for chunk in engine.generate(request)]

    chunks = asyncio.run(read())
    wanted = torch.log_softmax(policies.full_logits(arena.config, arena, prompt), -1)
    for chunk in chunks:
        assert (chunk.completion.token_ids, chunk.completion.version_spans) == ([], [])
        assert chunk.prompt_logprobs[0] is None
        found = torch.tensor(chunk.prompt_logprobs[1:])
        torch.testing.assert_close(found, wanted[range(len(prompt) - 1), prompt[1:]], atol=1e-4, rtol=0)
    assert len(chunks) == 2 and not engine._core.has_work


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_reused_prefix_gives_the_same_answer_and_namespaces_are_apart(kind: str) -> None:
    arena = policies.make_arena(kind)
    plain, cached = make_engine(arena), make_engine(arena, prefix_cache_tokens=256)
    prompt = make_prompts(1, seed=2, longest=2)[0] * 40
    longer = [*prompt, 5, 6, 7]

    def ask(engine: TorchEngine, ids: list[int], namespace: str) -> Completion:
        request = GenerateRequest(
            "a", ids, SamplingParams(8, seed=1), cache_namespace=namespace, return_routed_experts=kind == "moe"
        )
        return engine.run([request])[0][0]

    for ids, namespace, reused in ((prompt, "x", 0), (prompt, "x", 32), (longer, "x", 32), (longer, "y", 0)):
        found, wanted = ask(cached, ids, namespace), ask(plain, ids, namespace)
        assert (found.cached_tokens, wanted.cached_tokens) == (reused, 0)
        assert found.token_ids == wanted.token_ids
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)
        if kind == "moe":
            assert found.routed_experts.tolist() == wanted.routed_experts.tolist()
    turn = ask(cached, prompt, "x")
    next_turn = prompt + turn.token_ids + [1]
    assert ask(cached, next_turn, "x").cached_tokens == 32 + 16 * ((len(next_turn) - 2) // 16 - 2)


def test_the_prefix_cache_forgets_the_oldest_and_stays_within_its_size() -> None:
    engine = make_engine(policies.make_arena(), prefix_cache_tokens=64)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32, size=33).tolist() for _ in range(3)]
    params = SamplingParams(1, seed=0)
    for prompt in prompts:
        engine.run([GenerateRequest("a", prompt, params)])
    assert engine._core._prefix.num_tokens == 64
    reused = [engine.run([GenerateRequest("a", prompt, params)])[0][0].cached_tokens for prompt in reversed(prompts)]
    assert reused == [32, 32, 0]


def test_stop_strings_end_an_answer_and_keep_its_tokens(tmp_path: Path) -> None:
    policies.save_policy(tmp_path)
    engine = build_engine(EngineSettings(policy_dir=str(tmp_path), max_slots=8))
    free = engine.run([GenerateRequest("a", [1, 5], SamplingParams(30, seed=3))])[0][0]
    text = engine._open_tokenizer().decode(free.token_ids)
    stop = text[8:10]
    (answer,) = engine.run([GenerateRequest("a", [1, 5], SamplingParams(30, seed=3, stop=("no such text", stop)))])[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert engine._open_tokenizer().decode(answer.token_ids).endswith(stop)
    assert len(answer.token_ids) < 30


@pytest.mark.parametrize("step", ["small", "operators"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_plain_runner_and_the_fast_one_agree(kind: str, step: str) -> None:
    arena = policies.make_arena(kind)
    prompts = make_prompts(5)
    runners = [make(arena.config, arena, num_slots=6, max_context=64) for make in (NativeRunner, ForeignRunner)]
    assert isinstance(runners[0]._small, SmallDecoder)
    if step == "operators":
        runners[0]._small = None  # what a GPU runs
    results = [one.prefill([Prefill(row, 0, ids) for row, ids in enumerate(prompts)]) for one in runners]
    torch.testing.assert_close(results[0].last_logits, results[1].last_logits, rtol=1e-4, atol=1e-4)
    lengths = np.array([len(ids) for ids in prompts])
    for step in range(4):
        tokens = np.arange(5) + step
        (fast, fast_routes), (plain, plain_routes) = (one.decode(tokens, lengths + step) for one in runners)
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
        if kind == "moe":
            assert fast_routes.tolist() == plain_routes.tolist()


def test_a_long_prompt_is_prefilled_in_pieces_and_uneven_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.engines.torch import runner

    monkeypatch.setattr(runner, "PREFILL_PIECE_TOKENS", 8)
    monkeypatch.setattr(runner, "PREFILL_CHUNK_TOKENS", 40)
    arena = policies.make_arena()
    prompts = [[*range(30)], [3], [5] * 8, [7] * 9, [*range(20)]]
    engine = make_engine(arena)
    requests = [GenerateRequest(str(i), one, SamplingParams(6, seed=i)) for i, one in enumerate(prompts)]
    for request, (answer,) in zip(requests, engine.run(requests), strict=True):
        check_logprobs(arena, request, answer)


def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    arena = policies.save_policy(tmp_path, scale=0.15)
    engine = build_engine(EngineSettings(policy_dir=str(tmp_path), dtype="bf16", max_slots=8))
    request = GenerateRequest("a", [1, 2, 3], SamplingParams(16, seed=0), n=4)
    for answer in engine.run([request])[0]:
        rows = policies.full_logits(arena.config, arena, [1, 2, 3, *answer.token_ids])[2:-1]
        raw = torch.log_softmax(rows, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert np.abs(np.array(answer.logprobs) - raw.numpy()).max() < 0.15


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_groups_over_long_prompts_read_the_prompt_once_and_give_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.engines.torch import core, trunk

    arena = policies.make_arena(kind)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, policies.VOCAB, size=size).tolist() for size in (64, 70, 64, 79)]
    requests = [
        GenerateRequest(
            str(i), one, SamplingParams(15, seed=i, stop_token_ids=(5,)), n=4, return_routed_experts=kind == "moe"
        )
        for i, one in enumerate(prompts)
    ]
    calls = []
    attend = trunk.TrunkLayout.attend
    monkeypatch.setattr(
        trunk.TrunkLayout, "attend", lambda *args, **more: calls.append(len(args[2])) or attend(*args, **more)
    )
    engine = make_engine(arena)
    shared = engine.run(requests)
    assert len(calls) > 20 and max(calls) == 16
    for request, group in zip(requests, shared, strict=True):
        for answer in group:
            check_logprobs(arena, request, answer)
    monkeypatch.setattr(core, "MIN_PROMPT_TOKENS", 10**9)
    calls.clear()
    plain = make_engine(arena).run(requests)
    assert not calls
    assert tokens_of(plain) == tokens_of(shared)
    if kind == "moe":
        for one, other in zip(join(plain), join(shared), strict=True):
            assert one.routed_experts.tolist() == other.routed_experts.tolist()


def test_a_group_beside_a_single_request_falls_back_to_plain_attention() -> None:
    arena = policies.make_arena()
    requests = [
        GenerateRequest("a", [*range(32)] * 2, SamplingParams(12, seed=1), n=4),
        GenerateRequest("b", [3, 4], SamplingParams(5, seed=2)),
    ]
    engine = make_engine(arena)
    for request, group in zip(requests, engine.run(requests), strict=True):
        for answer in group:
            check_logprobs(arena, request, answer)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (GenerateRequest("a", [], SamplingParams(1)), "empty_prompt"),
        (GenerateRequest("a", [1] * 96, SamplingParams(1)), "prompt_too_long"),
        (GenerateRequest("a", [32], SamplingParams(1)), "token_out_of_vocabulary"),
        (GenerateRequest("a", [-1], SamplingParams(1)), "token_out_of_vocabulary"),
        (GenerateRequest("a", [1], SamplingParams(1), n=17), "too_many_completions"),
        (GenerateRequest("a", [1], SamplingParams(1), n=2, seeds=[1]), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(-1)), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(1, temperature=-0.1)), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(1, top_p=0.0)), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(1, top_k=0)), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(1, min_p=2.0)), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(1, logit_bias={99: 1.0})), "sampling_params"),
        (GenerateRequest("a", [1], SamplingParams(1, stop=("x",))), "tokenizer_not_found"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing_behind(request_: GenerateRequest, code: str) -> None:
    engine = make_engine(policies.make_arena())
    with pytest.raises(InputError) as caught:
        engine.run([request_])
    assert caught.value.code == code
    assert not engine._core.has_work


def test_bad_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies.save_policy(tmp_path)
    with pytest.raises(InputError) as caught:
        build_engine(EngineSettings(policy_dir=str(tmp_path), max_context=97))
    assert caught.value.code == "engine_settings"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError) as caught:
        build_engine(EngineSettings(policy_dir=str(tmp_path), device="cuda"))
    assert caught.value.code == "engine_settings"
    with pytest.raises(InputError) as caught:
        build_engine(EngineSettings(policy_dir=str(tmp_path), max_slots=10**9))
    assert caught.value.code == "policy_too_large"


@pytest.mark.parametrize("driver", ["inline", "thread"])
def test_a_step_that_fails_reaches_every_request_and_the_engine_goes_on(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = make_engine(policies.make_arena(), driver=driver)
        decode = engine._runner.decode
        monkeypatch.setattr(engine._runner, "decode", lambda *_: 1 / 0)
        requests = [GenerateRequest(str(i), [1, i], SamplingParams(5, seed=i)) for i in range(3)]
        found = await asyncio.gather(*(collect(engine, one) for one in requests), return_exceptions=True)
        assert [getattr(one, "code", one) for one in found] == ["engine_error"] * 3
        monkeypatch.setattr(engine._runner, "decode", decode)
        again = await collect(engine, requests[0])
        assert len(again[0].token_ids) == 5
        await engine.close()
        with pytest.raises(HotloopError) as caught:
            await collect(engine, requests[0])
        assert caught.value.code == "engine_closed"

    asyncio.run(scenario())


def test_a_reader_that_goes_away_frees_its_slots() -> None:
    async def scenario() -> None:
        engine = make_engine(policies.make_arena())
        reader = engine.generate(GenerateRequest("a", [1], SamplingParams(90, seed=0), n=16), stream=True)
        await anext(reader)
        assert engine._core.num_active == 16
        await reader.aclose()
        assert engine._core.num_active == 0
        assert (
            len((await collect(engine, GenerateRequest("b", [1], SamplingParams(3, seed=0), n=16)))[0].token_ids) == 3
        )

    asyncio.run(scenario())


def test_an_in_place_write_of_live_arrays_is_seen_by_the_next_token(tmp_path: Path) -> None:
    policies.save_policy(tmp_path, seed=0)
    new = policies.make_arena(seed=4)
    engine = build_engine(EngineSettings(policy_dir=str(tmp_path), max_slots=4))
    engine.install(WeightUpdate(1, tensors={name: view.numpy() for name, view in new.tensors().items()}))
    request = GenerateRequest("a", [1, 2], SamplingParams(10, seed=0))
    (answer,) = engine.run([request])[0]
    check_logprobs(new, request, answer)
    assert [(span.start, span.end, span.policy_version) for span in answer.version_spans] == [(0, 10, 1)]
    _, on_disk = read_policy(tmp_path)
    assert not torch.equal(on_disk.flat, engine.arena.flat)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_gpu_gives_the_same_greedy_tokens_and_logprobs(kind: str, tmp_path: Path) -> None:
    arena = policies.save_policy(tmp_path, kind)
    engine = build_engine(EngineSettings(policy_dir=str(tmp_path), device="cuda", max_slots=16))
    for request, group in zip(mixed_requests(), engine.run(mixed_requests()), strict=True):
        for answer in group:
            check_logprobs(arena, request, answer)
    engine.install(WeightUpdate(1, tensors=policies.make_arena(kind, seed=4).tensors()))
    request = GenerateRequest("a", [1, 2], SamplingParams(10, seed=0))
    check_logprobs(policies.make_arena(kind, seed=4), request, engine.run([request])[0][0])
