"""Any Python function as a reward: `f(task, response) -> float | Score`, plain or async.

Owns: the verifier, and the resolution of dotted paths with errors that name what does exist.

Promises: the function is imported and its signature checked when the verifier is built, before anything is sampled.
The current folder is importable, as it is for `python -m`.
Does not do: isolation. The function runs in this process with the user's rights.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hotloop.errors import InputError
from hotloop.types import Rollout
from hotloop.verifiers.base import Judgement, cut_text

_SHOWN = 8
"""Names listed in an error."""


class PythonVerifier:
    """Calls a user's function."""

    def __init__(self, function: str) -> None:
        """Import the function and check that it takes a task and a response.

        Raises:
            InputError: code `function_not_found` or `function_signature`.
        """
        self.name = function
        self._function = resolve_function(function, where="reward.function")
        check_signature(self._function, ("task", "response"), dotted=function, where="reward.function")

    def judge(self, rollout: Rollout) -> Judgement:
        """Call it."""
        judgement: Judgement = self._function(rollout.task, rollout.response)
        return judgement

    async def close(self) -> None:
        """Nothing to give back."""


def resolve_function(dotted: str, *, where: str) -> Callable[..., Any]:
    """Import `module.function` (or `module:function`).

    Raises:
        InputError: code `function_not_found`, naming the part that is missing and what is there instead.
    """
    module_name, _, name = dotted.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise _not_found(dotted, where, "a dotted path has a module and a function", "Write module.function.")
    module = _import(module_name, dotted, where)
    found = getattr(module, name, None)
    if found is None:
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, offered, n=1)
        there = ", ".join(sorted(offered)[:_SHOWN]) or "no function"
        raise _not_found(
            dotted,
            where,
            f"module {module_name} has no {name!r}; it has {there}",
            f"Did you mean {module_name}.{close[0]}?" if close else "Name one of those.",
        )
    if not callable(found):
        raise _not_found(dotted, where, f"it is a {type(found).__name__}, which cannot be called", "Name a function.")
    function: Callable[..., Any] = found
    return function


def check_signature(function: Callable[..., Any], arguments: tuple[str, ...], *, dotted: str, where: str) -> None:
    """Check that a function can be called with so many positional arguments.

    Raises:
        InputError: code `function_signature`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # builtins without a signature: the call itself will tell
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            "function_signature",
            f"it is called with ({', '.join(arguments)}) and is defined as {signature}: {error}",
            where=f"{where} = {dotted!r}",
            do=f"Define it as def {dotted.rpartition('.')[2]}({', '.join(arguments)}).",
        ) from error


def _import(module_name: str, dotted: str, where: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _not_found(
                dotted,
                where,
                f"there is no module {error.name!r} in {here} or among the installed packages",
                "Check the spelling, or start from the folder that holds the file.",
            ) from error
        raise _not_found(
            dotted, where, f"importing {module_name} needs {error.name!r}, which is not installed", "Install it."
        ) from error
    except (Exception, SystemExit) as error:
        shown = cut_text(f"{type(error).__name__}: {error}")
        raise _not_found(dotted, where, f"importing {module_name} raised {shown}", "Fix the module.") from error


def _not_found(dotted: str, where: str, why: str, do: str) -> InputError:
    return InputError("function_not_found", why, where=f"{where} = {dotted!r}", do=do)
