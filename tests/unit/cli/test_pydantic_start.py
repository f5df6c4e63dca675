"""A short command starts without what it does not need, and ends without walking what it made."""

from __future__ import annotations

import json
import subprocess
import sys

import pydantic.plugin._loader as real_loader
import pytest

from hotloop.cli.pydantic_start import _NoPlugins, leave_out_plugins

NAME = "pydantic.plugin._loader"


def run_plan(before: str, after: str) -> str:
    """Run `hotloop plan --json` between two pieces of code in a new process; return the last line of its output."""
    code = f"{before}\nfrom hotloop.cli.main import main\ntry:\n    main(['plan', '--json'])\nfinally:\n    {after}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    plan, _, last = done.stdout.rstrip("\n").rpartition("\n")
    assert json.loads(plan)["gpus"]["ray"] == 8
    return last


def test_a_plan_is_made_without_the_search_for_plugins() -> None:
    unneeded = ("importlib.metadata", "importlib.resources", "email", "zipfile", "subprocess", "numpy", "rich")
    after = f"import sys; print([name for name in {unneeded!r} if name in sys.modules])"
    assert run_plan("", after) == "[]"


def test_the_objects_of_a_plan_are_set_aside_when_its_process_ends() -> None:
    before = "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count() > 10_000))"
    assert run_plan(before, "pass") == "True"


def test_anything_but_plugins_comes_from_the_real_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = _NoPlugins(NAME)
    monkeypatch.setitem(sys.modules, NAME, stand_in)
    assert stand_in.get_plugins() == ()
    assert stand_in.PYDANTIC_ENTRY_POINT_GROUP == "pydantic"
    assert sys.modules[NAME] is not stand_in
    assert not hasattr(stand_in, "no_such_name") and not hasattr(stand_in, "__path__")


def test_a_loader_that_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, real_loader)
    leave_out_plugins()
    assert sys.modules[NAME] is real_loader


def test_plugins_that_a_user_turned_on_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "some-plugin")
    monkeypatch.delitem(sys.modules, NAME)
    leave_out_plugins()
    assert NAME not in sys.modules
