"""The embedded engine: the Engine port over `Core`, on a CPU or one CUDA GPU.

Owns: opening a policy directory, checking requests, handing chunks to their requests, pause and weight writes.

Promises: those of engines/base.py. `run` is the same without an event loop, for a caller that wants a batch done.

Decisions: a prompt may fill the context up to one token; a completion that reaches the end of the context ends with
`length`. `n` completions count as `n` slots when a request is admitted, first come first served. Equal seeds give
equal random numbers bit for bit; tokens are equal as far as matmuls of different batch sizes round alike (draw.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hotloop.engines.base import Chunk, EngineInfo, EngineSettings, GenerateRequest, WeightUpdate
from hotloop.engines.torch.core import Core, Counters, Event, Live
from hotloop.engines.torch.draw import shape_of
from hotloop.engines.torch.driver import Driver, InlineDriver, ThreadDriver
from hotloop.engines.torch.install import InstallPlan, plan_install
from hotloop.engines.torch.limits import find_bad_params
from hotloop.engines.torch.record import Wanted
from hotloop.engines.torch.runner import NativeRunner, Runner
from hotloop.errors import HotloopError, InputError, RunError
from hotloop.models.config import DecoderConfig, read_config
from hotloop.models.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from hotloop.models.weights import Arena, read_checkpoint_dtypes, read_policy
from hotloop.types import Completion

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Sink:
    """Chunks on their way from the core to the coroutine that asked."""

    __slots__ = ("chunks", "error", "is_done", "waiter")

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.is_done = False
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class PreparedInstall:
    """An update of which only the writes are left."""

    update: WeightUpdate
    plan: InstallPlan
    serial: int
    """How many installs there had been; with another one since, the plan is made again."""


class TorchEngine:
    """The default engine. Not for use from several event loops."""

    def __init__(
        self, config: DecoderConfig, arena: Arena, settings: EngineSettings, *, policy_dir: Path | None = None
    ) -> None:
        self.settings = settings
        self.config = config
        self.arena = arena
        torch.set_num_threads(settings.threads)
        max_context = settings.max_context or config.max_positions
        if max_context > config.max_positions:
            raise InputError(
                "engine_settings",
                f"the policy has {config.max_positions} positions",
                where=f"max_context = {max_context}",
                do=f"Set max_context to {config.max_positions} or less.",
            )
        self._info = EngineInfo(
            kind="torch",
            vocab_size=config.vocab_size,
            max_context=max_context,
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
        )
        self._policy_dir = policy_dir
        self._tokenizer: Tokenizer | None = None
        self._checkpoint_dtypes = (
            dict.fromkeys(arena.slots, arena.flat.dtype) if policy_dir is None else read_checkpoint_dtypes(policy_dir)
        )
        self._runner = self._build_runner(max_context)
        self._core = Core(
            self._runner,
            vocab_size=config.vocab_size,
            route_shape=(config.num_layers, config.experts_per_token) if config.num_experts else None,
            route_dtype=np.uint8 if config.num_experts <= 256 else np.uint16,
            prefix_cache_tokens=settings.prefix_cache_tokens,
            merges_prefixes=settings.merges_prefixes,
            open_tokenizer=self._open_tokenizer,
        )
        self._sinks: dict[int, _Sink] = {}
        """Keyed by the identity of the `Live` record, which the core holds until the last event."""
        self._num_installs = 0
        self._is_paused = False
        self._is_closed = False
        make = ThreadDriver if settings.driver == "thread" else InlineDriver
        self._driver: Driver = make(self._core, self._deliver, self._fail, lambda: not self._is_paused)

    def _build_runner(self, max_context: int) -> Runner:
        if self.config.is_native:
            return NativeRunner(self.config, self.arena, num_slots=self.settings.max_slots, max_context=max_context)
        from hotloop.engines.torch.foreign import ForeignRunner

        return ForeignRunner(self.config, self.arena, num_slots=self.settings.max_slots, max_context=max_context)

    def _open_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if self._policy_dir is None:
                raise InputError("tokenizer_not_found", "stop strings need a tokenizer and this engine has none")
            self._tokenizer = open_tokenizer(self._policy_dir)
        return self._tokenizer

    # -- the port ----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    @property
    def policy_version(self) -> int:
        """Version of the weights in memory."""
        return self._core.policy_version

    @property
    def counters(self) -> Counters:
        """Totals since the engine started; live, not a copy."""
        return self._core.counters

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Yield chunks as tokens come (`stream`), or one last chunk per completion.

        Closing the iterator early aborts the request.

        Raises:
            InputError: see `check_request`.
            HotloopError: code `logits_not_finite` when the weights are damaged; `engine_error` when a step failed
                otherwise; `engine_closed` after `close`.
        """
        self._check_open()
        live = self.check_request(request, stream=stream)
        sink = _Sink()
        self._sinks[id(live)] = sink
        self._driver.post(lambda: self._core.submit(live))
        try:
            while True:
                while sink.chunks:
                    yield sink.chunks.popleft()
                if isinstance(sink.error, HotloopError):
                    raise sink.error
                if sink.error is not None:
                    raise HotloopError(
                        "engine_error", f"a decode step failed ({sink.error})", where=request.request_id, retryable=True
                    ) from sink.error
                if sink.is_done:
                    return
                sink.waiter = asyncio.get_running_loop().create_future()
                await sink.waiter
        finally:
            self._sinks.pop(id(live), None)
            if not sink.is_done and sink.error is None and not self._is_closed:
                self._driver.post(lambda: self._core.abort_live(live))

    async def abort(self, request_id: str) -> None:
        """End a request with what it has; its iterator then ends. Unknown ids do nothing."""
        self._deliver(await self._driver.call(lambda: self._core.abort(request_id)))

    async def pause(self) -> None:
        """Return when no step is running; requests and their KV stay."""

        def hold() -> None:
            self._is_paused = True

        await self._driver.call(hold)

    async def resume(self) -> None:
        """Go on."""

        def release() -> None:
            self._is_paused = False

        await self._driver.call(release)

    async def write_weights(self, update: WeightUpdate) -> None:
        """Install weights in place; the engine must be paused, or hold no request.

        Raises:
            HotloopError: code `not_paused`, or `install_failed`; `policy_version` is then unchanged.
        """

        def write() -> None:
            if not self._is_paused and self._core.has_work:
                raise HotloopError("not_paused", "weights can only be written while the engine is paused")
            self.install(update)

        await self._driver.call(write)

    async def prepare_weights(self, update: WeightUpdate) -> PreparedInstall:
        """Do all of an install but its writes in a thread, while tokens are drawn; see `base.PreparesWeights`.

        Raises:
            HotloopError: code `install_failed`.
        """
        serial = self._num_installs
        plan = await asyncio.to_thread(plan_install, self.arena, update, self._checkpoint_dtypes)
        return PreparedInstall(update, plan, serial)

    async def swap_weights(self, prepared: PreparedInstall) -> float:
        """Write between two steps; see `base.PreparesWeights`.

        Returns: seconds from the end of the step before the write to the start of the next.

        Raises:
            HotloopError: code `install_failed`; nothing changed. Anything else leaves weights that cannot be trusted.
        """

        def swap() -> None:
            plan = prepared.plan
            try:
                if prepared.serial != self._num_installs:  # a plan is of the arena as it was
                    plan = plan_install(self.arena, prepared.update, self._checkpoint_dtypes)
                self._write(plan)
            except BaseException:  # an interrupt too leaves half-written weights, which nobody may sample from
                self._is_paused = True
                raise

        return await self._driver.exchange(swap)

    async def close(self) -> None:
        """Stop stepping; requests in flight end with `engine_closed`."""
        self._is_closed = True
        await self._driver.close()
        self._fail(HotloopError("engine_closed", "the engine was closed"))

    # -- without an event loop ---------------------------------------------------------------------------------

    def install(self, update: WeightUpdate) -> None:
        """Write weights now; only between steps.

        Raises:
            HotloopError: code `install_failed`; nothing changed.
        """
        self._write(plan_install(self.arena, update, self._checkpoint_dtypes, casts=False))

    def _write(self, plan: InstallPlan) -> None:
        if plan.num_elements:
            self._num_installs += 1
            plan.write(self.arena)
            self._runner.refresh()
        self._core.switch_version(plan.policy_version, plan.snapshot_identity)

    def run(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Run requests to their end on this thread; completions in index order, per request.

        Not while coroutines use the engine.

        Raises:
            InputError: see `check_request`; nothing was started.
        """
        self._check_open()
        lives = [self.check_request(request, stream=False) for request in requests]
        for live in lives:
            self._core.submit(live)
        found: dict[int, dict[int, Completion]] = {id(live): {} for live in lives}
        while self._core.has_work:
            for event in self._core.step():
                found[id(event.live)].update({chunk.index: chunk.completion for chunk in event.chunks})
        return [[found[id(live)][index] for index in range(live.request.n)] for live in lives]

    # -- requests ----------------------------------------------------------------------------------------------

    def check_request(self, request: GenerateRequest, *, stream: bool) -> Live:
        """Turn a request into the core's record of it.

        Raises:
            InputError: codes `empty_prompt`, `prompt_too_long`, `token_out_of_vocabulary`, `too_many_completions`,
                `sampling_params`, `routes_unsupported`, `tokenizer_not_found` (stop strings without a tokenizer).
        """
        prompt, params = [int(token) for token in request.prompt_ids], request.params
        where = f"request {request.request_id}"
        context = self._info.max_context
        if not prompt:
            raise InputError("empty_prompt", "a prompt needs at least one token", where=where)
        if (len(prompt) >= context and params.max_new_tokens > 0) or len(prompt) > context:
            raise InputError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens and the context holds {context}, answer included",
                where=where,
                do="Shorten the prompt or use a policy with a longer context.",
                details={"prompt_tokens": len(prompt), "max_context": context},
            )
        bad = next((token for token in prompt if not 0 <= token < self._info.vocab_size), None)
        if bad is not None:
            raise InputError(
                "token_out_of_vocabulary",
                f"token id {bad} is outside the vocabulary of {self._info.vocab_size}",
                where=where,
            )
        if not 1 <= request.n <= self.settings.max_slots:
            raise InputError(
                "too_many_completions",
                f"must be 1 to {self.settings.max_slots}, the engine's slots",
                where=f"{where}: n = {request.n}",
                do="Split the request or raise max_slots.",
            )
        if request.seeds and len(request.seeds) != request.n:
            raise InputError("sampling_params", f"{len(request.seeds)} seeds for {request.n} completions", where=where)
        problem = find_bad_params(request, self._info.vocab_size)
        if problem:
            raise InputError("sampling_params", problem, where=where)
        if request.return_routed_experts and not self.config.is_native:
            raise InputError(
                "routes_unsupported", "this policy runs through transformers, which gives no routes", where=where
            )
        if params.stop:
            self._open_tokenizer()
        return Live(
            request=request,
            seed=secrets.randbits(63) if params.seed is None else int(params.seed),
            streams=stream,
            wanted=Wanted(
                request.top_logprobs, request.top_logprobs_kind, request.return_support and shape_of(params).truncates
            ),
            shape=shape_of(params),
            limit=min(params.max_new_tokens, context - len(prompt)),
            prompt=prompt,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RunError("engine_closed", "the engine was closed")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            sink = self._sinks.get(id(event.live))
            if sink is not None:
                sink.chunks.extend(event.chunks)
                sink.is_done = sink.is_done or event.is_last
                sink.wake()

    def _fail(self, error: BaseException) -> None:
        for sink in list(self._sinks.values()):
            sink.error = error
            sink.wake()


def build_engine(settings: EngineSettings) -> TorchEngine:
    """Open a policy directory.

    Raises:
        InputError: codes of `read_policy`, `tokenizer_larger_than_embedding`, `engine_settings`.
    """
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(
            "engine_settings", "torch sees no CUDA GPU", where=f"device = {settings.device}", do="Use cpu."
        )
    directory = Path(settings.policy_dir)
    if (directory / "tokenizer.json").is_file():
        check_vocabulary(open_tokenizer(directory), read_config(directory).vocab_size, where=str(directory))
    config, arena = read_policy(directory, _DTYPES[settings.dtype], device=settings.device)
    return TorchEngine(config, arena, settings, policy_dir=directory)
