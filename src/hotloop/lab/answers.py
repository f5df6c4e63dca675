"""What the page asks about experiments: JSON in, JSON out. Pure but for a cache and the reader of resume folders.

Owns: the answers of `/api/schema`, `plan`, `effects`, `load`, `clean`, `link`, `open-link` and `rehearsal`.

Promises: every figure comes from `hotloop.experiment`; nothing is computed here that the planner does not give, so
page, command line and exports cannot disagree. Values that a page, a file or a link brings pass the same cleaning.

Does not do: HTTP (server.py), schedules (schedules.py), files to launch (exports.py), runs (runs.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import orjson

from hotloop import __version__
from hotloop.errors import HotloopError, InputError, Problem
from hotloop.experiment.apply import apply_edit
from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.choices import SCHEMA, Experiment
from hotloop.experiment.compare import compare_plans
from hotloop.experiment.load import flatten, validate
from hotloop.experiment.plan import Plan, build_plan
from hotloop.experiment.presets import PRESETS
from hotloop.experiment.records import Change, to_plain
from hotloop.experiment.rules import ResumeFacts
from hotloop.experiment.share import clean_choices, encode_comparison, encode_experiment, is_private_path, read_link

Json = dict[str, Any]
ReadResume = Callable[[Experiment], ResumeFacts | None]
MAX_EDITS = 64
"""Options that one step of the page can show."""
_CACHED_PLANS = 256


def read_experiment(values: Any) -> Experiment:
    """Make an experiment of JSON values.

    Raises: InputError with every problem found.
    """
    if not isinstance(values, Mapping):
        raise InputError("wrong_type", "an experiment is an object of choices", where="experiment")
    problems: list[Problem] = []
    experiment = validate(values, {}, problems)
    if problems or experiment is None:
        raise InputError.of(problems)
    return experiment


def dump_experiment(experiment: Experiment) -> Json:
    """Write an experiment as the page keeps it: every choice, defaults included."""
    values: Json = experiment.model_dump(mode="json")
    return values


def hash_experiment(experiment: Experiment) -> str:
    """Name an experiment by its choices: equal choices, equal name."""
    return hashlib.sha256(orjson.dumps(dump_experiment(experiment), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _read_no_folder(experiment: Experiment) -> ResumeFacts | None:
    return None


_read_resume: ReadResume = _read_no_folder


def set_resume_reader(read: ReadResume) -> None:
    """Say how the folder of `resume_from` is read; the command sets its own reader, so that both plan from one fact."""
    global _read_resume
    _read_resume = read


@lru_cache(maxsize=_CACHED_PLANS)
def plan_of(experiment_json: str, resume: ResumeFacts | None = None) -> Plan:
    """Build the plan of an experiment given as JSON text; kept, because undo and effects ask again."""
    return build_plan(Experiment.model_validate_json(experiment_json), resume=resume)


def plan_for(experiment: Experiment) -> Plan:
    """Build the plan of an experiment, or take the one that was built before.

    Raises: InputError `tracker_invalid` when the folder of `resume_from` is here and broken.
    """
    return plan_of(experiment.model_dump_json(), _read_resume(experiment))


def answer_schema() -> Json:
    """Give everything the page needs once: defaults, catalogue, presets, and whether a run can start here."""
    catalog = load_catalog()
    models = [
        {
            "id": model.id,
            "label": model.label,
            "in_lab": model.in_lab,
            "rollout_only": model.rollout_only,
            "nodes": model.recipe.nodes,
            "params_total": model.arch.params_total,
            "params_active": model.arch.params_active,
            "moe": model.arch.moe,
            "attention": model.arch.attention,
            "sparse": model.arch.index_heads > 0,
            "precision": model.published_precision,
            "has_mtp": model.has_mtp,
        }
        for model in catalog.models.values()
    ]
    presets = [
        {"name": name, "title": (make.__doc__ or "").strip(), "experiment": dump_experiment(make())}
        for name, make in PRESETS.items()
    ]
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return {
        "version": __version__,
        "defaults": dump_experiment(Experiment()),
        "models": models,
        "gpus": [{"id": gpu.id, "label": gpu.label} for gpu in catalog.gpus.values()],
        "presets": presets,
        "can_run": not missing,
        "missing": ", ".join(missing),
    }


def answer_plan(body: Mapping[str, Any]) -> Json:
    """Plan an experiment, after an edit when there is one; the edit and what followed from it are one step."""
    experiment = read_experiment(body.get("experiment"))
    edited: Sequence[Change] = ()
    followed: Sequence[Change] = ()
    if body.get("edit"):
        applied = apply_edit(experiment, _read_edit(experiment, body["edit"]))
        experiment, edited, followed = applied.experiment, applied.edited, applied.followed
    plan = plan_for(experiment)
    model = find_model(load_catalog(), experiment.model)
    memory = plan.memory_plan
    return {
        "experiment": dump_experiment(experiment),
        "resolved": dump_experiment(plan.resolved),
        "hash": hash_experiment(experiment),
        "edited": to_plain(tuple(edited)),
        "followed": to_plain(tuple(followed)),
        "plan": plan.to_json(),
        "model": {
            "id": model.id,
            "label": model.label,
            "hf_repo": model.hf_repo,
            "model_script": model.model_script,
            "published_precision": model.published_precision,
            "has_mtp": model.has_mtp,
            "notes": list(model.notes),
            "arch": to_plain(model.arch),
        },
        "detail": {
            "stage_bytes": list(memory.stage_bytes),
            "kv_capacity_tokens": memory.kv_capacity_tokens,
            "requests_capacity": memory.requests_capacity,
            "prompt_tokens": memory.prompt_tokens,
            "response_tokens": memory.response_tokens,
        },
    }


def _read_edit(experiment: Experiment, edit: Any) -> Json:
    """Read an edit of the page; a new kind of a tagged section keeps nothing of the old one."""
    if not isinstance(edit, Mapping):
        raise InputError("wrong_type", "an edit is an object of choices", where="edit")
    read: Json = {}
    for key, value in edit.items():
        section, dot, name = str(key).partition(".")
        if dot and name == "kind":
            read[section] = {"kind": value}
        else:
            read[str(key)] = value
    return read


def answer_effects(body: Mapping[str, Any]) -> Json:
    """Say what each option of a step would lead to, before it is picked."""
    experiment = read_experiment(body.get("experiment"))
    edits = body.get("edits")
    if not isinstance(edits, list) or len(edits) > MAX_EDITS:
        raise InputError("wrong_type", f"give a list of at most {MAX_EDITS} edits", where="edits")
    now = {error.code for error in plan_for(experiment).errors}
    return {"effects": [_effect_of(experiment, edit, now) for edit in edits]}


def _effect_of(experiment: Experiment, edit: Any, now: set[str]) -> Json:
    if not isinstance(edit, Mapping) or not isinstance(edit.get("field"), str):
        raise InputError("wrong_type", "an edit has a field and a value", where="edits")
    try:
        applied = apply_edit(experiment, _read_edit(experiment, {edit["field"]: edit.get("value")}))
        plan = plan_for(applied.experiment)
    except HotloopError as error:
        return {"error": error.code}
    totals = {total.phase: total.bytes for total in plan.memory_plan.totals}
    weights = [row.bytes for row in plan.memory if row.phase == "rollout" and "weights" in row.item]
    return {
        "gpus": plan.layout.train_gpus + (plan.layout.rollout_gpus if plan.layout.kind == "separate" else 0),
        "nodes": plan.layout.nodes,
        "peak_bytes": max(totals.get("train", 0), totals.get("rollout", 0)),
        "host_bytes": totals.get("host", 0),
        "engine_bytes": sum(weights),
        "kv_capacity_tokens": plan.memory_plan.kv_capacity_tokens,
        "round_s": plan.staleness.round_s,
        "staleness": plan.staleness.predicted,
        "followed": to_plain(tuple(applied.followed)),
        "new_errors": [*dict.fromkeys(error.code for error in plan.errors if error.code not in now)],
    }


def answer_load(body: Mapping[str, Any]) -> Json:
    """Read a file that was dropped on the page: experiment.json of schema 1, bare choices, or TOML.

    Returns: the experiment, and the dotted names of what the cleaning left out.
    """
    name, text = body.get("name"), body.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        raise InputError("wrong_type", "give the file's name and text", where="load")
    raw = read_text(PurePath(name).name or "the file", text)
    experiment, dropped = _clean(raw)
    return {"experiment": dump_experiment(experiment), "dropped": dropped}


def read_text(name: str, text: str) -> Mapping[str, Any]:
    """Read the choices of a file's text: JSON when it begins with a brace, else TOML.

    Raises: InputError `bad_json`, `bad_toml`, `wrong_type` or `schema_unsupported`.
    """
    try:
        raw = json.loads(text) if text.lstrip()[:1] in ("{", "[") else tomllib.loads(text)
    except json.JSONDecodeError as error:
        raise InputError("bad_json", error.msg, where=f"{name}:{error.lineno}", do="Correct the JSON.") from None
    except RecursionError:
        raise InputError("bad_json", "is nested too deeply", where=name, do="Give an experiment.json.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError("bad_toml", str(error), where=name, do="Give an experiment.json or a TOML file.") from None
    if not isinstance(raw, dict):
        raise InputError("wrong_type", "an experiment file holds one table of choices", where=name)
    if "schema" not in raw and "choices" not in raw:
        return raw
    if raw.get("schema") != SCHEMA or not isinstance(raw.get("choices"), dict):
        why = f"this version reads schema {SCHEMA} with an object of choices, and the file has {raw.get('schema')!r}"
        raise InputError("schema_unsupported", why, where=name, do="Export the experiment again.")
    choices: Mapping[str, Any] = raw["choices"]
    return choices


def answer_clean(body: Mapping[str, Any]) -> Json:
    """Clean values that the browser kept; what does not fit falls back to its default."""
    values = body.get("values")
    if not isinstance(values, Mapping):
        raise InputError("wrong_type", "give an object of choices", where="values")
    experiment, dropped = _clean(values)
    return {"experiment": dump_experiment(experiment), "dropped": dropped}


def _clean(raw: Mapping[str, Any]) -> tuple[Experiment, list[str]]:
    cleaned = clean_choices(raw)
    experiment = read_experiment(cleaned)
    if experiment.model not in load_catalog().models:
        find_model(load_catalog(), experiment.model)
    kept = {name for name, _ in flatten(cleaned)}
    given = {name for name, _ in flatten(dict(raw))}
    dropped = sorted(name for name in given if _snake(name) not in kept and not _is_table(raw, name))
    return experiment, [name[:80] for name in dropped]


def _is_table(raw: Mapping[str, Any], dotted: str) -> bool:
    value: Any = raw
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return isinstance(value, Mapping) and not value


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).replace("-", "_").lstrip("_")


def answer_compare(body: Mapping[str, Any]) -> Json:
    """Compare A with B: every resolved value that differs, and what each side comes to."""
    a, b = read_experiment(body.get("a")), read_experiment(body.get("b"))
    report: Json = to_plain(compare_plans(plan_for(a), plan_for(b)))
    return report


def answer_link(body: Mapping[str, Any]) -> Json:
    """Make the fragment of a share link, and name the choices that stay out of it because they are private."""
    experiment = read_experiment(body.get("experiment"))
    if body.get("kind") == "compare":
        fragment = encode_comparison(read_experiment(body.get("a")), experiment)
    else:
        fragment = encode_experiment(experiment)
    defaults = dict(flatten(dump_experiment(Experiment())))
    given = flatten(dump_experiment(experiment))
    left_out = [name for name, value in given if is_private_path(name) and value != defaults.get(name)]
    return {"fragment": fragment, "left_out": left_out}


def answer_open_link(body: Mapping[str, Any]) -> Json:
    """Open a share link over the reader's own experiment, whose private values stay."""
    current = read_experiment(body.get("current"))
    kind, payload = body.get("kind"), body.get("payload")
    if kind not in ("experiment", "compare") or not isinstance(payload, str):
        raise InputError("bad_link", "the link has no experiment", where="the link")
    link = read_link(f"#{kind}={payload}", current)
    for side in (link.experiment, link.reference):
        if side is not None:
            find_model(load_catalog(), side.model)
    return {
        "experiment": dump_experiment(link.experiment),
        "a": dump_experiment(link.reference) if link.reference else None,
        "dropped": [],
    }


def as_experiment_file(experiment: Experiment) -> Json:
    """Write an experiment as the smallest file that `hotloop run` reads."""
    return {"schema": SCHEMA, "app": "hotloop", "choices": json.loads(experiment.model_dump_json())}
