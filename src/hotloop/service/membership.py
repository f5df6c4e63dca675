"""The replicas of one deployment as the gateway sees them: alive, ready, loaded how much, ejected or not.

Owns: one `Member` per replica process and the rules of health. Promises: a member whose status is older than
`STALE_AFTER_S` is not ready; one that failed `EJECT_AFTER` requests in a row is ejected for a time that doubles.
Does not do: choosing (routing.py), starting processes (launchers/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hotloop.service.hot_load_api import LoadingState, ReplicaStatus
from hotloop.service.routing import ReplicaLoad

STALE_AFTER_S = 5.0
"""Replicas say something at least every second."""
EJECT_AFTER = 3
EJECT_FIRST_S = 1.0
EJECT_LONGEST_S = 30.0
EJECT_DOUBLINGS = 5
"""Beyond these the time is at its bound."""


@dataclass(slots=True)
class Member:
    """One replica."""

    replica_id: str
    url: str = ""
    """Empty while its process is not up."""
    status: ReplicaStatus = field(init=False)
    seen_at: float = float("-inf")
    in_flight: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_until: float = float("-inf")
    restarts: int = 0

    def __post_init__(self) -> None:
        self.status = ReplicaStatus(self.replica_id)

    def update(self, status: ReplicaStatus, now: float) -> None:
        """Take a status that the replica sent."""
        self.status = status
        self.seen_at = now

    def lose(self, reason: str, message: str) -> None:
        """Note that the process is gone: it serves nothing until it says otherwise."""
        self.url = ""
        self.seen_at = float("-inf")
        loading = LoadingState(stage="error", target=self.status.loading.target, reason=reason, message=message)
        loading.retryable = True
        self.status = ReplicaStatus(self.replica_id, loading=loading)

    def note_success(self) -> None:
        """A request went well."""
        self.failures = 0
        self.ejections = 0

    def note_failure(self, now: float) -> None:
        """A request failed for a reason that lies with the replica."""
        self.failures += 1
        if self.failures >= EJECT_AFTER:
            self.failures = 0
            self.ejections += 1
            doublings = min(self.ejections - 1, EJECT_DOUBLINGS)
            self.ejected_until = now + min(EJECT_FIRST_S * 2**doublings, EJECT_LONGEST_S)

    def is_ready(self, now: float) -> bool:
        """Say whether requests may go there."""
        return bool(self.url) and self.status.readiness and now - self.seen_at <= STALE_AFTER_S

    def load(self, now: float, limit: int) -> ReplicaLoad:
        """What routing needs to know."""
        return ReplicaLoad(
            replica_id=self.replica_id,
            ready=self.is_ready(now),
            ejected=now < self.ejected_until,
            in_flight=self.in_flight,
            limit=limit,
            policy_version=-1 if self.status.policy_version is None else self.status.policy_version,
            snapshot_identity=self.status.current_snapshot_identity or "",
        )


class Membership:
    """All members, by id."""

    def __init__(self, *, clock: Callable[[], float], concurrency_per_replica: int) -> None:
        self._clock = clock
        self._limit = concurrency_per_replica
        self.members: dict[str, Member] = {}

    def add(self, replica_id: str) -> Member:
        """Register a replica before its process is up."""
        self.members[replica_id] = Member(replica_id)
        return self.members[replica_id]

    def loads(self) -> list[ReplicaLoad]:
        """Every member, for routing."""
        now = self._clock()
        return [member.load(now, self._limit) for member in self.members.values()]

    def statuses(self) -> list[ReplicaStatus]:
        """Every member's status; one that fell silent is not ready."""
        now = self._clock()
        for member in self.members.values():
            if member.url and now - member.seen_at > STALE_AFTER_S:
                member.status.readiness = False
        return [member.status for member in self.members.values()]
