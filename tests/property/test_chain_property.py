"""Chains over random histories: what resolves is a path, and what does not says why."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotloop.errors import SnapshotError
from hotloop.snapshots.chain import Held, Link, resolve_chain

CODES = {"snapshot_incomplete", "parent_unknown", "chain_broken", "chain_too_long", "metadata_conflict"}


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Link]:
    """Up to 40 snapshots; parents may be missing, later, or themselves."""
    size = draw(st.integers(1, 40))
    links: dict[str, Link] = {}
    for number in range(size):
        if draw(st.integers(0, 5)) == 0:
            links[f"s{number}"] = Link(f"s{number}", "anchor", None, number, f"digest{number}")
        else:
            parent = f"s{draw(st.integers(0, size + 1))}"
            links[f"s{number}"] = Link(f"s{number}", "delta", parent, number, f"digest{number}")
    return links


@given(links=histories(), target=st.integers(0, 41), held=st.none() | st.integers(0, 41))
def test_a_chain_is_a_rising_path_from_an_anchor_or_held_content(
    links: dict[str, Link], target: int, held: int | None
) -> None:
    content = Held(f"s{held}", f"digest{held}") if held is not None else None
    try:
        chain = resolve_chain(f"s{target}", links.get, held=content)
    except SnapshotError as error:
        assert error.code in CODES
        return
    if chain.base is None:
        assert chain.steps[0].kind == "anchor"
        expected_parent = None
    else:
        assert content is not None
        assert chain.base == content.identity
        expected_parent = chain.base
    for link in chain.steps:
        if expected_parent is not None:
            assert link.parent == expected_parent
            assert link.kind == "delta"
        expected_parent = link.identity
    assert expected_parent == f"s{target}"
    versions = [link.policy_version for link in chain.steps if link.policy_version is not None]
    assert versions == sorted(set(versions))


@given(links=histories(), target=st.integers(0, 41), held=st.integers(0, 41))
def test_holding_content_never_makes_a_chain_longer_or_unresolvable(
    links: dict[str, Link], target: int, held: int
) -> None:
    try:
        full = resolve_chain(f"s{target}", links.get)
    except SnapshotError:
        return
    short = resolve_chain(f"s{target}", links.get, held=Held(f"s{held}", f"digest{held}"))
    assert len(short.steps) <= len(full.steps)
    assert list(full.steps)[len(full.steps) - len(short.steps) :] == list(short.steps)
