"""Where in a TOML or JSON text a key stands, so that a message about a value can name its line.

Owns: `locate_keys`, a map from dotted path (as spelled in the file) to line number. The standard parsers give values
without positions; this reads the same text a second time for keys only.

Promises: never raises on a text that its parser accepts; a key it cannot place is simply absent from the map.
Does not do: values, validation (load.py).
"""

from __future__ import annotations

import re
from typing import Literal

_TOML_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_TOML_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_TOML_INLINE_KEY = re.compile(r"[{,]\s*([A-Za-z0-9_-]+)\s*=")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,\n]')


def locate_keys(text: str, kind: Literal["toml", "json"]) -> dict[str, int]:
    """Map every key's dotted path to its line number, counted from 1."""
    return _locate_toml(text) if kind == "toml" else _locate_json(text)


def _dotted(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _locate_toml(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TOML_HEADER.match(line):
            table = _dotted(header[1])
            found.setdefault(table, number)
        elif key := _TOML_KEY.match(line):
            path = f"{table}.{_dotted(key[1])}" if table else _dotted(key[1])
            found.setdefault(path, number)
            for inline in _TOML_INLINE_KEY.finditer(line, key.end()):
                found.setdefault(f"{path}.{inline[1]}", number)
    return found


def _locate_json(text: str) -> dict[str, int]:
    """Walk the tokens with a stack of open objects; a string followed by a colon is a key."""
    found: dict[str, int] = {}
    stack: list[str] = []
    line = 1
    pending = ""
    current = ""
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token.startswith('"'):
            pending = token[1:-1]
        elif token == ":":
            current = ".".join([*(part for part in stack if part), pending])
            found.setdefault(current, line)
            key = pending
        elif token in "{[":
            stack.append(key if current else "")
            key = ""
        elif token in "}]" and stack:
            stack.pop()
            key = ""
    return found
