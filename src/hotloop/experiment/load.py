"""Reading an experiment: defaults, then one file, then `--set`, with an origin for every value.

Owns: `load_experiment` (TOML, JSON, experiment.json of schema 1, bare choices; camelCase or snake_case), `Loaded`,
`parse_setting`, `validate`, `known_paths`, `flatten`.

Promises: every problem of all layers is reported together, each with the file's line or the `--set` it came from; an
unknown key names the nearest known one; a schema other than 1 is refused. Nothing is read from the environment.
Does not do: rules across fields (checks.py), what a recipe fills in (catalog).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hotloop.errors import InputError, Problem
from hotloop.experiment.choices import NUL_FAULT, SCHEMA, Experiment
from hotloop.experiment.json_text import MAX_DEPTH, check_depth, parse_json
from hotloop.experiment.positions import locate_keys

_FREE_TABLES = frozenset({"laptop.hooks"})
"""Tables whose keys are names of their own and are not spelled by us."""


class Loaded(NamedTuple):
    """A valid experiment and where each of its values came from."""

    experiment: Experiment
    origins: Mapping[str, str]
    """Dotted path -> `file:line`, `--set`, the name of the base; absent for a value that is the schema's default."""
    source: str
    """The file, or the name of the base when there is none."""

    def origin(self, path: str) -> str:
        """Say where a value came from; a section's keys inherit nothing, so absence means the schema's default."""
        return self.origins.get(path, "default")


def load_experiment(
    path: Path | None,
    settings: Sequence[str] = (),
    *,
    base: Experiment | None = None,
    base_name: str = "preset",
    aliases: Mapping[str, str] | None = None,
) -> Loaded:
    """Read a file over the schema's defaults (or `base` when there is no file), then apply `--set` settings.

    Args:
        settings: `dotted.key=value` words; a value is read as TOML and, failing that, as bare text.
        base: used only without a file.
        aliases: short spellings of settings, such as `publish` -> `laptop.publish`.

    Raises:
        InputError: everything wrong with the file and the settings, together.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    source = base_name if base is not None else "defaults"
    if path is not None:
        source = str(path)
        values, origins = _read_file(path, problems)
    elif base is not None:
        values = base.model_dump(mode="json")
        plain = dict(flatten(Experiment().model_dump(mode="json")))
        origins = {dotted: base_name for dotted, value in flatten(values) if plain.get(dotted) != value}
    for setting in settings:
        parsed = parse_setting(setting, problems)
        if parsed is not None:
            key = (aliases or {}).get(parsed[0], parsed[0])
            _assign(values, key, parsed[1], origins, f"--set {setting}")
    experiment = validate(values, origins, problems)
    if problems or experiment is None:
        raise InputError.of(problems)
    return Loaded(experiment, {key: _short(origin) for key, origin in origins.items()}, source)


def _short(origin: str) -> str:
    return "--set" if origin.startswith("--set ") else origin


def parse_setting(setting: str, problems: list[Problem]) -> tuple[str, Any] | None:
    """Split `a.b=c` into a snake_case path and a value; a malformed word becomes a problem."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key):
        problems.append(
            Problem("bad_setting", "a setting is written key=value", f"--set {setting}", "For example rounds=50.")
        )
        return None
    value = _parse_value(text.strip())
    if key.count(".") >= MAX_DEPTH:
        problems.append(Problem("bad_setting", f"names more than {MAX_DEPTH} tables", f"--set {setting[:80]}"))
        return None
    return _snake_path(key), value


def _parse_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        check_depth(value, code="bad_setting", where="--set", do="Give a plain value.")
        return value
    except RecursionError:
        raise InputError("bad_setting", "is nested too deeply", where="--set", do="Give a plain value.") from None
    except ValueError:
        return {"True": True, "False": False, "none": None, "None": None}.get(text, text)


def _assign(values: dict[str, Any], path: str, value: Any, origins: dict[str, str], origin: str) -> None:
    """Set a dotted path; a prefix that holds a plain value is replaced, and the schema then names the fault."""
    *parents, last = path.split(".")
    table = values
    for parent in parents:
        inner = table.get(parent)
        if not isinstance(inner, dict):
            inner = table[parent] = {}
        table = inner
    table[last] = value
    for dotted in [key for key in origins if key == path or key.startswith(path + ".")]:
        del origins[dotted]
    origins[path] = origin


def _read_file(path: Path, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse a file into snake_case choices and origins. Unreadable files raise at once: nothing else can be checked."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of one system begin a file with a byte order mark
    except FileNotFoundError:
        raise InputError("file_not_found", "there is no such file", where=str(path), do="Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("file_unreadable", f"cannot be read as text ({error})", where=str(path)) from None
    kind: Literal["toml", "json"] = "json" if path.suffix == ".json" or text.lstrip()[:1] == "{" else "toml"
    raw = _parse_text(path, text, kind)
    lines = locate_keys(text, kind)
    prefix = ""
    if "schema" in raw or "choices" in raw:
        if raw.get("schema") != SCHEMA:
            where = f"{path}:{lines.get('schema', 1)}: schema = {raw.get('schema')!r}"
            why = f"this version reads schema {SCHEMA} only"
            raise InputError("schema_unsupported", why, where=where, do="Export the experiment again.")
        raw, prefix = raw.get("choices", {}), "choices."
        if not isinstance(raw, dict):
            raise InputError("wrong_type", "must be a table of choices", where=f"{path}: choices")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    _take(raw, "", prefix, values, origins, lambda spelled: f"{path}:{lines.get(spelled, 1)}", problems)
    return values, origins


def _parse_text(path: Path, text: str, kind: Literal["toml", "json"]) -> dict[str, Any]:
    parsed = parse_json(text, where=str(path)) if kind == "json" else _parse_toml(path, text)
    if not isinstance(parsed, dict):
        raise InputError("wrong_type", "an experiment file holds one table of choices", where=str(path))
    return parsed


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    do = "Correct the TOML."
    try:
        parsed = tomllib.loads(text)
    except RecursionError:
        raise InputError("bad_toml", "is nested too deeply", where=str(path), do=do) from None
    except ValueError as error:  # TOMLDecodeError is one; so is an integer of more digits than Python reads
        line = re.search(r"line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise InputError("bad_toml", str(error), where=where, do=do) from None
    check_depth(parsed, code="bad_toml", where=str(path), do=do)
    return parsed


def _take(
    raw: Mapping[str, Any],
    path: str,
    spelled: str,
    values: dict[str, Any],
    origins: dict[str, str],
    place: Callable[[str], str],
    problems: list[Problem],
) -> None:
    """Copy a table with its keys in snake_case, noting where each value stands."""
    for key, value in raw.items():
        name = key if path in _FREE_TABLES else _snake(str(key))
        dotted = f"{path}.{name}" if path else name
        where = place(f"{spelled}{key}")
        if name in values:
            problems.append(Problem("duplicate_key", f"{dotted} is given twice, as {key} and as {name}", where))
            continue
        origins[dotted] = where
        if isinstance(value, dict):
            values[name] = {}
            _take(value, dotted, f"{spelled}{key}.", values[name], origins, place, problems)
        else:
            values[name] = value


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")


def _snake_path(path: str) -> str:
    parts = path.split(".")
    if ".".join(_snake(part) for part in parts[:2]) in _FREE_TABLES:
        return ".".join([*(_snake(part) for part in parts[:2]), *parts[2:]])
    return ".".join(_snake(part) for part in parts)


def validate(values: Mapping[str, Any], origins: Mapping[str, str], problems: list[Problem]) -> Experiment | None:
    """Check values against the schema; faults are added to `problems` and None is returned."""
    try:
        return Experiment.model_validate(_empty_to_none(values))
    except ValidationError as error:
        found = [_describe(fault, origins) for fault in error.errors(include_url=False)]
        problems.extend(sorted(found, key=_line_of))
    return None


def _line_of(problem: Problem) -> int:
    line = re.search(r":(\d+)(?::|$)", problem.where)
    return int(line[1]) if line else 0


def _empty_to_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """An empty text means "not chosen" for a choice that is a number or a name, since TOML has no null."""
    cleaned = dict(values)
    for name, info in Experiment.model_fields.items():
        if cleaned.get(name) == "" and type(None) in get_args(info.annotation) and str not in get_args(info.annotation):
            cleaned[name] = None
    return cleaned


def _describe(fault: ErrorDetails, origins: Mapping[str, str]) -> Problem:
    path = _fault_path(fault["loc"])
    if fault["type"] == "union_tag_invalid":
        path += ".kind"
    place = next((origins[prefix] for prefix in _prefixes(path) if prefix in origins), "")
    place = place.partition("=")[0] if place.startswith("--set ") else place
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == NUL_FAULT:
        path = context["path"]
        place = next((origins[prefix] for prefix in _prefixes(path) if prefix in origins), "").partition("=")[0]
        return Problem("wrong_value", "must not hold a NUL character", f"{place}: {path}" if place else path)
    if kind == "extra_forbidden":
        return _unknown_key(path, place)
    value = fault["input"]
    if kind == "union_tag_invalid":
        value = context.get("tag")
    where = f"{place}: {path} = {value!r}" if place else f"{path} = {value!r}"
    rule = fault["msg"].replace("Input should", "must")
    if kind in ("literal_error", "union_tag_invalid"):
        return Problem(
            "wrong_value", f"must be one of {context.get('expected') or context.get('expected_tags')}", where
        )
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"):
        return Problem("out_of_range", rule, where)
    if kind in ("union_tag_not_found", "missing"):
        missing = f"{path}.kind" if kind == "union_tag_not_found" else path
        return Problem("missing_key", f"{missing} must be given", place)
    return Problem("wrong_type", rule, where)


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


def _fault_path(loc: tuple[int | str, ...]) -> str:
    """Join a location; the tag that pydantic inserts after a tagged union's field is not a key of the file."""
    parts = [str(part) for part in loc]
    if len(parts) > 1 and parts[0] in _tagged_sections() and parts[1] in _tagged_sections()[parts[0]]:
        del parts[1]
    return ".".join(parts)


def _unknown_key(path: str, place: str) -> Problem:
    if path in known_paths():
        section, _, name = path.partition(".")
        kinds = [kind for kind, model in _tagged_sections()[section].items() if name in model.model_fields]
        return Problem("unknown_key", f"{path} belongs to {section}.kind = {' or '.join(kinds)} only", place)
    section, _, name = path.rpartition(".")
    here = sorted({key.rpartition(".")[2] for key in known_paths() if key.rpartition(".")[0] == section})
    near = difflib.get_close_matches(path, known_paths(), n=1, cutoff=0.75) or [
        key for key in known_paths() if key.rpartition(".")[2] == name
    ]
    do = f"Did you mean {near[0]}?" if near else ""
    if here and section:
        do += f" Settings here: {', '.join(here)}."
    return Problem("unknown_key", f"{path} is not a setting", place, do.strip())


@lru_cache(maxsize=1)
def known_paths() -> tuple[str, ...]:
    """Every dotted path of the schema, keys of all variants of a tagged section included."""
    paths: dict[str, None] = {}
    for name, info in Experiment.model_fields.items():
        variants = _models(info.annotation)
        paths.update(dict.fromkeys(f"{name}.{key}" for variant in variants for key in variant.model_fields))
        if not variants:
            paths[name] = None
    return tuple(paths)


@lru_cache(maxsize=1)
def _tagged_sections() -> dict[str, dict[str, type[BaseModel]]]:
    """Sections with variants: name -> kind -> model."""
    tagged: dict[str, dict[str, type[BaseModel]]] = {}
    for name, info in Experiment.model_fields.items():
        kinds = {str(m.model_fields["kind"].default): m for m in _models(info.annotation) if "kind" in m.model_fields}
        if kinds:
            tagged[name] = kinds
    return tagged


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType):
        return [model for part in get_args(annotation) for model in _models(part)]
    return []


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, dotted + ".")
        else:
            yield dotted, value
