"""Prometheus metrics of one gateway. Names and labels are listed in docs/reference/metrics.md.

Owns: the registry and its instruments. Promises: no label takes a value that a client can choose freely.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from hotloop.service.membership import Membership


class Metrics:
    """The instruments of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hotloop_requests", "Rollout requests answered by a replica.", ["status"], registry=self.registry
        )
        self.errors = Counter(
            "hotloop_gateway_errors", "Requests refused or broken off at the gateway.", ["code"], registry=self.registry
        )
        self.waiting = Gauge("hotloop_queue_length", "Requests waiting for a replica.", registry=self.registry)
        self.in_flight = Gauge(
            "hotloop_in_flight", "Requests in flight at a replica.", ["replica"], registry=self.registry
        )
        self.ready = Gauge("hotloop_replica_ready", "1 if it takes requests.", ["replica"], registry=self.registry)
        self.version = Gauge(
            "hotloop_policy_version", "Policy version a replica serves.", ["replica"], registry=self.registry
        )
        self.restarts = Counter(
            "hotloop_replica_restarts", "Times a replica process was restarted.", ["replica"], registry=self.registry
        )
        self.pause_ms = Gauge(
            "hotloop_swap_pause_ms", "How long the last swap held generation.", ["replica"], registry=self.registry
        )

    def render(self, membership: Membership, now: float) -> bytes:
        """Write the exposition text."""
        for member in membership.members.values():
            name = member.replica_id
            self.in_flight.labels(name).set(member.in_flight)
            self.ready.labels(name).set(1 if member.is_ready(now) else 0)
            if member.status.policy_version is not None:
                self.version.labels(name).set(member.status.policy_version)
            if member.status.pause_ms is not None:
                self.pause_ms.labels(name).set(member.status.pause_ms)
        return generate_latest(self.registry)
