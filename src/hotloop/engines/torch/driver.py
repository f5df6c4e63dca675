"""Who calls `Core.step`: the event loop itself, or one worker thread.

    inline                                   thread
    event loop                               event loop            worker
      submit -> core                           post(fn) --inbox-->  run fn between steps
      drive task: step, deliver, sleep(0)      <--call_soon-------- step, deliver

- inline: no thread, no lock. A step blocks the loop for its length; every request that was submitted before the
  drive task runs is in the same batch, so a run repeats exactly. For a loop that shares its process with the engine.
- thread: steps run beside the event loop. Worker: consumes posted calls and the core's queue, produces events, waits
  for work or an end of pause, unblocked by `post`. For a service that must answer while tokens are computed.

An exchange of weights goes ahead of everything else that waits for the end of a step, the step's own events included,
so that nothing but its work lies between the end of one step and the start of the next:

    step | exchange | deliver the first step's events | posted calls | step; the exchange's caller is told

Promises: a posted call runs between two steps, never during one; calls run in order; an exception inside `step`
reaches every request in flight as `engine_error`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hotloop.engines.torch.core import Core, Event

T = TypeVar("T")
Deliver = Callable[[list[Event]], None]
Fail = Callable[[BaseException], None]


class Driver(Protocol):
    """Runs the core's steps and everything that must happen between two of them."""

    async def call(self, work: Callable[[], T]) -> T:
        """Run something between two steps and wait for its result."""
        ...

    def post(self, work: Callable[[], object]) -> None:
        """Run something between two steps, soon."""
        ...

    async def exchange(self, work: Callable[[], object]) -> float:
        """Run something between two steps, ahead of all that waits for the end of the first.

        Returns: seconds from the end of the step before it to the start of the next; where there is none, its own time.
        """
        ...

    async def close(self) -> None: ...


class InlineDriver:
    """Steps on the caller's event loop."""

    def __init__(self, core: Core, deliver: Deliver, fail: Fail, may_step: Callable[[], bool]) -> None:
        self._core, self._deliver, self._fail, self._may_step = core, deliver, fail, may_step
        self._task: asyncio.Task[None] | None = None

    async def call(self, work: Callable[[], T]) -> T:
        """Run now: no step is in progress while the event loop is here."""
        result = work()
        self._wake()
        return result

    def post(self, work: Callable[[], object]) -> None:
        """Run now."""
        work()
        self._wake()

    async def exchange(self, work: Callable[[], object]) -> float:
        """Run now. The event loop has more to do between two steps, which is not counted."""
        began = time.perf_counter()
        work()
        held_s = time.perf_counter() - began
        self._wake()
        return held_s

    def _wake(self) -> None:
        if (self._task is None or self._task.done()) and self._core.has_work and self._may_step():
            self._task = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        while self._core.has_work and self._may_step():
            try:
                events = self._core.step()
            except Exception as error:  # handed to every request in flight; nobody awaits this task
                self._core.drop_everything()
                self._fail(error)
                return
            if events:
                self._deliver(events)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop stepping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Work that is to go between two steps before anything else."""

    work: Callable[[], object]
    held_s: asyncio.Future[float]


class ThreadDriver:
    """Steps on one worker thread, started with the first call."""

    def __init__(self, core: Core, deliver: Deliver, fail: Fail, may_step: Callable[[], bool]) -> None:
        self._core, self._deliver, self._fail, self._may_step = core, deliver, fail, may_step
        self._inbox: deque[Callable[[], object]] = deque()
        self._exchanges: deque[_Exchange] = deque()
        self._exchanged: list[tuple[asyncio.Future[float], float]] = []
        """Run but not reported: whom to tell, and when the step before had ended."""
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, work: Callable[[], T]) -> T:
        """Run on the worker between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # carried to the caller, which raises it
                loop.call_soon_threadsafe(_settle_error, future, error)
            else:
                loop.call_soon_threadsafe(_settle_result, future, result)

        self.post(run)
        return await future

    def post(self, work: Callable[[], object]) -> None:
        """Hand over to the worker."""
        self._hand_over(self._inbox, work)

    async def exchange(self, work: Callable[[], object]) -> float:
        """Run on the worker, ahead of the inbox and of what the last step has to deliver."""
        wish = _Exchange(work, asyncio.get_running_loop().create_future())
        self._hand_over(self._exchanges, wish)
        return await wish.held_s

    def _hand_over(self, queue: deque[T], item: T) -> None:
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hotloop-engine", daemon=True)
            self._thread.start()
        with self._wake:
            queue.append(item)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._exchanges or self._closing or self._is_runnable()):
                    self._wake.wait()
                if self._closing:
                    return
                work = list(self._inbox)
                self._inbox.clear()
            for one in work:
                one()
            self._run_exchanges(time.perf_counter())
            self._report_exchanges()
            if self._is_runnable():
                self._step()

    def _is_runnable(self) -> bool:
        return self._core.has_work and self._may_step()

    def _step(self) -> None:
        assert self._loop is not None
        try:
            events = self._core.step()
        except Exception as error:  # handed to every request in flight; the thread goes on
            self._core.drop_everything()
            self._loop.call_soon_threadsafe(self._fail, error)
            return
        self._run_exchanges(time.perf_counter())
        if events:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _run_exchanges(self, began: float) -> None:
        """Run what waits to be exchanged.

        Args:
            began: when the last step ended; now, where none has just run.
        """
        assert self._loop is not None
        while self._exchanges:
            wish = self._exchanges.popleft()
            try:
                wish.work()
            except BaseException as error:  # carried to the caller, which raises it
                self._loop.call_soon_threadsafe(_settle_error, wish.held_s, error)
            else:
                self._exchanged.append((wish.held_s, began))

    def _report_exchanges(self) -> None:
        """Tell who asked how long steps were held; the next one starts now."""
        if not self._exchanged:
            return
        assert self._loop is not None
        now = time.perf_counter()
        for future, began in self._exchanged:
            self._loop.call_soon_threadsafe(_settle_result, future, now - began)
        self._exchanged.clear()

    async def close(self) -> None:
        """Stop the worker after the step it is in."""
        thread = self._thread
        if thread is None:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)


def _settle_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _settle_error(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
