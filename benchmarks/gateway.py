"""What the gateway costs, against the bare replica behind it.

    python benchmarks/gateway.py [--requests 20000] [--memory-requests 100000] [--connections 16]
                                 [--loop auto|asyncio|uvloop] [--only speed|memory] [--quick] [--json]

Runs a real deployment with one replica on the fake engine, whose own work is small, and asks it the same things
directly and through the gateway, in turns. Client, gateway and replica are three processes that the kernel places as it
likes; with fewer free cores than that, added latency holds the wait for a core too.

    added latency    median of one small request through the gateway, less the median without it; one at a time
    rate             small requests per CPU-second (user and system) of the gateway's process, several at a time
    streaming        a long stream through the gateway over the same stream without it: medians of the whole time, of
                     the time to its first piece, and of the time per token after that
    memory           resident set of the gateway's process after a tenth, half and all of many requests: one in 20 is
                     streamed, one in 50 a stream that its client leaves, one in 50 an answer that nobody waits for

Exits with 1 above 1.5 ms added, below 2,000 requests per CPU-second, above 10 % for streams, or above 2 MiB and 2 %
of growth between the tenth and the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import save_file

from hotloop.service.client import Client
from hotloop.service.config import load_config
from hotloop.service.event_loop import LoopKind
from hotloop.service.launchers.base import ReplicaSpec, RunningReplica
from hotloop.service.launchers.local import LocalLauncher
from hotloop.service.serve import run_deployment
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.publisher import Publisher

VOCAB = 32
STREAM_TOKENS = 1000
SMALL = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 1, "seed": 1}
LONG = {**SMALL, "max_tokens": STREAM_TOKENS, "stream": True}
SHORT_STREAM = {**SMALL, "max_tokens": 20, "stream": True}
UNREAD = {**SMALL, "max_tokens": STREAM_TOKENS}
LIMITS = {"added_ms": 1.5, "rate": 2000.0, "streaming": 1.10}
GROWTH_BYTES, GROWTH_FRAC = 2 * 1024**2, 0.02
TURN = 25
"""Requests asked one way before the other way has its turn."""


class TellingLauncher(LocalLauncher):
    """Starts replicas as ever, and writes down where the bare one listens and its token."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def start(self, spec: ReplicaSpec) -> RunningReplica:
        running = await super().start(spec)
        self._path.write_text(json.dumps({"url": running.url, "token": spec.token}))
        return running


class Refused(Exception):
    """The deployment said that it has no room now, and when to come back."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"come back in {wait_s:g} s")
        self.wait_s = wait_s


class Connection:
    """One HTTP/1.1 connection that sends ready bytes: as little work as a client can do."""

    def __init__(self, url: str, token: str = "") -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        if token:
            self._head += f"x-hotloop-replica-token: {token}\r\n"

    async def __aenter__(self) -> Connection:
        await self._connect()
        return self

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**20)

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def prepare(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        return f"{self._head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def ask(self, request: bytes) -> float:
        """Send a request and read all of its answer; return when its first piece came."""
        head = await self._send(request)
        if b"transfer-encoding: chunked" not in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            await self._reader.readexactly(length)
            return time.perf_counter()
        first = 0.0
        while True:
            length = int(await self._reader.readline(), 16)
            await self._reader.readexactly(length + 2)
            first = first or time.perf_counter()
            if length == 0:
                return first

    async def leave(self, request: bytes, *, after_head: bool) -> None:
        """Send a request and hang up: before its answer, or once that has begun."""
        if after_head:
            await self._send(request)
        else:
            await self._write(request)
        self._writer.close()
        await self._connect()

    async def _send(self, request: bytes) -> bytes:
        await self._write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b"\r\nretry-after: " in head:
            await self._reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
            raise Refused(float(head.split(b"retry-after:")[1].split(b"\r\n")[0]))
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(head.decode("latin-1"))
        return head

    async def _write(self, request: bytes) -> None:
        if self._reader.at_eof():  # a server closes what was idle for long
            self._writer.close()
            await self._connect()
        self._writer.write(request)
        await self._writer.drain()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def serve(folder: Path, loop: LoopKind = "auto") -> AsyncIterator[tuple[str, int, Path]]:
    """Publish a tiny policy and serve it; give the gateway's address and process, and the file about its replica."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    facts = {"model_type": "fake", "vocab_size": VOCAB, "num_hidden_layers": 1}
    (checkpoint / "config.json").write_text(json.dumps(facts))
    weights = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    save_file({"embed.weight": weights}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    publisher = Publisher(open_bucket(f"file://{folder}/bucket"))
    publisher.publish(checkpoint, "step000001", 1)
    publisher.set_startup("step000001")
    config = {
        "bucket": f"file://{folder}/bucket",
        "served_model_name": "policy",
        "state_dir": str(folder / "state"),
        "cache_dir": str(folder / "cache"),
        "port": 0,
        "engine": {"kind": "fake", "max_context": 2 * STREAM_TOKENS},
    }
    path, told = folder / "config.json", folder / "replica.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, __file__, "--serve", str(path), "--tell", str(told), "--loop", loop]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        yield json.loads(line)["url"], process.pid, told
    finally:
        process.terminate()
        process.wait(30)


async def measure_latency(bare: Connection, front: Connection, count: int) -> tuple[list[float], list[float]]:
    """Ask one at a time, in turns; seconds of each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for start in range(0, 2 * count, TURN):
        which = (start // TURN) % 2
        connection = (bare, front)[which]
        request = connection.prepare(SMALL)
        for _ in range(TURN):
            began = time.perf_counter()
            await connection.ask(request)
            seconds[which].append(time.perf_counter() - began)
    return seconds


@dataclass
class StreamTimes:
    """Seconds of streams asked one way."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """From the request to the first piece."""

    @property
    def per_token(self) -> float:
        return statistics.median(
            (whole - first) / (STREAM_TOKENS - 1) for whole, first in zip(self.whole, self.first, strict=True)
        )


async def measure_streams(bare: Connection, front: Connection, count: int) -> tuple[StreamTimes, StreamTimes]:
    """Read long streams in turns."""
    times = (StreamTimes(), StreamTimes())
    for number in range(2 * count):
        connection = (bare, front)[number % 2]
        began = time.perf_counter()
        first = await connection.ask(connection.prepare(LONG))
        times[number % 2].whole.append(time.perf_counter() - began)
        times[number % 2].first.append(first - began)
    return times


async def ask_many(url: str, count: int, connections: int) -> None:
    """Send small requests over several connections."""
    left = count

    async def one() -> None:
        nonlocal left
        async with Connection(url) as connection:
            request = connection.prepare(SMALL)
            while left > 0:
                left -= 1
                await connection.ask(request)

    await asyncio.gather(*(one() for _ in range(connections)))


async def ask_mixed(url: str, count: int, connections: int) -> int:
    """Send requests of every kind over several connections: most small, some streamed, some left by their client.

    Returns: how many were refused for a while and asked again: the machine stopped the replica for seconds.
    """
    left, refused = count, 0

    async def one() -> None:
        nonlocal left, refused
        async with Connection(url) as connection:
            small, short, long, unread = map(connection.prepare, (SMALL, SHORT_STREAM, LONG, UNREAD))
            while left > 0:
                left -= 1
                try:
                    if left % 50 == 7:
                        await connection.leave(long, after_head=True)
                    elif left % 50 == 9:
                        await connection.leave(unread, after_head=False)
                    else:
                        await connection.ask(short if left % 20 == 0 else small)
                except Refused as refusal:
                    left, refused = left + 1, refused + 1
                    await asyncio.sleep(refusal.wait_s)

    await asyncio.gather(*(one() for _ in range(connections)))
    return refused


async def measure_speed(arguments: argparse.Namespace, url: str, pid: int, told: Path) -> dict[str, Any]:
    """Latency, streams and CPU."""
    place = json.loads(told.read_text())
    async with Connection(place["url"], place["token"]) as bare, Connection(url) as front:
        await measure_latency(bare, front, 100)
        bare_s, front_s = await measure_latency(bare, front, arguments.latency_requests)
        bare_streams, front_streams = await measure_streams(bare, front, arguments.streams)
    await ask_many(url, arguments.requests // 10, arguments.connections)
    cpu_early = cpu_seconds(pid)
    remaining = arguments.requests - arguments.requests // 10
    await ask_many(url, remaining, arguments.connections)
    cpu_s = cpu_seconds(pid) - cpu_early
    bare_p50, front_p50 = statistics.median(bare_s), statistics.median(front_s)
    bare_first, front_first = statistics.median(bare_streams.first), statistics.median(front_streams.first)
    return {
        "bare_p50_ms": bare_p50 * 1000,
        "gateway_p50_ms": front_p50 * 1000,
        "added_ms": (front_p50 - bare_p50) * 1000,
        "requests": remaining,
        "rate": remaining / cpu_s,
        "streaming": statistics.median(front_streams.whole) / statistics.median(bare_streams.whole),
        "stream_s": statistics.median(bare_streams.whole),
        "first_piece_ms": bare_first * 1000,
        "first_piece_added_ms": (front_first - bare_first) * 1000,
        "token_ms": bare_streams.per_token * 1000,
        "token_ratio": front_streams.per_token / bare_streams.per_token,
    }


async def measure_memory(arguments: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    """Resident set of the gateway after a tenth, half and all of the requests."""
    total = arguments.memory_requests
    done, refused, resident = 0, 0, []
    for mark in (total // 10, total // 2, total):
        refused += await ask_mixed(url, mark - done, arguments.connections)
        done = mark
        resident.append(resident_bytes(pid))
        print(f"{done} requests, {refused} refused and repeated: {resident[-1] / 1024**2:.1f} MiB", file=sys.stderr)
    return {
        "memory_requests": total,
        "memory_refused": refused,
        "memory_early_bytes": resident[0],
        "memory_half_bytes": resident[1],
        "memory_late_bytes": resident[2],
    }


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what was asked for."""
    found: dict[str, Any] = {}
    async with serve(folder, arguments.loop) as (url, pid, told):
        async with Client(url) as client:
            await client.wait_for("step000001")
        if arguments.only != "memory":
            found |= await measure_speed(arguments, url, pid, told)
        if arguments.only != "speed":
            found |= await measure_memory(arguments, url, pid)
    return found


def find_misses(found: dict[str, Any]) -> list[str]:
    """Compare what was measured with the limits."""
    misses = []
    if "added_ms" in found:
        if found["added_ms"] > LIMITS["added_ms"]:
            misses.append(f"{found['added_ms']:.2f} ms added is above {LIMITS['added_ms']} ms")
        if found["rate"] < LIMITS["rate"]:
            misses.append(f"{found['rate']:.0f} requests per CPU-second are below {LIMITS['rate']:.0f}")
        if found["streaming"] > LIMITS["streaming"]:
            misses.append(f"streams take {found['streaming']:.3f} of their time, above {LIMITS['streaming']}")
    if "memory_late_bytes" in found:
        growth = found["memory_late_bytes"] - found["memory_early_bytes"]
        if growth > GROWTH_BYTES + GROWTH_FRAC * found["memory_early_bytes"]:
            misses.append(f"memory grew by {growth} bytes")
    return misses


def print_table(found: dict[str, Any]) -> None:
    """Print for a person."""
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}, Python {platform.python_version()}")
    if "added_ms" in found:
        print(f"bare replica p50       {found['bare_p50_ms']:8.2f} ms")
        print(f"through the gateway    {found['gateway_p50_ms']:8.2f} ms, {found['added_ms']:.2f} ms added")
        print(f"small requests         {found['rate']:8.0f} per CPU-second of the gateway, over {found['requests']}")
        print(f"streams                {found['streaming']:8.3f} of the time without it ({found['stream_s']:.2f} s)")
        print(f"    first piece        {found['first_piece_ms']:8.2f} ms, {found['first_piece_added_ms']:.2f} ms added")
        print(f"    per token          {found['token_ms']:8.3f} ms, {found['token_ratio']:.3f} of that through it")
    if "memory_late_bytes" in found:
        early, half, late = (found[f"memory_{name}_bytes"] / 1024**2 for name in ("early", "half", "late"))
        print(f"resident memory        {early:8.1f} MiB after a tenth of {found['memory_requests']} requests,")
        print(f"                       {half:8.1f} MiB after half, {late:.1f} MiB at the end")


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000, help="for the rate")
    parser.add_argument("--memory-requests", type=int, default=100_000)
    parser.add_argument("--latency-requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--only", choices=["speed", "memory"])
    parser.add_argument("--quick", action="store_true", help="few requests and no limits, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--loop", choices=get_args(LoopKind), default="auto", help="the gateway's event loop")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tell", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        run_deployment(load_config(arguments.serve), TellingLauncher(arguments.tell), arguments.loop)
        return 0
    if arguments.quick:
        arguments.requests, arguments.latency_requests, arguments.streams = 200, 50, 2
        arguments.memory_requests = 200
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        found = asyncio.run(run(arguments, Path(folder)))
    if arguments.json:
        print(json.dumps(found))
    else:
        print_table(found)
    misses = [] if arguments.quick else find_misses(found)
    for line in misses:
        print(line, file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
