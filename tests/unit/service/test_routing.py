"""Which replica takes a request: pins first, then affinity with bounded load, then the shortest queue."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hotloop.errors import ServiceError, VersionNotReady
from hotloop.service.routing import Pin, ReplicaLoad, affinity_key_of, check_pin, choose_replica, parse_pin


def replica(name: str, **changes: object) -> ReplicaLoad:
    base = ReplicaLoad(
        name, ready=True, ejected=False, in_flight=0, limit=8, policy_version=1, snapshot_identity="step000001"
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # the tests name fields of the record


def test_the_shortest_queue_is_chosen_relative_to_the_limit() -> None:
    replicas = [replica("r0", in_flight=4, limit=16), replica("r1", in_flight=3, limit=8)]
    assert choose_replica(replicas, Pin(), "").replica_id == "r0"


def test_a_pin_outranks_a_shorter_queue() -> None:
    replicas = [replica("r0"), replica("r1", in_flight=7, policy_version=2)]
    assert choose_replica(replicas, Pin(min_version=2), "").replica_id == "r1"


def test_a_pin_that_nobody_satisfies_still_names_a_replica_whose_admission_answers() -> None:
    assert choose_replica([replica("r0")], Pin(exact_version=9), "").replica_id == "r0"


@pytest.mark.parametrize("state", [{"ready": False}, {"ready": False, "ejected": True}])
def test_no_ready_replica_is_an_error_that_says_retry(state: dict[str, bool]) -> None:
    with pytest.raises(ServiceError) as error:
        choose_replica([replica("r0", **state)], Pin(), "")
    assert (error.value.code, error.value.retryable) == ("no_replicas", True)


def test_an_ejected_replica_is_used_only_when_no_other_is_left() -> None:
    ejected = replica("r0", ejected=True)
    assert choose_replica([ejected, replica("r1", in_flight=7)], Pin(), "").replica_id == "r1"
    assert choose_replica([ejected], Pin(), "").replica_id == "r0"


def test_full_replicas_make_a_request_wait() -> None:
    assert choose_replica([replica("r0", in_flight=8)], Pin(), "k").must_wait


def test_a_key_stays_with_its_replica_and_moves_alone_when_one_leaves() -> None:
    replicas = [replica(f"r{i}") for i in range(4)]
    keys = [f"group-{i}" for i in range(400)]
    before = {key: choose_replica(replicas, Pin(), key).replica_id for key in keys}
    assert before == {key: choose_replica(replicas, Pin(), key).replica_id for key in keys}
    assert min(Counter(before.values()).values()) > 60  # 100 expected of each
    after = {key: choose_replica(replicas[:3], Pin(), key).replica_id for key in keys}
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == "r3"}


def test_affinity_yields_when_its_replica_holds_more_than_its_share() -> None:
    replicas = [replica(f"r{i}", limit=1000) for i in range(4)]
    favourite = choose_replica(replicas, Pin(), "hot").replica_id
    # 40 requests there and none elsewhere: the bound is ceil(1.25 x 41 / 4) = 13, so the second choice takes it.
    loaded = [replace(each, in_flight=40) if each.replica_id == favourite else each for each in replicas]
    assert choose_replica(loaded, Pin(), "hot").replica_id != favourite


@pytest.mark.parametrize(
    ("pin", "target", "code", "retryable"),
    [
        (Pin(min_version=2), "", "weight_version_not_ready", True),
        (Pin(exact_version=2), "", "weight_version_not_ready", True),
        (Pin(exact_version=0), "", "weight_version_gone", False),
        (Pin(identity="other"), "", "snapshot_not_served", False),
        (Pin(identity="other"), "other", "snapshot_not_served", True),
    ],
)
def test_a_pin_that_is_not_met_says_whether_waiting_helps(pin: Pin, target: str, code: str, retryable: bool) -> None:
    with pytest.raises(ServiceError) as error:
        check_pin(pin, 1, "step000001", 2, target)
    assert (error.value.code, error.value.retryable) == (code, retryable)
    if code == "weight_version_not_ready":
        assert isinstance(error.value, VersionNotReady)
        assert error.value.details == {
            "current_policy_version": 1,
            "requested_min": 2,
            "target_policy_version": 2,
        }


@pytest.mark.parametrize("pin", [Pin(), Pin(min_version=1), Pin(exact_version=1), Pin(identity="step000001")])
def test_a_pin_that_is_met_passes(pin: Pin) -> None:
    check_pin(pin, 1, "step000001", None, "")


@pytest.mark.parametrize(
    "raw", [3, {}, {"min_version": -1}, {"min_version": True}, {"version": 1}, {"min_version": "1"}]
)
def test_a_malformed_pin_is_named(raw: object) -> None:
    with pytest.raises(ServiceError) as error:
        parse_pin({"weight_version": raw}, "")
    assert (error.value.code, error.value.details["param"]) == ("invalid_field", "weight_version")


def test_a_pin_is_read_from_the_top_level_before_nvext() -> None:
    body = {"weight_version": {"min_version": 3}, "nvext": {"weight_version": {"exact_version": 1}}}
    assert parse_pin(body, "") == Pin(min_version=3)
    assert parse_pin({"nvext": {"weight_version": {"exact_version": 1}}}, "") == Pin(exact_version=1)


@pytest.mark.parametrize(
    ("headers", "body", "key"),
    [
        ({"x-multi-turn-session-id": "a", "x-session-affinity": "b"}, {"user": "c"}, "a"),
        ({"x-session-affinity": "b"}, {"user": "c"}, "b"),
        ({}, {"nvext": {"session_control": {"session_id": "s"}}, "user": "c"}, "s"),
        ({}, {"user": "c"}, "c"),
        ({}, {"nvext": 3}, ""),
    ],
)
def test_the_first_affinity_key_present_counts(headers: dict[str, str], body: dict[str, object], key: str) -> None:
    assert affinity_key_of(headers, body) == key
