"""Bash text that means exactly what was given: quoting, arrays, and nothing else.

Owns: `quote`, which turns any text into one shell word, and the few forms in which a generated script may hold words.

Promises: user text appears in a generated script only through `quote` or `render_comment`. Flags and numbers stay bare,
every other word is single-quoted, so bash expands nothing inside it.

Does not do: choose what is written (slime.py, bundle.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_BARE = re.compile(r"--[A-Za-z][A-Za-z0-9-]*|-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quote(text: str) -> str:
    """Return one bash word whose value is `text`.

    Raises: ValueError for a NUL, which no argument vector can hold.
    """
    if "\0" in text:
        raise ValueError("a shell word cannot hold a NUL character")
    if _BARE.fullmatch(text):
        return text
    return "'" + text.replace("'", "'\\''") + "'"


def join_words(words: Iterable[str]) -> str:
    """Return words as one command line."""
    return " ".join(quote(word) for word in words)


def render_array(name: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a bash array, one row of words a line: usually a flag and its values."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a bash name")
    if not rows:
        return f"{name}=()\n"
    lines = "".join(f"  {join_words(row)}\n" for row in rows)
    return f"{name}=(\n{lines})\n"


def render_comment(text: str) -> str:
    """Return text as comment lines; a line break in it cannot end the comment."""
    lines = re.split(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", text)
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def choose_heredoc_mark(text: str) -> str:
    """Return a here-document delimiter that is no line of `text`; quoted at its use, so nothing expands inside."""
    lines = set(text.splitlines())
    mark, count = "HOTLOOP_END", 0
    while mark in lines:
        count += 1
        mark = f"HOTLOOP_END_{count}"
    return mark
