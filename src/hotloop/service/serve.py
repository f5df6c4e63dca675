"""Starts a deployment: secrets, bucket, cache, gateway, HTTP server. The only file that joins them.

Owns: where a deployment's state lies and how it ends: SIGTERM and Ctrl-C close the gateway, which stops its replicas.
Promises: the first line on standard output is `{"url": ..., "pid": ...}`; two gateways never share a state folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
import socket
from pathlib import Path

import orjson
import uvicorn

from hotloop.errors import InputError
from hotloop.service.auth import ApiKey, check_bind, parse_keys
from hotloop.service.bounded_http import bounded_http
from hotloop.service.config import DeploymentConfig
from hotloop.service.event_loop import LoopKind, run
from hotloop.service.gateway import Gateway
from hotloop.service.launchers.base import Launcher
from hotloop.service.launchers.local import LocalLauncher
from hotloop.service.parent_watch import end_with_stdin
from hotloop.service.peering import check_peers, open_peers, serve_peers
from hotloop.service.replica_process import PARTITION_VARIABLE, STORAGE_VARIABLE
from hotloop.service.secrets import read_secret
from hotloop.snapshots.bucket_access import open_bucket_to_read, parse_reader_secret
from hotloop.snapshots.cache import PARTITION_BYTES, Cache, parse_partition
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.retry import RetryPolicy

POST_RETRY_BUDGET_S = 1.5
"""Retries of the gateway's own look at the bucket must end inside the budget of a POST."""


def run_deployment(config: DeploymentConfig, launcher: Launcher | None = None, loop: LoopKind = "auto") -> None:
    """Serve until told to end.

    Args:
        loop: the gateway's event loop; see event_loop.py.

    Raises:
        InputError: a secret, the address or the state folder cannot be used.
    """
    keys: tuple[ApiKey, ...] = ()
    if config.keys:
        keys = parse_keys(read_secret(config.keys, config.secrets_dir))
    check_bind(config.host, keys)
    check_peers(config)
    storage_text = read_secret(config.storage, config.secrets_dir).text if config.storage else ""
    static = parse_reader_secret(storage_text) if storage_text else None
    state_dir = _state_dir(config)
    lock = _lock(state_dir)
    try:
        partition = _partition(config, state_dir)
        cache_dir = config.cache_dir or str(_xdg("XDG_CACHE_HOME", ".cache") / "hotloop" / "delivery")
        config = config.model_copy(update={"cache_dir": cache_dir})
        bucket = open_bucket_to_read(config.bucket, keys=static)
        retry = RetryPolicy(budget_s=POST_RETRY_BUDGET_S)
        peers = open_peers(config.peers.nodes, config.peers.listen, partition)
        cache = Cache(cache_dir, partition, bucket, retry=retry, peers=peers)
        gateway = Gateway(
            config,
            keys=keys,
            reader=SnapshotReader(bucket, retry=retry),
            cache=cache,
            launcher=launcher or LocalLauncher(),
            secret_variables={STORAGE_VARIABLE: storage_text, PARTITION_VARIABLE: partition.hex()},
            state_dir=state_dir,
        )
        peer_server = serve_peers(cache, config.peers.listen, partition)
        try:
            run(_serve(gateway, config), loop)
        finally:
            if peer_server is not None:
                peer_server.close()
    finally:
        os.close(lock)


async def _serve(gateway: Gateway, config: DeploymentConfig) -> None:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Naming TCP makes asyncio send small packets at once; else an answer's body waits for the head's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        raise InputError(
            "address_in_use",
            f"cannot listen there ({error.strerror})",
            where=f"{config.host}:{config.port}",
            do="Choose another port; 0 takes a free one.",
        ) from None
    settings = uvicorn.Config(
        gateway.app(),
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        http=bounded_http(config.limits.receive_timeout_s),
    )
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        host = f"[{config.host}]" if family == socket.AF_INET6 else config.host
        place = {"url": f"http://{host}:{listener.getsockname()[1]}", "pid": os.getpid()}
        print(orjson.dumps(place).decode(), flush=True)
        end_with_stdin()
    await serving


def _state_dir(config: DeploymentConfig) -> Path:
    if config.state_dir:
        path = Path(config.state_dir).expanduser().absolute()
    else:
        digest = hashlib.sha256(f"{config.bucket}\0{config.served_model_name}".encode()).hexdigest()[:16]
        path = _xdg("XDG_STATE_HOME", ".local/state") / "hotloop" / f"{config.served_model_name}-{digest}"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _xdg(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback)


def _lock(state_dir: Path) -> int:
    descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(
            "state_dir_in_use",
            "another deployment runs there",
            where=str(state_dir),
            do="Stop it, or set another state_dir.",
        ) from None
    return descriptor


def _partition(config: DeploymentConfig, state_dir: Path) -> bytes:
    if config.partition:
        return parse_partition(read_secret(config.partition, config.secrets_dir).text)
    path = state_dir / "partition"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(PARTITION_BYTES))
    return parse_partition(path.read_text())
