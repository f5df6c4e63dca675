"""The history of loads survives restarts, and what cannot be trusted is moved aside or said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotloop.errors import ServiceError
from hotloop.service.ledger import MAX_ENTRIES, Entry, Ledger


def clock() -> str:
    return "2026-09-30T12:00:00.000Z"


def entry(identity: str, kind: str = "anchor", digest: str = "d") -> Entry:
    return Entry(identity, kind, None, 1, digest, {}, clock())


def test_a_ledger_is_read_back_and_shown_newest_first(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", clock=clock)
    for name in ("a", "b"):
        ledger.add(entry(name))
    ledger.finish(ledger.entries[0], "done")
    ledger.finish(ledger.entries[1], "error", "missing_object")
    again = Ledger(tmp_path / "ledger.json", clock=clock)
    assert again.to_json() == ledger.to_json()
    assert [(one["identity"], one["state"]) for one in again.to_json()["entries"]] == [("b", "error"), ("a", "done")]
    newest = again.newest_done()
    assert newest is not None and newest.identity == "a" and newest.finished_at == clock()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "base": null, "entries": [{"x": 1}]}'])
def test_a_ledger_that_cannot_be_read_is_moved_aside_and_needs_an_anchor(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    ledger = Ledger(path, clock=clock)
    assert ledger.entries == [] and ledger.needs_anchor
    (aside,) = tmp_path.glob("ledger.json.unreadable-*")
    assert aside.read_text() == text
    assert Ledger(path, clock=clock).needs_anchor, "also after another restart"


def test_an_anchor_that_loaded_ends_the_need_for_one_and_a_delta_does_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", clock=clock)
    ledger.clear()
    for kind, wanted in (("delta", True), ("anchor", False)):
        ledger.add(entry(kind, kind))
        ledger.finish(ledger.entries[-1], "done")
        assert ledger.needs_anchor is wanted


def test_a_save_that_fails_is_uncertain_until_one_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    ledger = Ledger(folder / "ledger.json", clock=clock)
    ledger.add(entry("a"))
    (folder / "ledger.json.new").mkdir()  # the temporary file cannot be opened
    with pytest.raises(ServiceError) as caught:
        ledger.add(entry("b"))
    assert caught.value.code == "ledger_uncertain"
    with pytest.raises(ServiceError):
        ledger.check()
    (folder / "ledger.json.new").rmdir()
    ledger.check()
    assert [one["identity"] for one in json.loads((folder / "ledger.json").read_text())["entries"]] == ["a"]


def test_a_load_that_no_gateway_finished_is_canceled_and_given_once(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.json", clock=clock).add(entry("a"))
    ledger = Ledger(tmp_path / "ledger.json", clock=clock)
    assert ledger.entries[0].state == "canceled"
    found = ledger.take_interrupted()
    assert found is not None and found.identity == "a" and ledger.take_interrupted() is None


def test_digest_and_hints_are_those_of_the_newest_load(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", clock=clock)
    for digest in ("one", "two", ""):
        ledger.add(entry("a", digest=digest))
    ledger.entries[-1].hints = {"policy_version": 3}
    assert ledger.digest_of("a") == "two" and ledger.digest_of("b") == ""
    assert ledger.hints_for("a") == {"policy_version": 3} and ledger.hints_for("b") == {}


def test_the_oldest_entries_are_forgotten(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", clock=clock)
    ledger.entries = [entry(str(at)) for at in range(MAX_ENTRIES)]
    ledger.add(entry("new"))
    assert (len(ledger.entries), ledger.entries[0].identity, ledger.entries[-1].identity) == (MAX_ENTRIES, "1", "new")
