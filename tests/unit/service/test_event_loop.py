"""The choice of an event loop."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from hotloop.service.event_loop import run


async def find_loop() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_uvloop_is_taken_where_it_is_installed() -> None:
    assert run(find_loop()) is run(find_loop(), "uvloop") is uvloop.Loop


def test_asyncio_can_be_asked_for() -> None:
    assert run(find_loop(), "asyncio").__module__.startswith("asyncio.")


def test_without_uvloop_asyncio_serves_and_only_its_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # what an import finds where it is not installed
    assert run(find_loop()).__module__.startswith("asyncio.")
    coroutine = find_loop()
    with pytest.raises(ImportError):
        run(coroutine, "uvloop")
    coroutine.close()
