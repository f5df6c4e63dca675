"""Bodies of the hot_load API: what a POST may ask, what GET shows."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.errors import ServiceError
from hotloop.service.hot_load_api import (
    LoadingState,
    LoadRequest,
    ReplicaStatus,
    parse_drain_timeout,
    parse_hint,
    parse_load_request,
    render_status,
)


def refusal(body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    with pytest.raises(ServiceError) as caught:
        parse_load_request(body, headers or {})
    return caught.value.code


def test_an_identity_suffices() -> None:
    found = parse_load_request({"identity": "step000002"}, {})
    assert found == LoadRequest("step000002") and found.reset_prompt_cache == "all" and not found.is_incremental
    assert LoadRequest.from_json(found.to_json()) == found


def test_everything_that_may_be_asked_is_read_and_survives_the_way_to_a_replica() -> None:
    body = {
        "identity": "step000002",
        "incremental_snapshot_metadata": {
            "previous_snapshot_identity": "step000001",
            "compression_format": "arc_v2",
            "checksum_format": "alder32",
        },
        "policy_version": 2,
        "reset_prompt_cache": "new_session",
        "transition": "SYNC",
        "allow_rewind": True,
        "validation": {"extra_fields_ignore": ["torch_dtype"]},
    }
    found = parse_load_request(body, {"x-hot-load-drain-timeout": "2.5"})
    assert (found.parent, found.compression_format, found.checksum_format) == ("step000001", "arc_v2", "alder32")
    assert (found.policy_version, found.transition, found.drain_timeout_s, found.allow_rewind) == (2, "SYNC", 2.5, True)
    assert found.extra_fields_ignore == ("torch_dtype",) and found.is_incremental
    assert LoadRequest.from_json(found.to_json()) == found


@pytest.mark.parametrize(("raw", "wanted"), [(True, "all"), (False, "none"), (None, "all"), ("none", "none")])
def test_resetting_the_cache_may_be_a_boolean(raw: Any, wanted: str) -> None:
    assert parse_load_request({"identity": "a", "reset_prompt_cache": raw}, {}).reset_prompt_cache == wanted


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ({"identity": None}, "missing_identity"),
        ({"identity": "../x"}, "invalid_identity"),
        ({"identity": 3}, "invalid_identity"),
        ({"colour": 1}, "unknown_field"),
        ({"incremental_snapshot_metadata": {"x": 1}}, "unknown_field"),
        ({"incremental_snapshot_metadata": []}, "invalid_field"),
        ({"incremental_snapshot_metadata": {"previous_snapshot_identity": "a/b"}}, "invalid_identity"),
        ({"incremental_snapshot_metadata": {"compression_format": "arc_v3"}}, "unsupported_format"),
        ({"policy_version": -1}, "invalid_field"),
        ({"policy_version": True}, "invalid_field"),
        ({"transition": "async"}, "invalid_field"),
        ({"allow_rewind": "yes"}, "invalid_field"),
        ({"reset_prompt_cache": "some"}, "invalid_field"),
        ({"reset_prompt_cache": 1}, "invalid_field"),
        ({"validation": {"x": 1}}, "unknown_field"),
        ({"validation": {"extra_fields_ignore": "a"}}, "invalid_field"),
    ],
)
def test_a_wrong_body_has_a_code(extra: dict[str, Any], code: str) -> None:
    assert refusal({"identity": "a", **extra}) == code


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "1e9"])
def test_a_drain_timeout_is_seconds(text: str) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_drain_timeout({"x-fireworks-hot-load-drain-timeout": text})
    assert caught.value.code == "invalid_field"
    assert parse_drain_timeout({}) is None and parse_drain_timeout({"x-hot-load-drain-timeout": "0"}) == 0.0


def test_a_hint_names_files_of_one_directory() -> None:
    assert parse_hint({"identity": "a"}) == ("a", ())
    assert parse_hint({"identity": "a", "files": ["model.safetensors"]}) == ("a", ("model.safetensors",))
    for body in ({}, {"identity": "a", "files": "x"}, {"identity": "a", "files": ["../x"]}, {"identity": "a", "b": 1}):
        with pytest.raises(ServiceError):
            parse_hint(body)


def replica(name: str, stage: Any, identity: str | None, *, ready: bool = True) -> ReplicaStatus:
    return ReplicaStatus(name, ready, identity, 1, LoadingState(stage=stage, target="b"), load_id=4)


def test_ready_needs_a_replica_and_all_of_them_done_on_the_target() -> None:
    def is_ready(*replicas: ReplicaStatus) -> bool:
        return bool(render_status(replicas, "b", None, vendor_dialect=False)["ready"])

    done = replica("r0", "done", "b")
    assert is_ready(done) and not is_ready()
    assert not is_ready(done, replica("r1", "loading", "a"))
    assert not is_ready(done, replica("r1", "done", "a"))
    assert not is_ready(done, replica("r1", "done", "b", ready=False))


def test_done_is_ready_in_the_vendors_dialect() -> None:
    both = [replica("r0", "done", "b"), replica("r1", "staged", "a")]
    for dialect, stages in ((True, ["ready", "staged"]), (False, ["done", "staged"])):
        rows = render_status(both, "b", "c", vendor_dialect=dialect)["replicas"]
        assert [row["loading_state"]["stage"] for row in rows] == stages


def test_a_reason_is_shown_on_error_only_and_twice() -> None:
    failed = replica("r0", "error", "a")
    failed.loading.reason, failed.loading.message = "missing_object", "gone"
    shown = failed.to_json()
    assert shown["reason"] == shown["loading_state"]["reason"] == "missing_object"
    assert "reason" not in replica("r0", "done", "b").to_json()
    assert ReplicaStatus.from_wire(failed.to_wire()) == failed
