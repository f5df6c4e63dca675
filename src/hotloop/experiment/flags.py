"""Every flag that a slime launch may carry, as data: name, arity, type, choices, and where it was read.

Owns: loading `flags.json` (beside this file; read from the argument parsers of slime 624b824a, Megatron-LM and SGLang),
splitting an argument vector into flags and values, and checking each against the table.

Promises: `check_flags` reports an unknown name, a wrong number of values, a value of the wrong type, a value outside
the choices, and a flag that the chosen slime does not have. slime itself drops an unknown flag without a word, so this
check is the only early warning.

Does not do: rules across flags (argv_rules.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")

Arity = int | Literal["*", "+"]

_LATER_FLAGS: dict[str, dict[str, Any]] = {
    "--use-score-centering": {"arity": 0},
    "--score-centering-top-k": {"arity": 1, "type": "int"},
    "--pg-loss-type": {"arity": 1, "type": "str"},
    "--rollout-data-dir": {"arity": 1, "type": "str"},
    "--rollout-queue-run-id": {"arity": 1, "type": "str"},
    "--rollout-storage-profile": {"arity": 1, "type": "str"},
    "--rollout-storage-declaration": {"arity": 1, "type": "str"},
    "--rollout-queue-segment-mib": {"arity": 1, "type": "int"},
    "--rollout-session-id": {"arity": 1, "type": "str"},
}
"""Shapes of the flags that flags.json only names (`not_at_this_commit`): slime docs, v0.4.0."""

_LATER_CHOICES: dict[str, tuple[str, ...]] = {"--rollout-data-transport": ("straw",)}
"""Choices that v0.4.0 adds to a flag of 624b824a."""


class Flag(NamedTuple):
    """One flag of the parsers that read a launch."""

    name: str
    owner: str
    arity: Arity
    """Number of values, `*` any number, `+` at least one."""
    value_type: str
    """Python callable of the parser: `int`, `float`, `str`, `json.loads`, `moe_freq_type`."""
    choices: tuple[str, ...]
    values_written: int | None
    """For a flag of arity `*` or `+`: how many values an export writes."""
    is_repeatable: bool
    later_only: bool
    """Absent from slime 624b824a; v0.4.0 has it."""
    replaced_by: str
    """New SGLang name of an old one, else empty."""


class FlagUse(NamedTuple):
    """One flag with its values as an argument vector carries them."""

    name: str
    values: tuple[str, ...]
    position: int
    """Index of the flag in the vector."""


class FlagProblem(NamedTuple):
    """One word of an argument vector that a parser would drop or refuse."""

    code: Literal["unknown_flag", "flag_arity", "flag_value", "flag_skipped", "not_in_target", "stray_word"]
    flag: str
    why: str


class FlagTable(NamedTuple):
    """flags.json, ready to ask."""

    slime_commit: str
    flags: Mapping[str, Flag]
    skipped: frozenset[str]
    """SGLang flags that slime sets itself; never written with the `--sglang-` prefix."""
    later_only: frozenset[str]
    serving_only: Mapping[str, Flag]
    """Flags that serving-reference.sh adds, without prefix."""
    not_in_serving: frozenset[str]
    """Prefixed flags that a stock SGLang server does not take."""


@lru_cache(maxsize=1)
def load_flags() -> FlagTable:
    """Read flags.json once."""
    raw = json.loads(Path(__file__).with_name("flags.json").read_text(encoding="utf-8"))
    flags: dict[str, Flag] = {}
    for section in ("slime", "megatron", "sglang"):
        for name, entry in raw[section].items():
            flags.setdefault(name, _parse_flag(name, entry, section))
    for negation in raw["negations"]:
        flags[negation] = _parse_flag(negation, {"arity": 0}, "slime")
    later = frozenset(raw["not_at_this_commit"])
    for name in later:
        flags[name] = _parse_flag(name, _LATER_FLAGS[name], "slime", later_only=True)
    return FlagTable(
        slime_commit=raw["slime_commit"],
        flags=flags,
        skipped=frozenset(raw["sglang_skipped"]),
        later_only=later,
        serving_only={
            name: _parse_flag(name, entry, "sglang") for name, entry in raw["serving_reference_only"].items()
        },
        not_in_serving=frozenset(raw["not_in_serving_reference"]),
    )


def _parse_flag(name: str, entry: Mapping[str, Any], owner: str, *, later_only: bool = False) -> Flag:
    return Flag(
        name=name,
        owner=owner,
        arity=entry["arity"],
        value_type=entry.get("type") or "str",
        choices=tuple(entry.get("choices") or ()),
        values_written=entry.get("values_written"),
        is_repeatable=bool(entry.get("repeatable", False)),
        later_only=later_only,
        replaced_by=entry.get("replaced_by") or "",
    )


def is_flag_word(word: str) -> bool:
    """Tell whether argparse reads a word as a flag wherever it stands.

    A leading dash makes a flag, except in a negative number, in a lone dash, and in a text with a blank (unless it is
    a known flag with `=value`). So a path that starts with a dash is no value for these parsers.

    Source: `ArgumentParser._parse_optional` of the Python standard library.
    """
    if len(word) < 2 or word[0] != "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return False
    if " " in word:
        return word.partition("=")[0] in load_flags().flags
    return True


def split_flags(words: Sequence[str]) -> tuple[list[FlagUse], list[str]]:
    """Cut an argument vector into flags with their values.

    Returns: the uses in order, and the words before the first flag, which belong to none.
    """
    uses: list[FlagUse] = []
    strays: list[str] = []
    name, start, values = "", 0, list[str]()
    for position, word in enumerate(words):
        if is_flag_word(word):
            if name:
                uses.append(FlagUse(name, tuple(values), start))
            name, _, inline = word.partition("=")
            start, values = position, [inline] if "=" in word else []
        elif name:
            values.append(word)
        else:
            strays.append(word)
    if name:
        uses.append(FlagUse(name, tuple(values), start))
    return uses, strays


def check_flags(words: Sequence[str], slime_target: str) -> list[FlagProblem]:
    """Check every flag of an argument vector against the table.

    Args:
        words: the vector after the script's name, without MODEL_ARGS.
        slime_target: `v0.4.0` or `624b824a`; the second has no later flags.
    """
    uses, strays = split_flags(words)
    problems = [
        FlagProblem("stray_word", "", f"{word!r} belongs to no flag, so the parsers drop it") for word in strays
    ]
    for use in uses:
        problems.extend(_check_use(use, slime_target))
    return problems


def _check_use(use: FlagUse, slime_target: str) -> list[FlagProblem]:
    table = load_flags()
    if use.name in table.skipped:
        return [FlagProblem("flag_skipped", use.name, "slime sets this server argument itself and skips the flag")]
    flag = table.flags.get(use.name)
    if flag is None:
        return [FlagProblem("unknown_flag", use.name, "no parser knows this flag, so slime would drop it in silence")]
    if flag.later_only and slime_target == "624b824a":
        return [FlagProblem("not_in_target", use.name, "slime 624b824a does not have this flag and would drop it")]
    if not _arity_holds(flag, len(use.values)):
        return [FlagProblem("flag_arity", use.name, f"takes {_arity_text(flag)}, got {len(use.values)}")]
    choices = flag.choices
    if choices and slime_target != "624b824a":
        choices = choices + _LATER_CHOICES.get(use.name, ())
    problems = []
    for value in use.values:
        why = _check_value(flag, value, choices)
        if why:
            problems.append(FlagProblem("flag_value", use.name, why))
    return problems


def _arity_holds(flag: Flag, count: int) -> bool:
    if flag.arity == "*":
        return flag.values_written is None or count == flag.values_written
    if flag.arity == "+":
        return count >= 1
    return count == flag.arity


def _arity_text(flag: Flag) -> str:
    if flag.arity == "+":
        return "at least one value"
    if flag.arity == "*":
        return f"{flag.values_written} values" if flag.values_written else "any number of values"
    return {0: "no value", 1: "one value"}.get(flag.arity, f"{flag.arity} values")


def _check_value(flag: Flag, value: str, choices: Sequence[str]) -> str:
    """Return why a parser would refuse the value, or an empty text."""
    if choices and value not in choices:
        return f"{value!r} is not one of {', '.join(choices)}"
    if flag.value_type == "int":
        # int() of the parsers takes the same texts as int() here: signs, underscores, surrounding blanks.
        try:
            int(value)
        except ValueError:
            return f"{value!r} is not an integer"
    elif flag.value_type == "float":
        try:
            number = float(value)
        except ValueError:
            return f"{value!r} is not a number"
        if not math.isfinite(number):
            return f"{value!r} is not a finite number"
    elif flag.value_type == "json.loads":
        try:
            json.loads(value)
        except ValueError:
            return f"{value!r} is not JSON"
    return ""
