"""Entries of a packaged TOML file, each parsed when it is first asked for.

Owns: `split_entries` (the text of a file, cut at its entries) and `LazyEntries` (a mapping of name to record). One plan
needs one model and one GPU; parsing all of them would take a tenth of the time of `hotloop plan`.

Promises: the same records in the same order as parsing the whole file (a test compares them). Holds for files written
as the packaged ones are: an entry is `[kind."name"]` and its tables `[kind."name".part]`, one after the other.
Does not do: TOML or records (load.py), files of the user, which are parsed and checked whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

_R = TypeVar("_R")


def split_entries(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """Cut a file at its entries.

    Args: kind: `models` or `gpus`, the first part of every entry's header.
    Returns: the text before the first entry, and name -> the text of its tables.
    """
    starts = list(re.finditer(rf'^\[{kind}\."([^"]+)"\]$', text, re.MULTILINE))
    if not starts:
        return text, {}
    ends = [start.start() for start in starts[1:]] + [len(text)]
    entries = {start[1]: text[start.start() : end] for start, end in zip(starts, ends, strict=True)}
    return text[: starts[0].start()], entries


class LazyEntries(Mapping[str, _R]):
    """Records by name; each is parsed once, when it is first asked for."""

    def __init__(self, texts: Mapping[str, str], parse: Callable[[str], Mapping[str, _R]]) -> None:
        """Args: texts: name -> TOML text of one entry. parse: such a text -> name -> record."""
        self._texts = texts
        self._parse = parse
        self._records: dict[str, _R] = {}

    def __getitem__(self, name: str) -> _R:
        if name not in self._records:
            self._records[name] = self._parse(self._texts[name])[name]
        return self._records[name]

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)
