"""The packaged catalogue is parsed entry by entry, and says the same as the whole files."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotloop.experiment.catalog.load as catalog_load
from hotloop.experiment.catalog.load import load_catalog, parse_catalog
from hotloop.experiment.catalog.packaged import LazyEntries, split_entries

FOLDER = Path(catalog_load.__file__).parent
WHOLE = parse_catalog({path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.toml")})


def test_entries_read_one_by_one_are_those_of_the_whole_files() -> None:
    catalog = load_catalog()
    assert list(catalog.models) == list(WHOLE.models) and list(catalog.gpus) == list(WHOLE.gpus)
    assert {**catalog.models} == {**WHOLE.models} and {**catalog.gpus} == {**WHOLE.gpus}
    assert len(catalog.models) == len(WHOLE.models)
    assert catalog.images == WHOLE.images and catalog.data == WHOLE.data
    assert (catalog.slime_commit, catalog.slime_docs_version) == (WHOLE.slime_commit, WHOLE.slime_docs_version)


def test_an_entry_is_its_header_and_all_its_tables() -> None:
    head, entries = split_entries('schema = 1\n[gpus."a"]\nx = 1\n[gpus."a".b]\ny = 2\n\n[gpus."c-1"]\nx = 3\n', "gpus")
    assert head == "schema = 1\n"
    assert entries == {"a": '[gpus."a"]\nx = 1\n[gpus."a".b]\ny = 2\n\n', "c-1": '[gpus."c-1"]\nx = 3\n'}


def test_a_file_without_entries_is_all_head() -> None:
    assert split_entries("schema = 1\n", "models") == ("schema = 1\n", {})


def test_only_the_entry_that_is_asked_for_is_parsed_and_only_once() -> None:
    parsed: list[str] = []

    def parse(text: str) -> dict[str, int]:
        parsed.append(text)
        return {text: len(text)}

    entries = LazyEntries({"one": "one", "three": "three"}, parse)
    assert "one" in entries and "two" not in entries and list(entries) == ["one", "three"] and parsed == []
    assert entries["three"] == 5 and entries["three"] == 5 and parsed == ["three"]
    with pytest.raises(KeyError):
        entries["two"]
