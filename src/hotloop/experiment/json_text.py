"""JSON that people hand in, read so that no text of theirs can break the reader.

Owns: `parse_json`, and `check_depth` for values that another parser read. Stricter than the standard parser: a key
given twice is refused, since the last would win unseen, and so is nesting that no experiment or config has.
Does not do: what the values must be (load.py), reading files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hotloop.errors import InputError

MAX_DEPTH = 64
"""Tables within tables; far above what any file needs and far below Python's recursion limit."""


class _GivenTwice(Exception):
    pass


def parse_json(text: str, *, where: str, do: str = "Correct the JSON.") -> Any:
    """Parse a JSON text.

    Args: where: the file, as it is shown in errors.

    Raises: InputError `bad_json`, `duplicate_key`.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_make_table)
    except json.JSONDecodeError as error:
        raise InputError("bad_json", f"is not JSON: {error.msg}", where=f"{where}:{error.lineno}", do=do) from None
    except _GivenTwice as error:
        why = f"{str(error)[:80]} is given twice"
        raise InputError("duplicate_key", why, where=where, do="Leave one of them out.") from None
    except RecursionError:
        raise InputError("bad_json", "is nested too deeply", where=where, do=do) from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise InputError("bad_json", f"holds a number that cannot be read ({error})", where=where, do=do) from None
    check_depth(parsed, code="bad_json", where=where, do=do)
    return parsed


def check_depth(value: Any, *, code: str, where: str, do: str) -> None:
    """Refuse tables and lists within each other beyond `MAX_DEPTH`. Raises: InputError with the given code."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _list_inner(outer)]
        if not level:
            return
    raise InputError(code, f"is nested more than {MAX_DEPTH} deep", where=where, do=do)


def _list_inner(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _make_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _GivenTwice(next(key for key in table if keys.count(key) > 1))
    return table
