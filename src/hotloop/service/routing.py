"""Which replica takes a request. Pure: replicas' states in, one replica or a reason out.

Owns: the order of preference: a version pin first, then affinity with bounded load, then the shortest queue.
Promises: never a replica that is not ready, ejected or full; the same key goes to the same replica while that holds;
when a replica leaves, only its own keys move (rendezvous hashing).
Does not do: counting (membership.py), waiting (gateway.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.errors import ServiceError, VersionNotReady

BOUNDED_LOAD = 1.25
"""A replica may hold at most this many times the mean load before affinity is overruled (Mirrokni et al. 2018)."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What routing knows of one replica."""

    replica_id: str
    ready: bool
    ejected: bool
    in_flight: int
    limit: int
    policy_version: int
    snapshot_identity: str


@dataclass(frozen=True, slots=True)
class Pin:
    """What a request demands of the weights."""

    min_version: int | None = None
    exact_version: int | None = None
    identity: str = ""

    @property
    def is_exact(self) -> bool:
        return self.exact_version is not None or bool(self.identity)


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of routing: a replica, or the request must wait because all that fit are full."""

    replica_id: str = ""
    must_wait: bool = False


def parse_pin(body: Mapping[str, Any], identity: str) -> Pin:
    """Read `weight_version` from the top level or from `nvext`.

    Raises:
        ServiceError: `invalid_field`.
    """
    nvext = body.get("nvext")
    raw = body.get("weight_version", nvext.get("weight_version") if isinstance(nvext, dict) else None)
    if raw is None:
        return Pin(identity=identity)
    allowed = {"min_version", "exact_version"}
    if not isinstance(raw, dict) or not raw or not set(raw) <= allowed or not all(_is_version(v) for v in raw.values()):
        raise ServiceError(
            "invalid_field",
            "must hold min_version or exact_version, integers of at least 0",
            where="weight_version",
            do='Send {"min_version": 3}.',
            details={"param": "weight_version"},
        )
    return Pin(raw.get("min_version"), raw.get("exact_version"), identity)


def _is_version(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def satisfies(pin: Pin, policy_version: int, identity: str) -> bool:
    """Say whether weights of this version and identity satisfy a pin."""
    if pin.min_version is not None and policy_version < pin.min_version:
        return False
    if pin.exact_version is not None and policy_version != pin.exact_version:
        return False
    return not pin.identity or pin.identity == identity


def check_pin(pin: Pin, policy_version: int, identity: str, target_version: int | None, target_identity: str) -> None:
    """Let a request pass that these weights satisfy, or say whether waiting helps.

    Raises:
        VersionNotReady: code `weight_version_not_ready`; retry.
        ServiceError: `weight_version_gone`, `snapshot_not_served`.
    """
    if satisfies(pin, policy_version, identity):
        return
    if pin.identity and pin.identity != identity:
        is_coming = pin.identity == target_identity
        raise ServiceError(
            "snapshot_not_served",
            f"snapshot {pin.identity} is not served here; this replica serves {identity or 'nothing'}",
            do="Retry in 1 s." if is_coming else f"Ask for {identity}, or load {pin.identity} first.",
            details={"identity": pin.identity, "retry_after_s": 1} if is_coming else {"identity": pin.identity},
            retryable=is_coming,
        )
    wanted = pin.min_version if pin.exact_version is None else pin.exact_version
    assert wanted is not None
    facts = {"current_policy_version": policy_version, "requested_min": wanted, "target_policy_version": target_version}
    if policy_version < wanted:
        raise VersionNotReady(
            "weight_version_not_ready",
            f"no replica serves version {wanted} yet; this one serves {policy_version}",
            do=f"Retry in 1 s, or ask for min_version {policy_version}.",
            details=facts,
            retryable=True,
        )
    raise ServiceError(
        "weight_version_gone",
        f"version {wanted} is no longer served; this replica serves {policy_version}",
        do=f"Ask for version {policy_version} or newer.",
        details=facts,
    )


def choose_replica(replicas: Sequence[ReplicaLoad], pin: Pin, affinity_key: str) -> Choice:
    """Choose a replica for one request.

    Returns: a replica; or `must_wait` when every fitting one is full. When none satisfies the pin, a ready one is
    returned all the same: its admission check gives the exact answer.

    Raises:
        ServiceError: `no_replicas` when none is ready.
    """
    ready = [replica for replica in replicas if replica.ready and not replica.ejected]
    if not ready:
        ready = [replica for replica in replicas if replica.ready]
    if not ready:
        raise ServiceError(
            "no_replicas",
            f"none of {len(replicas)} replicas is ready",
            do="Retry in 1 s; see GET /hot_load/v1/models/hot_load for what they wait for.",
            retryable=True,
        )
    fitting = [
        replica for replica in ready if satisfies(pin, replica.policy_version, replica.snapshot_identity)
    ] or ready
    with_room = [replica for replica in fitting if replica.in_flight < replica.limit]
    if not with_room:
        return Choice(must_wait=True)
    if affinity_key:
        total = sum(replica.in_flight for replica in fitting) + 1
        bound = math.ceil(BOUNDED_LOAD * total / len(fitting))
        for replica in sorted(fitting, key=lambda each: _affinity(affinity_key, each.replica_id), reverse=True):
            if replica.in_flight < min(bound, replica.limit):
                return Choice(replica.replica_id)
    shortest = min(with_room, key=lambda each: (each.in_flight / each.limit, each.replica_id))
    return Choice(shortest.replica_id)


def _affinity(key: str, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{replica_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def affinity_key_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the first affinity key present: session headers, then the body's session, then its user."""
    for name in ("x-multi-turn-session-id", "x-session-affinity"):
        if headers.get(name):
            return str(headers[name])
    nvext = body.get("nvext")
    control = nvext.get("session_control") if isinstance(nvext, dict) else None
    session = control.get("session_id") if isinstance(control, dict) else None
    return str(session or body.get("user") or "")
