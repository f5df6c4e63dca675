"""The reward service over loopback: bodies, tries, and what an unreachable or confused service says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from verifier_samples import rollout_of

from hotloop.errors import RunError
from hotloop.types import Score
from hotloop.verifiers.base import score_rollouts
from hotloop.verifiers.remote import RemoteVerifier

Handler = Callable[[web.Request], Awaitable[web.Response]]


async def ask(handler: Handler, *responses: str, prompt: Any = "What?") -> list[Score]:
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    verifier = RemoteVerifier(f"http://127.0.0.1:{port}/score", pauses_s=(0.0, 0.0))
    try:
        rollouts = [rollout_of(text, number=n, prompt=prompt) for n, text in enumerate(responses)]
        return await score_rollouts(verifier, rollouts)
    finally:
        await verifier.close()
        await runner.cleanup()


def test_the_service_gets_prompt_response_and_label_and_its_reward_comes_back_in_order() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        return web.json_response({"reward": float(body["response"]), "reason": "read"})

    scores = asyncio.run(ask(handler, "3", "1", "2", prompt=({"role": "user", "content": "hi"},)))
    assert [score.reward for score in scores] == [3.0, 1.0, 2.0]
    assert scores[0].reason == "read"
    first = next(body for body in bodies if body["task_id"] == "t0")
    assert first["prompt"] == [{"role": "user", "content": "hi"}]
    assert (first["response"], first["label"]) == ("3", "42")


def test_a_service_that_recovers_is_asked_again() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        return web.json_response({"reward": 1}) if len(calls) == 3 else web.Response(status=503)

    assert asyncio.run(ask(handler, "x"))[0].reward == 1.0
    assert len(calls) == 3


def test_a_service_that_keeps_failing_is_an_error_and_no_reward_of_zero() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=500, text="out of memory")

    with pytest.raises(RunError, match=r"task t0.*HTTP 500: out of memory.*reward_unreachable"):
        asyncio.run(ask(handler, "x"))


def test_a_request_that_is_refused_is_not_repeated() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=400, text="bad field")

    with pytest.raises(RunError, match="HTTP 400"):
        asyncio.run(ask(handler, "x"))
    assert len(calls) == 1


@pytest.mark.parametrize("answer", [{"reward": None}, {"reward": "high"}, {"score": 1}, []])
def test_an_answer_without_a_number_is_an_error(answer: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer)

    with pytest.raises(RunError, match="reward_invalid"):
        asyncio.run(ask(handler, "x"))


def test_no_service_at_all_is_an_error_that_names_the_address() -> None:
    async def score() -> None:
        verifier = RemoteVerifier("http://127.0.0.1:9/score", pauses_s=())
        try:
            await score_rollouts(verifier, [rollout_of("x")])
        finally:
            await verifier.close()

    with pytest.raises(RunError, match=r"127\.0\.0\.1:9.*reward_unreachable"):
        asyncio.run(score())
