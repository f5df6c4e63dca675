"""Who calls `Core.step`: the event loop itself, or one worker thread.

    inline                                   thread
    event loop                               event loop            worker
      submit -> core                           post(fn) --inbox-->  run fn between steps
      drive task: step, deliver, sleep(0)      <--call_soon-------- step, deliver

- inline: no thread, no lock. A step blocks the loop for its length; every request that was submitted before the
  drive task runs is in the same batch, so a run repeats exactly. For a loop that shares its process with the engine.
- thread: steps run beside the event loop. Worker: consumes posted calls and the core's queue, produces events, waits
  for work or an end of pause, unblocked by `post`. For a service that must answer while tokens are computed.

Promises: a posted call runs between two steps, never during one; calls run in order; an exception inside `step`
reaches every request in flight as `engine_error`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
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


class ThreadDriver:
    """Steps on one worker thread, started with the first call."""

    def __init__(self, core: Core, deliver: Deliver, fail: Fail, may_step: Callable[[], bool]) -> None:
        self._core, self._deliver, self._fail, self._may_step = core, deliver, fail, may_step
        self._inbox: deque[Callable[[], object]] = deque()
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
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hotloop-engine", daemon=True)
            self._thread.start()
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._closing or (self._core.has_work and self._may_step())):
                    self._wake.wait()
                if self._closing:
                    return
                work = list(self._inbox)
                self._inbox.clear()
            for one in work:
                one()
            if not (self._core.has_work and self._may_step()):
                continue
            assert self._loop is not None
            try:
                events = self._core.step()
            except Exception as error:  # handed to every request in flight; the thread goes on
                self._core.drop_everything()
                self._loop.call_soon_threadsafe(self._fail, error)
                continue
            if events:
                self._loop.call_soon_threadsafe(self._deliver, events)

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
