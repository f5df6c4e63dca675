"""Hot-load deltas under load, and compare how long generation is held with the other ways to new weights.

    python benchmarks/hot_load.py [--streams 64] [--deltas 20] [--changed 0.01] [--dtype fp32] [--small] [--json]

Serves a policy of random weights in SmolLM2-135M's dimensions (Qwen3 architecture, a bf16 checkpoint) with one replica,
keeps 64 streams open over it, loads 20 deltas of 1 % one after the other, then measures in the same run:

    pause            end of one decode step to the start of the next across a swap, timed between the two in the replica
    gap              what a stream sees of a swap: time between its two tokens around it, less a decode step
    decode step      median time between two tokens of a stream that no swap crossed
    full load        pause, read the whole checkpoint from page cache, copy it in, resume; nothing else is running
    restart          kill -9 of the replica until it is ready again on the same snapshot

All but the pause as seen from outside the deployment. The gap is coarse: it holds whatever the two steps differ in from
the median one, such as prompts that are read in them. Exits with 1 if a request failed, a token's version was wrong or
missing, or (not with --small) if the pause's median is above 3 steps, 1/3 of the full load or 1/20 of the restart.
The engine computes in fp32 unless told otherwise: a CPU without bf16 arithmetic takes three times as long for a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from hotloop.engines.base import EngineSettings, WeightUpdate, open_engine
from hotloop.service.client import Client
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher

LARGE = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "feed_forward": 1536, "vocab": 49152}
SMALL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "feed_forward": 128, "vocab": 512}
HEAD_DIM = 64
CONTEXT = 256
PROMPT_TOKENS = 16
TOKENS = (16, 48)
"""Shortest and longest answer of a stream."""
State = dict[str, "np.ndarray[Any, Any]"]


def make_state(sizes: dict[str, int], rng: np.random.Generator) -> State:
    """Draw a tied Qwen3 policy as bf16 bit patterns; norms are ones."""
    hidden, ff = sizes["hidden"], sizes["feed_forward"]
    q, kv = sizes["heads"] * HEAD_DIM, sizes["kv_heads"] * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab"], hidden)}
    for layer in range(sizes["layers"]):
        start = f"model.layers.{layer}."
        shapes |= {
            start + "self_attn.q_proj.weight": (q, hidden),
            start + "self_attn.k_proj.weight": (kv, hidden),
            start + "self_attn.v_proj.weight": (kv, hidden),
            start + "self_attn.o_proj.weight": (hidden, q),
            start + "self_attn.q_norm.weight": (HEAD_DIM,),
            start + "self_attn.k_norm.weight": (HEAD_DIM,),
            start + "mlp.gate_proj.weight": (ff, hidden),
            start + "mlp.up_proj.weight": (ff, hidden),
            start + "mlp.down_proj.weight": (hidden, ff),
            start + "input_layernorm.weight": (hidden,),
            start + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    state = {}
    for name, shape in shapes.items():
        values = np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * 0.02
        state[name] = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return state


def change(state: State, share: float, rng: np.random.Generator) -> None:
    """Flip the lowest mantissa bit of about `share` of every tensor's elements, at random places."""
    for array in state.values():
        flat = array.reshape(-1)
        flat[rng.integers(0, flat.size, max(1, int(flat.size * share)))] ^= 1


def as_records(state: State) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
    return {name: ("BF16", array.shape, array.reshape(-1).view(np.uint8).data) for name, array in state.items()}


def config_of(sizes: dict[str, int]) -> bytes:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": HEAD_DIM,
        "intermediate_size": sizes["feed_forward"],
        "vocab_size": sizes["vocab"],
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    return json.dumps(config).encode()


def publish_chain(folder: Path, sizes: dict[str, int], deltas: int, changed: float) -> str:
    """Publish an anchor and its deltas; return the bucket's address."""
    rng = np.random.default_rng(0)
    address = f"file://{folder}/bucket"
    publisher = Publisher(open_bucket(address), PublishSettings(full_every=0))
    state = make_state(sizes, rng)
    for version in range(1, deltas + 2):
        if version > 1:
            change(state, changed, rng)
        publisher.publish(as_records(state), name_of(version), version, extras={"config.json": config_of(sizes)})
    publisher.set_startup(name_of(1))
    return address


def name_of(version: int) -> str:
    return f"step{version:06d}"


@dataclass
class Seen:
    """What the streams saw."""

    steps: list[float] = field(default_factory=list)
    """Seconds between two tokens of one version."""
    crossings: dict[int, list[float]] = field(default_factory=dict)
    """New version -> seconds between the last token before it and the first of it, one per stream."""
    num_requests: int = 0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, events: list[tuple[float, list[dict[str, int]]]], wanted: int) -> None:
        """Take one finished stream: arrival and version spans of each event."""
        at, previous = 0, None
        for arrived, spans in events:
            for span in spans:
                if span["start"] != at:
                    self.failures.append(f"spans jump from {at} to {span['start']}")
                at = span["end"]
            if not spans:
                continue
            first, last = spans[0]["policy_version"], spans[-1]["policy_version"]
            if previous is not None:
                before, version = previous
                if first == last == version:
                    self.steps.append(arrived - before)
                elif first == last > version:
                    self.crossings.setdefault(first, []).append(arrived - before)
                elif last < version:
                    self.failures.append(f"version {last} after {version}")
            previous = (arrived, last)
        if at != wanted:
            self.failures.append(f"{at} tokens of {wanted}")
        self.num_requests += 1
        self.num_tokens += at


async def keep_streaming(
    session: aiohttp.ClientSession, url: str, number: int, vocab: int, seen: Seen, stop: asyncio.Event
) -> None:
    """Ask for one answer after another until told to stop; the last one is finished too."""
    rng = np.random.default_rng(number)
    while not stop.is_set():
        wanted = int(rng.integers(*TOKENS))
        body = {
            "model": "policy",
            "prompt": rng.integers(0, vocab, PROMPT_TOKENS).tolist(),
            "max_tokens": wanted,
            "stream": True,
            "nvext": {"extra_fields": ["engine_data"]},
        }
        events: list[tuple[float, list[dict[str, int]]]] = []
        try:
            async with session.post(url + "/v1/completions", json=body) as answer:
                if answer.status != 200:
                    seen.failures.append(f"{answer.status}: {(await answer.text())[:200]}")
                    continue
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            seen.failures.append(str(event["error"]))
                            break
                        events.append((time.perf_counter(), event["nvext"]["engine_data"]["version_spans"]))
        except aiohttp.ClientError as error:
            seen.failures.append(type(error).__name__)
            continue
        seen.add(events, wanted)


@contextlib.asynccontextmanager
async def serve(folder: Path, bucket: str, dtype: str) -> AsyncIterator[tuple[str, int]]:
    """Run `hotloop serve` with one replica; give its address and process."""
    config = {
        "bucket": bucket,
        "served_model_name": "policy",
        "state_dir": str(folder / "state"),
        "cache_dir": str(folder / "cache"),
        "engine": {"kind": "torch", "dtype": dtype, "max_slots": 64, "max_context": CONTEXT, "prefix_cache_tokens": 0},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "hotloop.cli.main", "serve", str(path), "--port", "0"],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        yield json.loads(line)["url"], process.pid
    finally:
        process.terminate()
        process.wait(30)


async def measure_restart(client: Client, gateway_pid: int, identity: str) -> float:
    """Kill the replica and wait until it serves the same snapshot again."""
    children = Path(f"/proc/{gateway_pid}/task/{gateway_pid}/children").read_text().split()
    began = time.perf_counter()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    while (await client.status())["ready"]:
        await asyncio.sleep(0.01)
    await client.wait_for(identity)
    return time.perf_counter() - began


async def measure_full_load(policy_dir: Path, dtype: Any, repeats: int) -> float:
    """Median seconds that a paused in-place load of the whole checkpoint holds an engine."""
    from safetensors.torch import load_file

    settings = EngineSettings(policy_dir=str(policy_dir), dtype=dtype, driver="thread", max_context=CONTEXT)
    engine = open_engine(settings)
    seconds = []
    try:
        for version in range(1, repeats + 2):
            await engine.pause()
            began = time.perf_counter()
            tensors = await asyncio.to_thread(load_file, policy_dir / "model.safetensors")
            await engine.write_weights(WeightUpdate(version, tensors=tensors))
            await engine.resume()
            seconds.append(time.perf_counter() - began)
    finally:
        await engine.close()
    return float(np.median(seconds[1:]))  # the first one warms the page cache


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything; seconds."""
    sizes = SMALL if arguments.small else LARGE
    began = time.perf_counter()
    bucket = publish_chain(folder, sizes, arguments.deltas, arguments.changed)
    published_s = time.perf_counter() - began
    seen, stop = Seen(), asyncio.Event()
    async with serve(folder, bucket, arguments.dtype) as (url, pid), Client(url) as client:
        await client.wait_for(name_of(1))
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
            streams = [
                asyncio.create_task(keep_streaming(session, url, number, sizes["vocab"], seen, stop))
                for number in range(arguments.streams)
            ]
            loads = []
            for version in range(2, arguments.deltas + 2):
                began = time.perf_counter()
                await client.load(name_of(version), wait=True)
                loads.append(time.perf_counter() - began)
            stop.set()
            await asyncio.gather(*streams)
        ledger = (await client.ledger())["entries"]
        pauses = [entry["replicas"]["r0"]["pause_ms"] / 1000 for entry in ledger[: arguments.deltas]]
        restart = await measure_restart(client, pid, name_of(arguments.deltas + 1))
    step = float(np.median(seen.steps))
    gaps = [float(np.median(values)) - step for values in seen.crossings.values()]
    full = await measure_full_load(folder / "state" / "r0" / "policy", arguments.dtype, 2 if arguments.small else 5)
    return {
        "params": sum(array.size for array in make_state(sizes, np.random.default_rng(0)).values()),
        "requests": seen.num_requests,
        "tokens": seen.num_tokens,
        "failures": seen.failures,
        "swaps": len(loads),
        "swaps_crossed": len(gaps),
        "publish_s": published_s,
        "step_s": step,
        "pause_p50_s": float(np.percentile(pauses, 50)),
        "pause_p99_s": float(np.percentile(pauses, 99)),
        "gap_p50_s": float(np.percentile(gaps, 50)) if gaps else 0.0,
        "load_p50_s": float(np.percentile(loads, 50)),
        "full_load_s": full,
        "restart_s": restart,
    }


def find_misses(found: dict[str, Any]) -> list[str]:
    """Compare the median pause with what it must stay below."""
    pause = found["pause_p50_s"]
    limits = {
        "3 decode steps": 3 * found["step_s"],
        "1/3 of a paused full load": found["full_load_s"] / 3,
        "1/20 of a restart": found["restart_s"] / 20,
    }
    return [
        f"pause {pause * 1000:.1f} ms is above {what}: {s * 1000:.1f} ms" for what, s in limits.items() if pause > s
    ]


def print_table(found: dict[str, Any]) -> None:
    """Show the figures with their ratios."""
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(
        f"{found['params']:,} parameters, {found['swaps']} swaps, {found['requests']} requests,"
        f" {found['tokens']} tokens"
    )
    pause, late = found["pause_p50_s"], found["pause_p99_s"]
    rows = [
        ("pause p50", pause),
        ("pause p99", late),
        ("gap p50, seen by streams", found["gap_p50_s"]),
        ("decode step", found["step_s"]),
        ("paused full load", found["full_load_s"]),
        ("restart to ready", found["restart_s"]),
        ("POST to served", found["load_p50_s"]),
    ]
    for name, seconds in rows:
        print(
            f"{name:<26} {seconds * 1000:10.1f} ms"
            f"    pause p50 is {pause / seconds:.3f} of it, p99 {late / seconds:.3f}"
        )
    print(f"failed requests: {len(found['failures'])}")


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--deltas", type=int, default=20)
    parser.add_argument("--changed", type=float, default=0.01, help="share of elements changed in each delta")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="in which the engine computes")
    parser.add_argument("--small", action="store_true", help="a tiny policy, to see that everything works")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hot-load-") as folder:
        found = asyncio.run(run(arguments, Path(folder)))
    if arguments.json:
        print(json.dumps(found))
    else:
        print_table(found)
    misses = [] if arguments.small else find_misses(found)
    for line in [*found["failures"][:10], *misses]:
        print(line, file=sys.stderr)
    return 1 if found["failures"] or misses or not found["swaps_crossed"] else 0


if __name__ == "__main__":
    sys.exit(main())
