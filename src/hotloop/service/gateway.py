"""The one address in front of all replicas.

    clients --> keys --> /v1/...     --> DataPlane --> replicas
                     --> /hot_load   --> Deployment --targets--> replicas
                     <-- status, metrics <-- Membership <--statuses-- Supervisors (one a replica)

Owns: joining the parts of a deployment and its HTTP surface. Runs in one event loop; the bucket is read in threads.
Promises: `/sync` and `/deployment/<id>/sync` in front of a path change nothing; every error has the one error body.
Does not do: any rule: see routing, admission, load_decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotloop.errors import HotloopError, ServiceError
from hotloop.service.auth import ApiKey, Guard, Role
from hotloop.service.config import DeploymentConfig
from hotloop.service.data_plane import CONNECT_TIMEOUT_S, DataPlane
from hotloop.service.deployment import Deployment
from hotloop.service.hot_load_api import parse_hint, parse_load_request
from hotloop.service.json_body import JsonResponse, parse_object, read_body
from hotloop.service.launchers.base import Launcher, ReplicaSpec
from hotloop.service.ledger import Ledger
from hotloop.service.membership import Member, Membership
from hotloop.service.metrics import Metrics
from hotloop.service.openapi import build_document
from hotloop.service.prefetch import prefetch
from hotloop.service.replica_client import ReplicaClient
from hotloop.service.rollout_request import has_vendor_header
from hotloop.service.supervisor import Supervisor
from hotloop.service.timestamps import utc_now
from hotloop.service.upstream import IDLE_S, Upstream
from hotloop.service.wire_errors import HANDLERS, error_response, method_not_allowed
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.reader import SnapshotReader

HOT_LOAD = "/hot_load/v1/models/hot_load"
_PREFIX = re.compile(r"^(?:/deployment/[^/]+)?/sync(?=/)")
Endpoint = Callable[[Request], Awaitable[Response]]
_ROLLOUT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Gateway:
    """One deployment's front."""

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        keys: tuple[ApiKey, ...],
        reader: SnapshotReader,
        cache: Cache,
        launcher: Launcher,
        secret_variables: dict[str, str],
        state_dir: Path,
    ) -> None:
        self._config = config
        self._guard = Guard(keys)
        self._reader = reader
        self._cache = cache
        self._launcher = launcher
        self._secret_variables = secret_variables
        self._state_dir = state_dir
        self._token = secrets.token_urlsafe(32)
        self.metrics = Metrics()
        self.ledger = Ledger(state_dir / "ledger.json", clock=utc_now)
        self.supervisors: list[Supervisor] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def app(self) -> ASGIApp:
        """Build the application."""
        infer, admin = partial(self._guarded, "infer"), partial(self._guarded, "admin")
        table: dict[str, dict[str, Endpoint]] = {
            HOT_LOAD: {
                "GET": infer(self._get_status),
                "POST": admin(self._post_load),
                "DELETE": admin(self._delete_load),
            },
            HOT_LOAD + "/hint": {"POST": admin(self._post_hint)},
            HOT_LOAD + "/ledger": {"GET": infer(self._get_ledger), "DELETE": admin(self._delete_ledger)},
            "/v1/models": {"GET": infer(self._get_models)},
            "/metrics": {"GET": infer(self._get_metrics)},
            "/openapi.json": {"GET": infer(self._get_openapi)},
            "/health": {"GET": self._get_health},
            "/ready": {"GET": self._get_ready},
        }
        routes = [Route(path, _by_method(endpoints), methods=list(endpoints)) for path, endpoints in table.items()]
        self._app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=HANDLERS)
        served = [(method, path) for path, endpoints in table.items() for method in endpoints]
        served += [("POST", path) for path in _ROLLOUT_PATHS]
        self._document = build_document(served, self._config.served_model_name, has_keys=bool(self._guard.keys))
        self._app.router.redirect_slashes = False  # a redirect would repeat the Host header
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Strip the prefix, and send rollouts past Starlette's routing."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path not in _ROLLOUT_PATHS:
            path = _PREFIX.sub("", path, count=1)
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode()}
            if path not in _ROLLOUT_PATHS:
                await self._app(scope, receive, send)
                return
        if scope["method"] != "POST":
            await method_not_allowed(scope["method"], path, "POST")(scope, receive, send)
            return
        headers = {  # of several with one name the first counts, as everywhere
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        try:
            self._guard.check(headers, "POST", "infer")
        except HotloopError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.data_plane.handle(scope, receive, send, headers)

    # ---- life ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        config = self._config
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            limits = config.limits
            loop = asyncio.get_running_loop()
            self.membership = Membership(clock=loop.time, concurrency_per_replica=limits.concurrency_per_replica)
            self.deployment = Deployment(
                config, self._reader, self.ledger, self.membership, self._client_of, clock=utc_now
            )
            upstream = Upstream(CONNECT_TIMEOUT_S)
            self.data_plane = DataPlane(
                self.membership, limits, config.served_model_name, upstream, self._token, self.metrics
            )
            for number in range(config.replicas):
                self._add_replica(f"r{number}")
            self._spawn(self.deployment.start())
            try:
                yield
            finally:
                await self._close()
                upstream.close()

    def _add_replica(self, replica_id: str) -> None:
        config = self._config
        settings: dict[str, Any] = {
            "replica_id": replica_id,
            "bucket": config.bucket,
            "served_model_name": config.served_model_name,
            "state_dir": str(self._state_dir / replica_id),
            "cache_dir": config.cache_dir,
            "peers": config.peers.model_dump(),
            "tokenizer": config.tokenizer,
            "engine": config.engine.model_dump(),
            "storage_budget_s": config.limits.storage_budget_s,
            "incomplete_wait_s": config.limits.incomplete_wait_s,
            "max_body_bytes": config.limits.max_body_bytes,
        }
        log_path = str(self._state_dir / f"{replica_id}.log")
        spec = ReplicaSpec(replica_id, settings, self._token, self._secret_variables, log_path)
        supervisor = Supervisor(
            self.membership.add(replica_id),
            spec,
            self._launcher,
            self._client_of,
            on_join=self.deployment.on_join,
            on_status=self.deployment.on_status,
            on_lost=self.deployment.on_lost,
            on_restart=lambda member: self.metrics.restarts.labels(member.replica_id).inc(),
        )
        self.supervisors.append(supervisor)
        self._spawn(supervisor.run())

    def _client_of(self, member: Member) -> ReplicaClient:
        return ReplicaClient(self._session, member.url, self._token)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.deployment.close()

    # ---- endpoints ----------------------------------------------------------------------------------------------

    def _guarded(self, role: Role, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            self._guard.check(request.headers, request.method, role)
            return await endpoint(request)

        return guarded

    async def _get_status(self, request: Request) -> Response:
        return JsonResponse(self.deployment.status(vendor_dialect=has_vendor_header(request.headers)))

    async def _post_load(self, request: Request) -> Response:
        load_request = parse_load_request(await self._read_object(request), request.headers)
        return JsonResponse(await self.deployment.post(load_request))

    async def _read_object(self, request: Request) -> dict[str, Any]:
        limits = self._config.limits
        return parse_object(await read_body(request, limits.max_body_bytes, limits.receive_timeout_s))

    async def _delete_load(self, request: Request) -> Response:
        return JsonResponse(await self.deployment.cancel())

    async def _post_hint(self, request: Request) -> Response:
        identity, files = parse_hint(await self._read_object(request))
        hints = self.deployment.hints_for(identity)
        self._spawn(asyncio.to_thread(prefetch, self._reader, self._cache, identity, files, hints))
        return JsonResponse({"accepted": True}, status_code=202)

    async def _get_ledger(self, request: Request) -> Response:
        return JsonResponse(self.ledger.to_json())

    async def _delete_ledger(self, request: Request) -> Response:
        self.deployment.clear_ledger()
        return JsonResponse({"cleared": True})

    async def _get_models(self, request: Request) -> Response:
        name = self._config.served_model_name
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "hotloop"}]
        served = {status.current_snapshot_identity for status in self.membership.statuses() if status.readiness}
        rows += [{**rows[0], "id": f"{name}@{identity}"} for identity in sorted(filter(None, served))]
        return JsonResponse({"object": "list", "data": rows})

    async def _get_metrics(self, request: Request) -> Response:
        text = self.metrics.render(self.membership, asyncio.get_running_loop().time())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _get_openapi(self, request: Request) -> Response:
        return JsonResponse(self._document)

    async def _get_health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def _get_ready(self, request: Request) -> Response:
        now = asyncio.get_running_loop().time()
        is_ready = any(member.is_ready(now) for member in self.membership.members.values())
        if is_ready:
            return JsonResponse({"ready": True})
        return error_response(ServiceError("no_replicas", "no replica is ready", do="Retry in 1 s.", retryable=True))


def _by_method(endpoints: dict[str, Endpoint]) -> Endpoint:
    """Join the methods of one address into one route, so that a 405 names all of them."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return endpoint
