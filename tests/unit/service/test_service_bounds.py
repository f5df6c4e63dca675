"""What must hold however long a failure lasts and whatever a client sends: bounds, and a ledger that tells true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.errors import ServiceError
from hotloop.service.ledger import Entry, Ledger
from hotloop.service.membership import EJECT_LONGEST_S, Member
from hotloop.service.openapi import OPERATIONS, build_document
from hotloop.service.rollout_request import MAX_IGNORED_CHARS, render_ignored


@given(st.lists(st.text(), max_size=40))
def test_ignored_names_make_one_printable_bounded_header_value(names: list[str]) -> None:
    value = render_ignored(names)
    assert all("!" <= char <= "~" for char in value)
    assert len(value) <= MAX_IGNORED_CHARS + len(",...")


def test_ignored_names_that_are_plain_stay_as_they_are() -> None:
    assert render_ignored(["presence", "nvext.unknown"]) == "presence,nvext.unknown"
    assert render_ignored(["a\r\nb: c", "d,e"]) == "a??b:?c,d?e"
    assert render_ignored(["x" * 1500, "y" * 1500]) == "x" * 1500 + ",..."
    assert render_ignored(["z" * 3000]) == "..."


def test_an_ejection_reaches_its_bound_and_stays_there_for_years_of_failures() -> None:
    member = Member("r0")
    lengths = []
    for number in range(15_000):
        member.note_failure(float(number))
        if member.failures == 0:
            lengths.append(member.ejected_until - number)
    assert lengths[:6] == [1, 2, 4, 8, 16, 30]
    assert set(lengths[6:]) == {EJECT_LONGEST_S}


def entry(identity: str, state: str = "loading") -> Entry:
    return Entry(identity, "anchor", None, 1, "digest", {}, "then", state=state)  # type: ignore[arg-type]  # one of five


def open_ledger(path: Path) -> Ledger:
    return Ledger(path, clock=lambda: "now")


def test_the_newest_load_that_was_interrupted_is_given_once(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.json")
    for each in (entry("one", "done"), entry("two"), entry("three"), entry("four", "error")):
        ledger.add(each)
    again = open_ledger(tmp_path / "ledger.json")
    assert [each.state for each in again.entries] == ["done", "canceled", "canceled", "error"]
    found = again.take_interrupted()
    assert found is not None and found.identity == "three"
    assert again.take_interrupted() is None


def test_a_load_that_cannot_be_written_down_is_not_noted(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.json")
    ledger.add(entry("one"))
    (tmp_path / "ledger.json.new").mkdir()
    with pytest.raises(ServiceError) as error:
        ledger.add(entry("two"))
    assert error.value.code == "ledger_uncertain"
    assert [each.identity for each in ledger.entries] == ["one"]
    with pytest.raises(ServiceError):
        ledger.check()
    (tmp_path / "ledger.json.new").rmdir()
    ledger.check()


@pytest.mark.parametrize(
    "damage", [{"hints": []}, {"hints": {"nonsense": 1}}, {"identity": 7}, {"identity": None}, {"unknown": 1}]
)
def test_an_entry_of_the_wrong_shape_makes_the_ledger_unreadable(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "ledger.json"
    open_ledger(path).add(entry("one", "done"))
    body = json.loads(path.read_text())
    body["entries"][0] |= damage
    path.write_text(json.dumps(body))
    ledger = open_ledger(path)
    assert ledger.entries == [] and ledger.needs_anchor
    assert len(list(tmp_path.glob("ledger.json.unreadable-*"))) == 1


def test_a_route_without_a_description_fails_the_document() -> None:
    assert set(build_document(OPERATIONS, "policy", has_keys=False)["paths"]) == {path for _, path in OPERATIONS}
    with pytest.raises(AssertionError):
        build_document([*OPERATIONS, ("GET", "/forgotten")], "policy", has_keys=False)
    with pytest.raises(AssertionError):
        build_document(list(OPERATIONS)[1:], "policy", has_keys=False)
