"""The Launcher port: starts replica processes and says where they listen.

Owns: the Protocol, what a replica is started with, and the first line it answers.
Promises (held by tests/contract/test_launcher_contract.py): a started replica has its own process or actor; the token
never stands in a command line; `stop` ends it within its grace time, by force if need be; `wait` returns when it ended.
Does not do: restarting (gateway's supervisor), health (membership.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What one replica is started with; everything but the token may be logged."""

    replica_id: str
    settings: dict[str, Any]
    """JSON object that `service.replica` reads."""
    token: str = field(repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Further environment variables that must not be logged."""
    log_path: str = ""
    """Where its stderr goes; empty: inherited."""


class RunningReplica(Protocol):
    """A replica that was started."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return its exit code once it has ended; negative is a signal."""
        ...

    async def stop(self, grace_s: float) -> None: ...


class Launcher(Protocol):
    """Starts replicas."""

    async def start(self, spec: ReplicaSpec) -> RunningReplica:
        """Start one and wait until it listens.

        Raises:
            ServiceError: `replica_start_failed`, with its last words.
        """
        ...
