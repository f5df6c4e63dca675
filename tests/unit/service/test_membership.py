"""Which replicas may be asked: silent, failing and lost ones may not."""

from __future__ import annotations

from hotloop.service.hot_load_api import ReplicaStatus
from hotloop.service.membership import EJECT_AFTER, EJECT_LONGEST_S, STALE_AFTER_S, Member, Membership


def ready_member(now: float = 0.0) -> Member:
    member = Member("r0", url="http://127.0.0.1:1")
    member.update(ReplicaStatus("r0", True, "step000001", 1), now)
    return member


def test_a_member_is_ready_while_it_says_so_often_enough() -> None:
    member = ready_member()
    assert member.is_ready(STALE_AFTER_S) and not member.is_ready(STALE_AFTER_S + 0.01)
    member.update(ReplicaStatus("r0", False), 10.0)
    assert not member.is_ready(10.0)


def test_a_lost_member_says_why_and_keeps_its_target() -> None:
    member = ready_member()
    member.status.loading.target = "step000002"
    member.lose("replica_lost", "it ended")
    assert not member.is_ready(0.0) and member.url == ""
    loading = member.status.loading
    assert (loading.stage, loading.reason, loading.target, loading.retryable) == (
        "error",
        "replica_lost",
        "step000002",
        True,
    )


def test_failures_in_a_row_eject_for_a_time_that_doubles_up_to_a_bound() -> None:
    member = ready_member()
    lengths = []
    for _ in range(8):
        for _ in range(EJECT_AFTER):
            assert not member.load(100.0, 1).ejected or lengths
            member.note_failure(100.0)
        lengths.append(member.ejected_until - 100.0)
    assert lengths == [1.0, 2.0, 4.0, 8.0, 16.0, EJECT_LONGEST_S, EJECT_LONGEST_S, EJECT_LONGEST_S]


def test_a_success_forgets_failures() -> None:
    member = ready_member()
    for _ in range(EJECT_AFTER - 1):
        member.note_failure(0.0)
    member.note_success()
    for _ in range(EJECT_AFTER - 1):
        member.note_failure(0.0)
    assert not member.load(0.0, 1).ejected
    member.note_failure(0.0)
    assert member.load(0.0, 1).ejected and not member.load(1.0, 1).ejected


def test_routing_sees_version_identity_and_load() -> None:
    member = ready_member()
    member.in_flight = 3
    load = member.load(0.0, 8)
    assert (load.ready, load.in_flight, load.limit, load.policy_version, load.snapshot_identity) == (
        True,
        3,
        8,
        1,
        "step000001",
    )
    assert Member("r1").load(0.0, 8).policy_version == -1


def test_a_silent_member_is_shown_as_not_ready() -> None:
    now = [0.0]
    membership = Membership(clock=lambda: now[0], concurrency_per_replica=2)
    member = membership.add("r0")
    member.url = "http://127.0.0.1:1"
    member.update(ReplicaStatus("r0", True, "step000001", 1), 0.0)
    assert [status.readiness for status in membership.statuses()] == [True]
    now[0] = STALE_AFTER_S + 1
    assert [status.readiness for status in membership.statuses()] == [False]
    assert [load.ready for load in membership.loads()] == [False]
