"""What service/launchers/base.py promises, on real replica processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hotloop.errors import ServiceError
from hotloop.service.launchers.base import ReplicaSpec, RunningReplica
from hotloop.service.launchers.local import LocalLauncher
from hotloop.service.replica_process import PARTITION_VARIABLE

TOKEN = "a-token-that-nobody-guesses"


def spec(root: Path, **settings: Any) -> ReplicaSpec:
    whole = {
        "replica_id": "r0",
        "bucket": f"file://{root}/bucket",
        "served_model_name": "policy",
        "state_dir": str(root / "r0"),
        "cache_dir": str(root / "cache"),
        "tokenizer": "",
        "engine": {"kind": "fake"},
        "peers": {"listen": "", "nodes": []},
        "storage_budget_s": 5.0,
        "incomplete_wait_s": 0.0,
        "max_body_bytes": 1024 * 1024,
        "receive_timeout_s": 30.0,
        **settings,
    }
    secrets = {PARTITION_VARIABLE: "00" * 32}
    return ReplicaSpec("r0", whole, TOKEN, secrets, str(root / "r0.log"))


def answer_of(running: RunningReplica, token: str) -> int:
    request = urllib.request.Request(running.url + "/v1/completions", data=b"{}", method="POST")
    request.add_header("x-hotloop-replica-token", token)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_started_replica_is_a_process_that_listens_and_answers_its_token_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = await LocalLauncher().start(spec(tmp_path))
        try:
            assert running.pid != os.getpid() and Path(f"/proc/{running.pid}").exists()
            assert await asyncio.to_thread(answer_of, running, "another") == 401
            assert await asyncio.to_thread(answer_of, running, TOKEN) == 503, "it serves nothing yet, and says so"
            command = Path(f"/proc/{running.pid}/cmdline").read_text()
            assert TOKEN not in command and "00" * 32 not in command
        finally:
            await running.stop(10.0)
        assert running.pid not in live_pids()
        assert TOKEN not in (tmp_path / "r0.log").read_text()

    asyncio.run(scenario())


def live_pids() -> set[int]:
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}


def test_wait_returns_how_it_ended_and_stopping_again_does_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = await LocalLauncher().start(spec(tmp_path))
        waiting = asyncio.create_task(running.wait())
        os.kill(running.pid, signal.SIGKILL)
        assert await asyncio.wait_for(waiting, 30) == -signal.SIGKILL
        await running.stop(1.0)

    asyncio.run(scenario())


def test_one_that_does_not_listen_to_reason_is_stopped_by_force(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = await LocalLauncher().start(spec(tmp_path))
        os.kill(running.pid, signal.SIGSTOP)
        await asyncio.wait_for(running.stop(0.2), 30)
        assert await running.wait() == -signal.SIGKILL

    asyncio.run(scenario())


def test_the_end_of_a_talkative_replica_is_seen(tmp_path: Path) -> None:
    """More than asyncio holds of a pipe that nobody reads, and the writer is killed in the middle of it."""

    async def scenario() -> None:
        running = await LocalLauncher().start(spec(tmp_path))
        waiting = asyncio.create_task(running.wait())
        with open(f"/proc/{running.pid}/fd/1", "wb", buffering=0) as out:
            await asyncio.wait_for(asyncio.to_thread(out.write, b"x" * 1_000_000), 30)
        os.kill(running.pid, signal.SIGKILL)
        assert await asyncio.wait_for(waiting, 30) == -signal.SIGKILL

    asyncio.run(scenario())


def test_one_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ServiceError) as caught:
            await LocalLauncher().start(spec(tmp_path, bucket="ftp://nowhere"))
        assert caught.value.code == "replica_start_failed" and "ftp" in str(caught.value)
        assert TOKEN not in str(caught.value)

    asyncio.run(scenario())


def test_a_replica_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """The parent here is a child of the test, killed without a chance to clean up."""
    program = f"""
import asyncio, json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_launcher_contract import spec
from hotloop.service.launchers.local import LocalLauncher

async def main():
    running = await LocalLauncher().start(spec(Path({str(tmp_path)!r})))
    print(json.dumps(running.pid), flush=True)
    await running.wait()

asyncio.run(main())
"""

    async def scenario() -> None:
        import sys

        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        assert parent.stdout is not None
        replica = json.loads(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        while replica in live_pids() and "Z" not in Path(f"/proc/{replica}/stat").read_text().rsplit(")", 1)[1][:3]:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(scenario(), 60))
