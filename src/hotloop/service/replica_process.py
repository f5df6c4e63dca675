"""The process of one replica: reads its settings from standard input, listens on loopback, says where.

Owns: the process's life. The token comes in the environment and is removed from it at once. Ends when its standard
input closes, so that a killed gateway leaves nobody behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from hotloop.engines.base import EngineSettings
from hotloop.service.parent_watch import die_with_parent, end_with_stdin
from hotloop.service.peering import open_peers
from hotloop.service.reconciler import Wiring
from hotloop.service.replica import Replica
from hotloop.service.rollouts import RolloutSettings
from hotloop.service.timestamps import utc_now
from hotloop.snapshots.bucket_access import StaticKeys, open_bucket_to_read, parse_reader_secret
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.mirror import Mirror
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.retry import RetryPolicy

STORAGE_VARIABLE = "HOTLOOP_REPLICA_STORAGE"
PARTITION_VARIABLE = "HOTLOOP_REPLICA_PARTITION"
TOKEN_VARIABLE = "HOTLOOP_REPLICA_TOKEN"


def build(settings: dict[str, Any], token: str, keys: StaticKeys | None, partition: bytes) -> Replica:
    """Join the parts of one replica."""
    bucket = open_bucket_to_read(settings["bucket"], keys=keys)
    retry = RetryPolicy(budget_s=settings["storage_budget_s"])
    state_dir = Path(settings["state_dir"])
    peers = open_peers(settings["peers"]["nodes"], settings["peers"]["listen"], partition)
    wiring = Wiring(
        replica_id=settings["replica_id"],
        reader=SnapshotReader(bucket, retry=retry),
        cache=Cache(settings["cache_dir"], partition, bucket, retry=retry, peers=peers),
        mirror=Mirror(state_dir / "mirror"),
        state_dir=state_dir,
        engine=EngineSettings(**settings["engine"], driver="thread"),  # statuses and swaps must not wait for a step
        tokenizer_dir=settings["tokenizer"],
        incomplete_wait_s=settings["incomplete_wait_s"],
        clock=utc_now,
    )
    rollouts = RolloutSettings(settings["replica_id"], settings["served_model_name"])
    return Replica(wiring, rollouts, token, settings["max_body_bytes"])


async def serve(settings: dict[str, Any], token: str, keys: StaticKeys | None, partition: bytes) -> None:
    """Listen until told to end."""
    replica = build(settings, token, keys, partition)
    # Naming TCP makes asyncio send small packets at once; else an answer's body waits for the head's acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        replica.app(), log_level="warning", access_log=False, proxy_headers=False, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    print(
        orjson.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "pid": os.getpid()}).decode(), flush=True
    )
    end_with_stdin()
    await serving


def _read_line() -> bytes:
    """Read one line without taking anything behind it, so that the end of the input can still be waited for."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


def main() -> None:
    """Run one replica."""
    die_with_parent()
    settings = orjson.loads(_read_line())
    token = os.environ.pop(TOKEN_VARIABLE)
    keys = os.environ.pop(STORAGE_VARIABLE, "")
    partition = bytes.fromhex(os.environ.pop(PARTITION_VARIABLE))
    static = parse_reader_secret(keys) if keys else None
    asyncio.run(serve(settings, token, static, partition))


if __name__ == "__main__":
    main()
