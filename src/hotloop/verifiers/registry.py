"""Which verifier an experiment's `[reward]` means.

Owns: the table from `kind` to implementation. Modules are imported when asked for: math-verify, aiohttp and a user's
own module are loaded only by a run that needs them.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from hotloop.errors import InputError
from hotloop.verifiers.base import Verifier

_CLASSES = {
    "exact": "hotloop.verifiers.exact:ExactVerifier",
    "math": "hotloop.verifiers.math:MathVerifier",
    "deepscaler": "hotloop.verifiers.math:DeepscalerVerifier",
    "format": "hotloop.verifiers.format:FormatVerifier",
    "python": "hotloop.verifiers.python:PythonVerifier",
    "remote": "hotloop.verifiers.remote:RemoteVerifier",
    "program": "hotloop.verifiers.program:ProgramVerifier",
}
KINDS = tuple(_CLASSES)


class RewardChoice(Protocol):
    """The `[reward]` section of an experiment: a kind and its settings."""

    @property
    def kind(self) -> str:
        """Which verifier."""
        ...

    def model_dump(self) -> dict[str, Any]:
        """All settings by name, `kind` included."""
        ...


def open_verifier(reward: RewardChoice) -> Verifier:
    """Build the verifier of a `[reward]` section.

    Raises:
        InputError: the settings cannot work (`reward_pattern`, `function_not_found`, `function_signature`,
            `reward_kind`).
        MissingExtra: the verifier needs a package that is not installed.
    """
    settings = {name: value for name, value in reward.model_dump().items() if name != "kind"}
    return build_verifier(reward.kind, **settings)


def build_verifier(kind: str, **settings: Any) -> Verifier:
    """Build a verifier by name.

    Raises:
        InputError, MissingExtra: as `open_verifier`.
    """
    path = _CLASSES.get(kind)
    if path is None:
        raise InputError(
            "reward_kind",
            "there is no such verifier",
            where=f"reward.kind = {kind!r}",
            do=f"Choose {', '.join(KINDS)}.",
        )
    module, name = path.split(":")
    verifier: Verifier = getattr(importlib.import_module(module), name)(**settings)
    return verifier
