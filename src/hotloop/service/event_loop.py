"""Which event loop a process of the service runs on: uvloop where it is installed, else asyncio's own.

Owns: that choice. Promises: nothing else depends on it. uvloop saves about a tenth of the gateway's CPU on a small
request (benchmarks/gateway.py --loop measures either).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

T = TypeVar("T")
LoopKind = Literal["auto", "asyncio", "uvloop"]


def run(main: Coroutine[Any, Any, T], kind: LoopKind = "auto") -> T:
    """Run a coroutine to its end in a new event loop.

    Args:
        kind: `auto` takes uvloop where it is installed.

    Raises:
        ImportError: `uvloop` was asked for by name and is not installed.
    """
    with asyncio.Runner(loop_factory=_factory(kind)) as runner:
        return runner.run(main)


def _factory(kind: LoopKind) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if kind == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        if kind == "uvloop":
            raise
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
