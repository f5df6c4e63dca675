"""From a wanted identity to the snapshots that build it."""

from __future__ import annotations

import pytest

from hotloop.errors import SnapshotError
from hotloop.snapshots.chain import Chain, Held, Link, choose_kind, resolve_chain


def anchor(name: str, version: int | None = 0) -> Link:
    return Link(name, "anchor", None, version, f"digest-{name}")


def delta(name: str, parent: str | None, version: int | None) -> Link:
    return Link(name, "delta", parent, version, f"digest-{name}")


def resolve(target: str, links: list[Link], held: Held | None = None) -> Chain:
    by_name = {link.identity: link for link in links}
    return resolve_chain(target, by_name.get, held=held)


def refuse(target: str, links: list[Link], held: Held | None = None) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        resolve(target, links, held)
    return caught.value


LINKS = [anchor("a1", 1), delta("d2", "a1", 2), delta("d3", "d2", 3), anchor("a4", 4), delta("d5", "a4", 5)]


@pytest.mark.parametrize(
    ("target", "base", "steps"),
    [
        ("a1", None, ["a1"]),
        ("d2", None, ["a1", "d2"]),
        ("d3", None, ["a1", "d2", "d3"]),
        ("d5", None, ["a4", "d5"]),
    ],
)
def test_a_chain_goes_from_the_nearest_anchor_to_the_target(target: str, base: str | None, steps: list[str]) -> None:
    chain = resolve(target, LINKS)
    assert (chain.base, chain.identities) == (base, steps)


@pytest.mark.parametrize(
    ("held", "target", "base", "steps"),
    [
        ("d2", "d3", "d2", ["d3"]),
        ("a1", "d3", "a1", ["d2", "d3"]),
        ("d3", "d3", "d3", []),
        ("d3", "d5", None, ["a4", "d5"]),
        ("a1", "a1", "a1", []),
    ],
)
def test_a_chain_stops_at_held_content(held: str, target: str, base: str | None, steps: list[str]) -> None:
    chain = resolve(target, LINKS, Held(held, f"digest-{held}"))
    assert (chain.base, chain.identities) == (base, steps)


def test_held_content_with_another_digest_is_not_used() -> None:
    chain = resolve("d3", LINKS, Held("d2", "some-other-digest"))
    assert (chain.base, chain.identities) == (None, ["a1", "d2", "d3"])


def test_a_missing_target_is_incomplete_and_may_come() -> None:
    error = refuse("d9", LINKS)
    assert (error.code, error.retryable) == ("snapshot_incomplete", True)


def test_a_missing_parent_is_parent_unknown() -> None:
    error = refuse("d9", [delta("d9", "d8", 9)])
    assert (error.code, error.details["parent"]) == ("parent_unknown", "d8")


def test_a_missing_link_further_back_is_chain_broken_and_named() -> None:
    error = refuse("d9", [delta("d9", "d8", 9), delta("d8", "d7", 8)])
    assert (error.code, error.details["missing"]) == ("chain_broken", "d7")


def test_parents_in_a_loop_are_chain_broken() -> None:
    error = refuse("x", [delta("x", "y", None), delta("y", "x", None)])
    assert error.code == "chain_broken"


def make_long(num_deltas: int) -> list[Link]:
    return [anchor("d0", 0), *(delta(f"d{i}", f"d{i - 1}", i) for i in range(1, num_deltas + 1))]


def test_a_chain_of_128_deltas_resolves_and_one_of_129_is_too_long() -> None:
    assert len(resolve("d128", make_long(128)).steps) == 129
    assert refuse("d129", make_long(129)).code == "chain_too_long"


def test_129_deltas_resolve_when_one_of_them_is_held() -> None:
    assert resolve("d129", make_long(129), Held("d64", "digest-d64")).base == "d64"


@pytest.mark.parametrize("version", [1, 0])
def test_a_version_that_does_not_rise_is_metadata_conflict(version: int) -> None:
    assert refuse("d2", [anchor("a1", 1), delta("d2", "a1", version)]).code == "metadata_conflict"


def test_unknown_versions_of_foreign_directories_conflict_with_nothing() -> None:
    assert resolve("d2", [anchor("a1", None), delta("d2", "a1", 0)]).identities == ["a1", "d2"]


def test_a_delta_without_a_parent_is_missing_parent() -> None:
    assert refuse("d2", [delta("d2", None, 2)]).code == "missing_parent"


@pytest.mark.parametrize(
    ("chain_length", "full_every", "kind"),
    [
        (None, 25, "anchor"),
        (0, 25, "delta"),
        (23, 25, "delta"),
        (24, 25, "anchor"),
        (0, 1, "anchor"),
        (0, 2, "delta"),
        (1, 2, "anchor"),
        (127, 0, "delta"),
        (128, 0, "anchor"),
        (128, 1000, "anchor"),
    ],
)
def test_every_nth_snapshot_since_the_anchor_is_an_anchor(chain_length: int | None, full_every: int, kind: str) -> None:
    assert choose_kind(chain_length, full_every=full_every) == kind
