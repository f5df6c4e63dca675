"""Typed async client of a deployment: for the loop, the command line and users.

Owns: requests, retries of what is safe to retry (425, 429, 503 and 409 that says retry; connections that break),
parsing of `engine_data`.
Promises: an answer's tokens carry the versions and logprobs that the deployment declared; an error body becomes the
error that its code names; a deployment that answered before and then hangs up, as it does with an idle connection and
while it is restarted, is asked again for a while. Every request may be sent twice: sampling leaves nothing behind, and
loads go by identity. Reads `HOTLOOP_URL` and `HOTLOOP_API_KEY` when nothing is given.

    async with Client("http://127.0.0.1:8800") as client:
        await client.load("step000002", wait=True)
        rollouts = await client.complete([1, 13, 8], n=16, max_tokens=6)
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from hotloop.errors import EXIT_ENVIRONMENT, ServiceError, VersionNotReady
from hotloop.snapshots.rollback import check_deployment_url, choose_exit_code
from hotloop.types import Completion, Support, TopLogprobs, VersionSpan

HOT_LOAD = "/hot_load/v1/models/hot_load"
_RETRIED = frozenset({"too_early", "queue_full", "weight_version_not_ready", "no_replicas", "replica_lost"})
_LONGEST_WAIT_S = 5.0
_IDLE_S = 3.0
"""How long an unused connection is kept: uvicorn closes one after 5 idle seconds, perhaps just as we write."""


class Client:
    """Talks to one deployment."""

    def __init__(
        self,
        url: str = "",
        *,
        api_key: str = "",
        retry_budget_s: float = 120.0,
        reconnect_budget_s: float = 30.0,
        timeout_s: float = 600.0,
        connections: int = 0,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            retry_budget_s: seconds from the first refusal until it is raised.
            reconnect_budget_s: seconds from the first broken connection until `unreachable` is raised, when this
                deployment has answered before; one that never did is unreachable at once.
            connections: open at a time; 0 means no limit.

        Raises:
            ServiceError: `no_address` when neither `url` nor HOTLOOP_URL is given.
            InputError: `invalid_url`.
        """
        found = url or os.environ.get("HOTLOOP_URL", "")
        if not found:
            raise ServiceError(
                "no_address", "no deployment's address is given", do="Give --url or set HOTLOOP_URL.", exit_code=2
            )
        check_deployment_url(found)
        self.url = found.rstrip("/")
        key = api_key or os.environ.get("HOTLOOP_API_KEY", "")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._retry_budget_s = retry_budget_s
        self._reconnect_budget_s = reconnect_budget_s
        self._has_answered = False
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_IDLE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    # ---- rollouts -----------------------------------------------------------------------------------------------

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        session_id: str = "",
        min_version: int | None = None,
        exact_version: int | None = None,
        identity: str = "",
        model: str = "",
        **fields: Any,
    ) -> list[Completion]:
        """Ask for `n` completions of one prompt, with everything recorded about each.

        Args:
            fields: further fields of the body, such as `max_tokens`, `temperature`, `seed`, `stop`.

        Raises:
            ServiceError: what the deployment answers, after its retryable refusals lasted longer than the budget.
        """
        body: dict[str, Any] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n": n,
            "nvext": {"extra_fields": ["engine_data"]},
            **fields,
        }
        if model or identity:
            body["model"] = f"{model}@{identity}" if identity else model
        pin = {"min_version": min_version, "exact_version": exact_version}
        pin = {name: value for name, value in pin.items() if value is not None}
        if pin:
            body["weight_version"] = pin
        headers = {"x-multi-turn-session-id": session_id} if session_id else {}
        answer = await self.request("POST", "/v1/completions", body, headers=headers)
        data = answer["nvext"]["engine_data"]
        blocks = data.get("choices", [data])
        pairs = zip(blocks, answer["choices"], strict=True)
        return [parse_completion(block, choice["finish_reason"]) for block, choice in pairs]

    # ---- hot load -----------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return every replica's state."""
        return await self.request("GET", HOT_LOAD)

    async def load(
        self, identity: str, *, wait: bool = False, timeout_s: float = 600.0, **fields: Any
    ) -> dict[str, Any]:
        """Ask for an identity, and wait until every replica serves it.

        Returns: the reply; with `wait` the last status.

        Raises:
            ServiceError: refused, failed on a replica, superseded, or `load_timeout`.
        """
        reply = await self.request("POST", HOT_LOAD, {"identity": identity, **fields})
        return await self.wait_for(identity, timeout_s=timeout_s) if wait else reply

    async def wait_for(self, identity: str, *, timeout_s: float = 600.0, poll_s: float = 0.05) -> dict[str, Any]:
        """Wait until every replica serves an identity; errors of other identities are ignored.

        Raises:
            ServiceError: the load failed with that reason, or `load_timeout`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.status()
            if status["ready"] and status["target_snapshot_identity"] == identity:
                return status
            wanted = {status["target_snapshot_identity"], status["queued_snapshot_identity"]}
            for replica in status["replicas"]:
                loading = replica["loading_state"]
                failed = loading["stage"] == "error" and loading["target_snapshot_identity"] == identity
                if failed and not loading["retryable"]:
                    raise ServiceError(
                        loading["reason"],
                        loading["message"],
                        where=f"replica {replica['replica_id']}",
                        details=loading["details"],
                    )
            if identity not in wanted and status["target_snapshot_identity"] is not None:
                raise ServiceError("superseded", f"{identity} gave way to {status['target_snapshot_identity']}")
            if time.monotonic() >= deadline:
                raise ServiceError("load_timeout", f"{identity} is not served everywhere after {timeout_s:g} s")
            await asyncio.sleep(poll_s)

    async def ledger(self) -> dict[str, Any]:
        """Return the history of loads, newest first."""
        return await self.request("GET", HOT_LOAD + "/ledger")

    async def clear_ledger(self) -> dict[str, Any]:
        """Forget the history; the next load must be an anchor."""
        return await self.request("DELETE", HOT_LOAD + "/ledger")

    async def cancel(self) -> dict[str, Any]:
        """Cancel the waiting load, or the active one before it is installed."""
        return await self.request("DELETE", HOT_LOAD)

    async def hint(self, identity: str, files: Sequence[str] = ()) -> dict[str, Any]:
        """Ask for a prefetch."""
        return await self.request("POST", HOT_LOAD + "/hint", {"identity": identity, "files": list(files)})

    # ---- transport ----------------------------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Send one request, retrying refusals that ask for it and connections that break.

        Raises:
            ServiceError: what the answer says, or `unreachable`.
        """
        assert self._session is not None, "use the client as an async context manager"
        data = None if body is None else orjson.dumps(body)
        wait_s, failing_since = 0.05, math.inf
        while True:
            try:
                async with self._session.request(
                    method, self.url + path, data=data, headers={**self._headers, **(headers or {})}
                ) as answer:
                    raw = await answer.read()
                    self._has_answered = True
                    if answer.status < 400:
                        parsed = orjson.loads(raw)
                        assert isinstance(parsed, dict)
                        return parsed
                    error = parse_error(raw, answer.status)
            except (aiohttp.ClientError, TimeoutError) as cause:
                error = ServiceError(
                    "unreachable",
                    f"the deployment does not answer ({type(cause).__name__})",
                    where=self.url,
                    do="Start it with hotloop serve, or check the address.",
                    exit_code=EXIT_ENVIRONMENT,
                )
                is_retried = self._has_answered and isinstance(
                    cause, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError
                )
                budget_s = self._reconnect_budget_s
            else:
                is_retried, budget_s = error.retryable and error.code in _RETRIED, self._retry_budget_s
            failing_since = min(failing_since, time.monotonic())
            if not is_retried or time.monotonic() + wait_s > failing_since + budget_s:
                raise error
            await asyncio.sleep(wait_s * (0.5 + random.random()))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def parse_error(raw: bytes, status: int) -> ServiceError:
    """Turn an error body into the error that it describes."""
    try:
        found = orjson.loads(raw)["error"]
        code, message = str(found["code"]), str(found["message"])
        details, retryable = dict(found.get("details") or {}), bool(found.get("retryable"))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        code, message = "unreachable", f"HTTP {status} with a body that is not ours: {raw[:200]!r}"
        details, retryable = {}, False
    kind = VersionNotReady if code == "weight_version_not_ready" else ServiceError
    error = kind(code, message, details=details, retryable=retryable, exit_code=choose_exit_code(status))
    error.args = (message,)  # the message is complete; the parts were joined by the sender
    return error


def parse_completion(block: Mapping[str, Any], finish_reason: str) -> Completion:
    """Read one choice of `engine_data` (lists, not base64)."""
    top, mask, routes = block.get("top_logprobs"), block.get("top_p_mask"), block.get("routed_experts")
    return Completion(
        token_ids=block["completion_token_ids"],
        sampling_logprobs=block["sampling_logprobs"],
        logprobs=block["logprobs"],
        version_spans=[VersionSpan(**span) for span in block["version_spans"]],
        finish_reason=finish_reason,  # type: ignore[arg-type]  # one of three by the contract of the API
        top_logprobs=TopLogprobs(**top) if top else None,
        support=Support(mask["offsets"], mask["token_ids"]) if mask else None,
        routed_experts=parse_routes(routes) if routes else None,
        routed_experts_start=routes["start"] if routes else 0,
    )


def parse_routes(field: Mapping[str, Any]) -> Any:
    """Decode `routed_experts` into an array [rows, layers, top_k]."""
    import base64

    import numpy as np

    dtype = "u1" if field["dtype"] == "uint8" else "<u2"
    return np.frombuffer(base64.b64decode(field["data"]), dtype).reshape(field["shape"])
