"""Which snapshots a prune keeps, by hand-made histories."""

from __future__ import annotations

import pytest

from hotloop.errors import SnapshotError
from hotloop.snapshots.chain import Link
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.retention import delete_snapshots, plan_prune
from hotloop.snapshots.retry import RetryPolicy


def make_history() -> list[Link]:
    """a1 d2 d3 | a4 d5 d6 | a7 d8: anchors at versions 1, 4 and 7; and an early side branch x9 of d2."""
    links = []
    parent = ""
    for version in range(1, 9):
        if version in (1, 4, 7):
            links.append(Link(f"a{version}", "anchor", None, version, ""))
            parent = f"a{version}"
        else:
            links.append(Link(f"d{version}", "delta", parent, version, ""))
            parent = f"d{version}"
    return links


def test_the_last_anchors_and_every_delta_after_the_oldest_of_them_stay() -> None:
    plan = plan_prune(make_history(), keep_anchors=2)
    assert plan.delete == ("a1", "d2", "d3")
    assert set(plan.keep) == {"a4", "d5", "d6", "a7", "d8"}


def test_one_anchor_keeps_only_its_own_chain() -> None:
    assert plan_prune(make_history(), keep_anchors=1).delete == ("a1", "d2", "d3", "a4", "d5", "d6")


def test_more_anchors_than_there_are_keep_everything() -> None:
    assert plan_prune(make_history(), keep_anchors=9).delete == ()


def test_the_startup_snapshot_and_its_ancestors_stay() -> None:
    plan = plan_prune(make_history(), keep_anchors=1, startup="d3")
    assert plan.delete == ("a4", "d5", "d6")
    assert plan.keep["d3"] == "named by STARTUP_SNAPSHOT"
    assert plan.keep["d2"] == "ancestor of d3"
    assert plan.keep["a1"] == "ancestor of d2"


def test_protected_snapshots_and_their_ancestors_stay() -> None:
    assert plan_prune(make_history(), keep_anchors=1, protected=["d5"]).delete == ("a1", "d2", "d3", "d6")


def test_a_delta_after_the_kept_anchor_keeps_its_old_branch() -> None:
    links = [*make_history(), Link("x9", "delta", "d2", 9, "")]
    assert plan_prune(links, keep_anchors=1).delete == ("d3", "a4", "d5", "d6")


def test_keep_from_keeps_later_versions_and_their_chains() -> None:
    assert plan_prune(make_history(), keep_anchors=1, keep_from="d6").delete == ("a1", "d2", "d3")


def test_without_any_anchor_nothing_is_deleted() -> None:
    assert plan_prune([Link("d2", "delta", "gone", 2, "")], keep_anchors=1).delete == ()


def test_a_foreign_directory_without_a_version_is_not_deleted() -> None:
    links = [*make_history(), Link("weights", "delta", "a7", None, "")]
    assert "weights" not in plan_prune(links, keep_anchors=1).delete


@pytest.mark.parametrize(
    "settings",
    [{"keep_anchors": 0}, {"keep_anchors": 1, "protected": ["nosuch"]}, {"keep_anchors": 1, "keep_from": "no"}],
)
def test_a_senseless_prune_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SnapshotError) as caught:
        plan_prune(make_history(), **settings)  # type: ignore[arg-type]  # a table of keyword arguments
    assert (caught.value.code, caught.value.exit_code) == ("prune_refused", 2)


def test_a_snapshot_disappears_manifest_first_and_deltas_before_their_parents() -> None:
    bucket = FakeBucket()
    for identity in ("a1", "d2"):
        for name in ("snapshot.json", "model.safetensors"):
            bucket.put(f"{identity}/{name}", b"x")
    bucket.put("a4/snapshot.json", b"x")
    order: list[str] = []

    def note(action: str, key: str) -> None:
        if action == "delete":
            order.append(key)

    bucket.fault = note
    assert delete_snapshots(bucket, ("a1", "d2"), retry=RetryPolicy(budget_s=0)) == 4
    assert order == ["d2/snapshot.json", "d2/model.safetensors", "a1/snapshot.json", "a1/model.safetensors"]
    assert list(bucket.objects) == ["a4/snapshot.json"]
