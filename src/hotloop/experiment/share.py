"""Share links: an experiment in the fragment of an address, without anything private.

Owns: `encode_experiment`, `encode_comparison`, `read_link`, the list of private values, and the cleaning that links and
files loaded by the page go through (`clean_choices`, L10).

    link = base64url( UTF-8 JSON {"schema": 1, "choices": {what differs from its default, private values left out}} )

Promises: a private value never enters a link and a link never changes one: paths, addresses and dotted hooks stay the
reader's own. A link that is too long or does not parse raises and changes nothing. Both key spellings are read.

Does not do: the page's address bar (web/), reading files (load.py).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hotloop.errors import InputError, Problem
from hotloop.experiment.choices import MAX_TEXT, SCHEMA, Experiment
from hotloop.experiment.load import known_paths, validate

MAX_LINK_CHARS = 8192
"""Length of the whole link, fragment name included; longer ones are cut by chat programs and mail."""

EXPERIMENT_KEY = "experiment"
COMPARE_KEY = "compare"

PRIVATE_CHOICES = frozenset(
    {
        "hf_path", "train_path", "data_path", "save_path", "megatron_path", "external_addrs", "generate_hook",
        "reward_hook", "rdma_device", "straw_dir", "straw_run_id", "straw_declaration", "weight_dir",
        "local_weight_dir", "draft_path", "eval_data", "resume_from",
    }
)  # fmt: skip
"""Flat choices that a link never carries."""

PRIVATE_SECTION_VALUES = frozenset(
    {
        "data.held_out_path", "export.publish", "export.slime_args", "laptop.policy", "laptop.publish",
        "laptop.service_url", "laptop.hooks", "reward.function", "reward.url",
    }
)  # fmt: skip
"""Paths, addresses and dotted hooks inside the sections, and slime_args, which may hold any of them. `laptop.policy` is
shared when it is a built-in name."""

BUILTIN_POLICIES = frozenset({"", "dense", "moe"})

_UNSAFE_KEYS = frozenset({"__proto__", "prototype", "constructor"})


@dataclass(frozen=True, slots=True)
class SharedLink:
    """What a link holds."""

    experiment: Experiment
    """B, the experiment that is edited."""
    reference: Experiment | None = None
    """A, only in a comparison."""


def is_private_path(path: str) -> bool:
    """Whether a dotted path names a value that never leaves in a link."""
    return path in PRIVATE_CHOICES or path in PRIVATE_SECTION_VALUES


def _is_private(path: str, value: Any) -> bool:
    return is_private_path(path) and not (path == "laptop.policy" and value in BUILTIN_POLICIES)


def list_shared_values(experiment: Experiment) -> dict[str, Any]:
    """Return the nested choices of a link: what differs from its default and is not private."""
    return _difference(experiment.model_dump(mode="json"), _defaults_for(experiment), "")


def _defaults_for(experiment: Experiment) -> dict[str, Any]:
    """Return defaults of the same variants of the tagged sections, so that only real differences show."""
    plain = Experiment()
    defaults = plain.model_dump(mode="json")
    for name in ("algorithm", "reward"):
        chosen, default = getattr(experiment, name), getattr(plain, name)
        if type(chosen) is not type(default):
            defaults[name] = {
                key: info.default for key, info in type(chosen).model_fields.items() if not info.is_required()
            }
            del defaults[name]["kind"]
    return defaults


def _difference(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key in defaults and value == defaults[key]:
            continue
        if isinstance(value, dict) and path != "laptop.hooks":
            inner = _difference(value, defaults.get(key, {}), f"{path}.")
            if inner:
                shared[key] = inner
        elif not _is_private(path, value):
            shared[key] = value
    return shared


def encode_experiment(experiment: Experiment) -> str:
    """Return the fragment `experiment=...` of a link.

    Raises: InputError `link_too_long` when it would not fit.
    """
    return _encode(EXPERIMENT_KEY, {"schema": SCHEMA, "choices": list_shared_values(experiment)})


def encode_comparison(reference: Experiment, experiment: Experiment) -> str:
    """Return the fragment `compare=...` of an A/B link, both sides filtered alike (L36)."""
    body = {"schema": SCHEMA, "a": list_shared_values(reference), "b": list_shared_values(experiment)}
    return _encode(COMPARE_KEY, body)


def _encode(key: str, body: Mapping[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    packed = base64.urlsafe_b64encode(text.encode("utf-8")).decode("ascii").rstrip("=")
    fragment = f"{key}={packed}"
    _check_length(fragment)
    return fragment


def _check_length(link: str) -> None:
    if len(link) > MAX_LINK_CHARS:
        raise InputError(
            "link_too_long",
            f"has {len(link)} characters, and a link is cut above {MAX_LINK_CHARS}",
            where="the link",
            do="Send experiment.json in its place.",
        )


def read_link(link: str, reader: Experiment | None = None) -> SharedLink:
    """Read a whole address, a fragment, or the bare packed text.

    Args:
        link: what the user pasted.
        reader: whose private values are kept; both sides of a comparison get them.

    Raises: InputError `link_too_long`, `bad_link`, `schema_unsupported`, or what is wrong with a value.
    """
    text = link.strip()
    _check_length(text)
    fragment = text.rpartition("#")[2]
    key, equals, packed = fragment.partition("=")
    if not equals:
        key, packed = EXPERIMENT_KEY, fragment
    if key not in (EXPERIMENT_KEY, COMPARE_KEY):
        raise _bad_link(f"its fragment is {key!r}, and a share link has {EXPERIMENT_KEY!r} or {COMPARE_KEY!r}")
    body = _unpack(packed)
    if key == EXPERIMENT_KEY:
        return SharedLink(_restore(body.get("choices"), reader))
    return SharedLink(_restore(body.get("b"), reader), _restore(body.get("a"), reader))


def _unpack(packed: str) -> dict[str, Any]:
    if not re.fullmatch(r"[A-Za-z0-9_-]+={0,2}", packed):
        raise _bad_link("it is not base64url")
    bare = packed.rstrip("=")
    try:
        raw = base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True)
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (binascii.Error, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _bad_link(f"it does not hold JSON ({error})") from error
    if not isinstance(body, dict):
        raise _bad_link("it does not hold an object")
    if body.get("schema") != SCHEMA:
        why = f"this version reads schema {SCHEMA} only, and the link has {body.get('schema')!r}"
        raise InputError("schema_unsupported", why, where="the link", do="Ask for a new link.")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _bad_link(why: str) -> InputError:
    return InputError("bad_link", why, where="the link", do="Copy it whole, from the first character to the last.")


def _restore(choices: Any, reader: Experiment | None) -> Experiment:
    """Put the reader's private values under the link's values; a private value in a link is dropped."""
    if not isinstance(choices, dict):
        raise _bad_link("it has no choices")
    values = _drop_private(clean_choices(_name_kinds(choices)), "")
    _merge(values, _private_values(reader or Experiment()))
    _fill_reward(values, reader)
    problems: list[Problem] = []
    experiment = validate(values, {}, problems)
    if experiment is None:
        raise InputError.of(problems)
    return experiment


def _name_kinds(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Say which variant a tagged section is, where the link left the default out."""
    named = dict(choices)
    for section in ("algorithm", "reward"):
        held = named.get(section)
        if isinstance(held, Mapping) and "kind" not in held:
            named[section] = {**held, "kind": getattr(Experiment(), section).kind}
    return named


def _drop_private(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if not _is_private(path, value):
            kept[key] = _drop_private(value, f"{path}.") if isinstance(value, dict) else value
    return kept


def _private_values(experiment: Experiment) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(experiment, name) for name in sorted(PRIVATE_CHOICES)}
    for path in sorted(PRIVATE_SECTION_VALUES):
        section, _, name = path.partition(".")
        held = getattr(experiment, section)
        if section != "reward":
            values.setdefault(section, {})[name] = getattr(held, name)
    return values


def _fill_reward(values: dict[str, Any], reader: Experiment | None) -> None:
    """A reward whose private value stayed behind takes the reader's own, or an empty one that the checks name."""
    reward = values.get("reward")
    if not isinstance(reward, dict):
        return
    for kind, name in (("python", "function"), ("remote", "url")):
        if reward.get("kind") == kind:
            own = reader.reward if reader is not None and reader.reward.kind == kind else None
            reward[name] = getattr(own, name, "")


def _merge(values: dict[str, Any], private: Mapping[str, Any]) -> None:
    for key, value in private.items():
        if isinstance(value, dict) and key != "hooks":
            _merge(values.setdefault(key, {}), value)
        else:
            values.setdefault(key, value)


def clean_choices(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices that are safe to validate: L10.

    Unknown keys, wrong types, control characters and `__proto__`-like keys are dropped, text is cut at 2048 characters,
    keys are read in both spellings. What is left may still be out of range, which the schema refuses with a message.
    """
    cleaned = _clean_table(raw, "", frozenset(known_paths()))
    try:
        Experiment.model_validate(cleaned)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            if fault["type"] in _WRONG_TYPE:
                _drop(cleaned, fault["loc"])
    return cleaned


_WRONG_TYPE = frozenset(
    {
        "bool_type", "bool_parsing", "dict_type", "extra_forbidden", "float_parsing", "float_type", "int_from_float",
        "int_parsing", "int_type", "model_attributes_type", "model_type", "string_type", "tuple_type",
    }
)  # fmt: skip
"""pydantic's names for a value that is not of the field's type, and for a key of another variant of a section."""


def _drop(values: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Remove the value at a location; pydantic puts the tag of a tagged section into it, which is no key of ours."""
    table: Any = values
    for depth, part in enumerate(loc):
        if not isinstance(table, dict) or part not in table:
            continue
        if depth == len(loc) - 1 or not isinstance(table[part], dict):
            del table[part]
            return
        table = table[part]


def _clean_table(raw: Mapping[str, Any], prefix: str, known: frozenset[str]) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    for key, value in raw.items():
        if not isinstance(key, str) or key in _UNSAFE_KEYS:
            continue
        name = key if prefix == "laptop.hooks." else _snake(key)
        path = f"{prefix}{name}"
        is_table = any(entry.startswith(f"{path}.") for entry in known) or path == "laptop.hooks"
        if is_table:
            if isinstance(value, Mapping):
                cleaned.setdefault(name, _clean_table(value, f"{path}.", known))
        elif path in known or prefix == "laptop.hooks.":
            safe = _clean_value(value)
            if safe is not _DROPPED:
                cleaned.setdefault(name, safe)
    return cleaned


_DROPPED = object()


def _clean_value(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [clean_text(item) for item in value]
    return _DROPPED


def clean_text(text: str) -> str:
    """Drop control and unassigned-surrogate characters and cut the text at its longest length."""
    kept = "".join(char for char in text if unicodedata.category(char) not in ("Cc", "Cs"))
    return kept[:MAX_TEXT]


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
