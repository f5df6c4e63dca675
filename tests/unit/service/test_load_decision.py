"""What a POST leads to, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotloop.errors import ServiceError
from hotloop.service.hot_load_api import LoadRequest
from hotloop.service.load_decision import Decision, DeploymentState, Known, decide_load

SERVING_ONE = DeploymentState(served_identity="step000001", served_version=1, served_everywhere=True)
LOADING_TWO = replace(SERVING_ONE, active_identity="step000002")
TWO = LoadRequest("step000002")
DELTA_TWO = Known("delta", "step000001", True, 1, 2, "d2")


@pytest.mark.parametrize(
    ("state", "request_", "known", "decision"),
    [
        (DeploymentState(), TWO, DELTA_TWO, Decision("start")),
        (SERVING_ONE, TWO, DELTA_TWO, Decision("start")),
        (SERVING_ONE, LoadRequest("step000001"), Known(), Decision("nothing", already_current=True)),
        (LOADING_TWO, TWO, DELTA_TWO, Decision("join", joined=True)),
        (LOADING_TWO, LoadRequest("step000003"), Known(), Decision("queue")),
        (
            replace(LOADING_TWO, waiting_identity="step000003"),
            LoadRequest("step000004"),
            Known(),
            Decision("queue", superseded="step000003"),
        ),
        (
            replace(LOADING_TWO, waiting_identity="step000003"),
            LoadRequest("step000003"),
            Known(),
            Decision("join", joined=True),
        ),
        # While another identity loads, the served one is a wish like any other: it must take the waiting slot.
        (LOADING_TWO, LoadRequest("step000001"), Known(), Decision("queue")),
        # A replica lags behind: asking again restarts it.
        (replace(SERVING_ONE, served_everywhere=False), LoadRequest("step000001"), Known(), Decision("start")),
        # The parent was pruned from the bucket, but it is what is served.
        (SERVING_ONE, TWO, replace(DELTA_TWO, parent_exists=False), Decision("start")),
        (
            SERVING_ONE,
            LoadRequest("step000000", allow_rewind=True),
            Known("anchor", policy_version=0, digest="d0"),
            Decision("start"),
        ),
    ],
)
def test_accepted(state: DeploymentState, request_: LoadRequest, known: Known, decision: Decision) -> None:
    assert decide_load(state, request_, known) == decision


@pytest.mark.parametrize(
    ("state", "request_", "known", "code"),
    [
        (SERVING_ONE, LoadRequest("step000000"), Known("anchor", policy_version=0, digest="d0"), "rewind_rejected"),
        (replace(SERVING_ONE, known_digest="other"), TWO, DELTA_TWO, "identity_conflict"),
        (replace(SERVING_ONE, needs_anchor=True), TWO, DELTA_TWO, "anchor_required"),
        (SERVING_ONE, TWO, Known("delta", "gone", False, None, 2, "d2"), "parent_unknown"),
        (SERVING_ONE, TWO, replace(DELTA_TWO, policy_version=1), "metadata_conflict"),
    ],
)
def test_refused(state: DeploymentState, request_: LoadRequest, known: Known, code: str) -> None:
    with pytest.raises(ServiceError) as error:
        decide_load(state, request_, known)
    assert error.value.code == code


def test_an_equal_policy_version_is_no_rewind() -> None:
    known = Known("anchor", policy_version=1, digest="d")
    assert decide_load(SERVING_ONE, LoadRequest("again"), known) == Decision("start")
