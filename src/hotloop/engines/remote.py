"""What the adapters of remote engine servers share: calls, requests in flight, checks, the order of an install.

    generate -> check -> one call a completion --chunks--> queue -> caller
    write_weights -> patch the local checkpoint -> reload it (subclass) -> label it
                                                     | refused: put the bytes back, old weights serve on

Owns: `RemoteServer` (calls with the errors of the Engine port) and `RemoteEngine`, the port but for a server's routes.
Promises: a server's refusal, also one that comes with HTTP 200, is `engine_error` and leaves version and local
checkpoint as they were; a server that does not answer a write is `install_failed`, since nobody knows what it holds.
Does not do: one server's routes (sglang.py, vllm.py), version labels (version_labels.py).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from hotloop.engines.base import Chunk, EngineInfo, EngineSettings, GenerateRequest, WeightUpdate
from hotloop.engines.local_checkpoint import LocalCheckpoint
from hotloop.engines.version_labels import Labels
from hotloop.errors import HotloopError, InputError, ServiceError
from hotloop.types import Completion

CALL_TIMEOUT_S = 600.0
ABORT_AGAIN_S = 0.1
"""An abort that overtakes its request on the way is lost, so it is said again until the request has ended."""
MAX_ABORTS = 20
DEFAULT_CONTEXT = 4096


class RemoteServer:
    """One engine server's HTTP routes."""

    def __init__(self, url: str, *, name: str) -> None:
        """Prepare.

        Raises:
            InputError: `engine_address` when there is none.
        """
        if not url.startswith(("http://", "https://")):
            raise InputError(
                "engine_address",
                f"{url!r} is not the address of a {name} server",
                where="engine.url",
                do="Set engine.url.",
            )
        self.url = url.rstrip("/")
        self._name = name
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=CALL_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        may_decline: bool = False,
    ) -> Any:
        """Call a route and return its JSON, or its text where it answers none.

        Args:
            may_decline: take `success: false` for an answer like any other.

        Raises:
            ServiceError: `engine_error`, for any status but 2xx and for a body that says `success: false`.
        """
        try:
            async with self._open().request(method, self.url + path, json=body, params=query) as answer:
                text = await answer.text()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.failure(path, f"does not answer ({type(error).__name__})") from None
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = text
        if status >= 400:
            raise self.failure(path, f"answered {status}: {text[:300]}", answered=True)
        if isinstance(parsed, dict) and (parsed.get("error") or (parsed.get("success") is False and not may_decline)):
            raise self.failure(path, f"answered {status} with an error: {text[:300]}", answered=True)
        return parsed

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event, up to `[DONE]`. An event may be of any length.

        Raises:
            ServiceError: `engine_error`, also for an error inside the stream.
        """
        try:
            async with self._open().post(self.url + path, json=body) as answer:
                if answer.status >= 400:
                    text = (await answer.text())[:300]
                    raise self.failure(path, f"answered {answer.status}: {text}", answered=True)
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        data = line[5:].strip() if line.startswith(b"data:") else b""
                        if data == b"[DONE]":
                            return
                        if data:
                            event = json.loads(data)
                            if event.get("error"):
                                raise self.failure(path, f"broke off: {event['error']}", answered=True)
                            yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.failure(path, f"broke off ({type(error).__name__})") from None

    def failure(self, path: str, why: str, *, answered: bool = False) -> ServiceError:
        """Make the error of one call; `answered` tells a refusal from silence."""
        details = {"answered": answered}
        return ServiceError(
            "engine_error", f"{self._name} {path} {why}", where=self.url, details=details, retryable=True
        )


class RemoteEngine(ABC):
    """The Engine port over a server; a subclass gives the routes."""

    name: str

    def __init__(self, settings: EngineSettings) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InputError: no address, or no policy directory to reload from.
        """
        self._server = RemoteServer(settings.url, name=self.name)
        self._checkpoint = LocalCheckpoint(Path(settings.policy_dir))
        self._info = _read_info(settings)
        self._max_slots = settings.max_slots
        self._labels = Labels(self.name)
        self._is_paused = False
        self._is_loaded = False
        """Whether the server is known to hold the local checkpoint; it may have been started on another one."""
        self._calls: dict[str, dict[str, asyncio.Task[None]]] = {}

    # ---- what a server's adapter gives --------------------------------------------------------------------------

    @abstractmethod
    def _complete(self, request: GenerateRequest, index: int, call_id: str, stream: bool) -> AsyncIterator[Chunk]:
        """Run one completion of a request that was checked."""

    @abstractmethod
    async def _abort_call(self, call_id: str) -> None: ...

    @abstractmethod
    async def _set_paused(self, paused: bool) -> None: ...

    @abstractmethod
    async def _reload(self, label: str) -> None:
        """Let the server read the local checkpoint and label it."""

    @abstractmethod
    async def _relabel(self, label: str) -> None: ...

    # ---- the port -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def policy_version(self) -> int:
        return self._labels.version

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Send one call a completion; the server shares the prompt through its prefix cache. See the port.

        Raises:
            InputError: also `not_offered_by_engine`.
        """
        self._check(request)
        if self._limit_of(request) == 0:
            for index in range(request.n):
                yield Chunk(request.request_id, index, Completion([], [], [], [], "length"), True, "length")
            return
        queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

        async def pump(index: int, call_id: str) -> None:
            try:
                async for chunk in self._complete(request, index, call_id, stream):
                    queue.put_nowait(chunk)
                queue.put_nowait(None)
            except Exception as error:  # handed to the reader, which raises it in the caller's task
                queue.put_nowait(error)

        # 32 hex digits each: servers abort by prefix, and no id is a prefix of another.
        calls = {
            call_id: asyncio.create_task(pump(index, call_id))
            for index, call_id in enumerate(secrets.token_hex(16) for _ in range(request.n))
        }
        self._calls[request.request_id] = calls
        try:
            open_calls = request.n
            while open_calls:
                item = await queue.get()
                if item is None:
                    open_calls -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self._calls.pop(request.request_id, None)
            for task in calls.values():
                task.cancel()  # closing the connection ends what is left at the server
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown ids do nothing."""
        calls = self._calls.get(request_id, {})
        for _ in range(MAX_ABORTS):
            left = {call_id: task for call_id, task in calls.items() if not task.done()}
            if not left:
                return
            for call_id in left:
                await self._abort_call(call_id)
            await asyncio.wait(left.values(), timeout=ABORT_AGAIN_S)

    async def pause(self) -> None:
        """Hold the server between steps; requests keep their KV."""
        if not self._is_paused:
            await self._set_paused(True)
        self._is_paused = True

    async def resume(self) -> None:
        """Go on."""
        if self._is_paused:
            await self._set_paused(False)
        self._is_paused = False

    async def write_weights(self, update: WeightUpdate) -> None:
        """Patch the local checkpoint and let the server reload it.

        An update without bytes changes the label only, except the first: it makes the server read the checkpoint.

        Raises:
            HotloopError: `not_paused`; `engine_error` when the server refused and still runs on its old weights;
                `install_failed` when what it holds is not known, or the update does not fit the checkpoint.
        """
        if self._calls and not self._is_paused:
            raise HotloopError("not_paused", "weights can only be written while the engine is paused")
        label = str(update.policy_version)
        has_bytes = bool(update.ranges or update.tensors)
        undo = await asyncio.to_thread(self._checkpoint.write, update.ranges, update.tensors) if has_bytes else []
        self._labels.begin_write()
        try:
            if has_bytes or not self._is_loaded:
                await self._reload(label)
            else:
                await self._relabel(label)
        except ServiceError as error:
            await asyncio.to_thread(self._checkpoint.restore, undo)
            if error.code == "engine_error" and error.details.get("answered"):
                self._labels.cancel_write()
                raise
            self._is_loaded = False
            raise ServiceError("install_failed", str(error), where=error.where, retryable=True) from error
        self._is_loaded = True
        self._labels.finish_write(label, update.policy_version, update.snapshot_identity)

    async def close(self) -> None:
        """Hang up; the server goes on without us."""
        for calls in list(self._calls.values()):
            for task in calls.values():
                task.cancel()
        await self._server.close()

    # ---- shared by the adapters ---------------------------------------------------------------------------------

    def _limit_of(self, request: GenerateRequest) -> int:
        """Tokens that a completion may have: what was asked for, cut to what the context leaves."""
        return min(request.params.max_new_tokens, self._info.max_context - len(request.prompt_ids))

    def _check(self, request: GenerateRequest) -> None:
        where = f"request {request.request_id}"
        size, context = len(request.prompt_ids), self._info.max_context
        if size == 0:
            raise InputError("empty_prompt", "a prompt needs at least one token", where=where)
        if size > context or (size == context and request.params.max_new_tokens > 0):
            raise InputError(
                "prompt_too_long", f"the prompt has {size} tokens, the context holds {context}", where=where
            )
        if any(not 0 <= token < self._info.vocab_size for token in request.prompt_ids):
            raise InputError("token_out_of_vocabulary", f"the vocabulary has {self._info.vocab_size} ids", where=where)
        if not 1 <= request.n <= self._max_slots:
            raise InputError(
                "too_many_completions", f"must be 1 to {self._max_slots}", where=f"{where}: n = {request.n}"
            )
        check_offered(self.name, request)


def check_offered(name: str, request: GenerateRequest) -> None:
    """Refuse what a server cannot record exactly.

    A server gives one logprob a token, taken after bias and temperature and before truncation. It is the sampler's own
    and the raw policy's at once only at temperature 1 (or 0, where the sampler's is 0.0) without bias and truncation.

    Raises:
        InputError: `not_offered_by_engine`.
    """
    params = request.params
    unoffered = {
        "a temperature other than 0 and 1": params.temperature not in (0.0, 1.0),
        "top_p below 1": params.top_p < 1,
        "top_k": params.top_k > 0,
        "min_p": params.min_p > 0,
        "logit_bias": bool(params.logit_bias),
        "prompt logprobs": request.return_prompt_logprobs,
    }
    found = [what for what, is_wanted in unoffered.items() if is_wanted]
    if found:
        raise InputError(
            "not_offered_by_engine",
            f"{name} records one logprob a token, which cannot describe {', '.join(found)}",
            where=f"request {request.request_id}",
            do="Leave it out, or use the torch engine.",
        )


def sort_top(row: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Order a row of (token, logprob) by logprob, ties by id."""
    return sorted(row, key=lambda each: (-each[1], each[0]))


def _read_info(settings: EngineSettings) -> EngineInfo:
    """Describe a remote engine from the config of the policy it serves."""
    path = Path(settings.policy_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("policy_not_found", f"no config.json can be read ({error})", where=str(path)) from None
    return EngineInfo(
        kind=settings.kind,
        vocab_size=int(config["vocab_size"]),
        max_context=settings.max_context or int(config.get("max_position_embeddings") or DEFAULT_CONTEXT),
        num_layers=int(config["num_hidden_layers"]),
        num_experts=int(config.get("num_experts") or config.get("n_routed_experts") or 0),
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
    )
