"""Read the catalogue's TOML files into records.

Owns: `load_catalog`, `find_model`, `find_gpu`. The packaged files are read once in a process, and an entry is parsed
when it is first asked for (packaged.py); a further file adds tables or replaces tables of the same name, which is how a
user adds a model (`hotloop catalog add`).

Promises: a key that no record has, or a missing one, is an InputError that names file, table and key. Every table
carries a `source`. Does not do: invent sizes (propose.py does that for models without a recipe).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hotloop.errors import InputError, Problem
from hotloop.experiment.catalog.packaged import LazyEntries, split_entries
from hotloop.experiment.catalog.propose import propose_convert, propose_recipe
from hotloop.experiment.catalog.records import Arch, Catalog, Convert, Deployment, Gpu, Model, Recipe

_R = TypeVar("_R", Arch, Recipe, Convert, Deployment, Model, Gpu)

_FOLDER = Path(__file__).parent
_PACKAGED = ("models.toml", "gpus.toml", "images.toml")
_SHOWN_ONLY = frozenset(
    {
        "rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout",
        "over_sampling_batch_size", "max_response_len", "advantage_estimator", "eps_clip", "eps_clip_high",
        "sglang_server_concurrency", "speculative_steps", "mtp_num_layers", "pd_prefill_gpus", "pd_decode_gpus",
        "data_pad_size_multiplier", "log_probs_chunk_size", "use_tis", "tis_clip", "tis_clip_low", "page_size",
        "calculate_per_token_loss", "mamba_scheduler_strategy",
    }
)  # fmt: skip
"""Keys of slime's run scripts that a recipe keeps under `extra`."""


def _build(record: type[_R], table: Mapping[str, Any], where: str, problems: list[Problem], **given: Any) -> _R | None:
    """Fill one record; add to `problems` what does not fit and return None if anything is missing."""
    names = record._fields
    values = dict(given)
    is_whole = True
    for key, value in table.items():
        if isinstance(value, dict):
            continue
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys here: {', '.join(sorted(names))}."
            problems.append(Problem("catalog_entry", "is not a fact the catalogue knows", f"{where}.{key}", hint))
            is_whole = False
            continue
        kind = _kind_of(record, key)
        if isinstance(value, list) and kind.startswith("tuple"):
            value = tuple(value)
        if kind == "float" and type(value) is int:
            value = float(value)
        if kind in _SCALARS and type(value) is not _SCALARS[kind]:
            why = f"= {value!r}: must be of type {kind}"
            problems.append(Problem("catalog_entry", why, f"{where}.{key}", "Correct the value."))
            is_whole = False
            continue
        values[key] = value
    for name in names:
        if name not in record._field_defaults and name not in values:
            problems.append(Problem("catalog_entry", "is missing", f"{where}.{name}", "Add it."))
            is_whole = False
    return record(**values) if is_whole else None


def _kind_of(record: type[_R], name: str) -> str:
    """Return the text of a field's annotation, which a named tuple keeps inside a forward reference."""
    kind = record.__annotations__[name]
    return str(getattr(kind, "__forward_arg__", kind))


_SCALARS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


def _build_recipe(table: Mapping[str, Any], where: str, problems: list[Problem]) -> Recipe | None:
    used = {key: value for key, value in table.items() if key not in _SHOWN_ONLY}
    extra = {key: value for key, value in table.items() if key in _SHOWN_ONLY}
    if where.endswith("script_recipe"):
        used.setdefault("cpu_adam", False)
    return _build(Recipe, used, where, problems, extra=MappingProxyType(extra))


def _build_model(model_id: str, table: Mapping[str, Any], file: str, problems: list[Problem]) -> Model | None:
    where = f'{file}: models."{model_id}"'
    arch = _build(Arch, table.get("arch", {}), f"{where}.arch", problems)
    if arch is None:
        return None
    given: dict[str, Any] = {"id": model_id, "arch": arch}
    if "recipe" in table:
        given["recipe"] = _build_recipe(table["recipe"], f"{where}.recipe", problems)
    else:
        given["recipe"] = propose_recipe(arch)
    if "convert" in table:
        given["convert"] = _build(Convert, table["convert"], f"{where}.convert", problems)
    elif given["recipe"] is not None:
        given["convert"] = propose_convert(arch, given["recipe"])
    if "script_recipe" in table:
        given["script_recipe"] = _build_recipe(table["script_recipe"], f"{where}.script_recipe", problems)
    if "rollout" in table:
        given["rollout"] = _build(Deployment, table["rollout"], f"{where}.rollout", problems)
    return _build(Model, table, where, problems, **given)


def _read_toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("catalog_entry", f"is not TOML: {error}", where=name, do="Correct the file.") from error


def parse_catalog(files: Mapping[str, str], base: Catalog | None = None) -> Catalog:
    """Build a catalogue from TOML texts, over `base` when given.

    Args: files: name shown in errors -> TOML text.
    Raises: InputError `catalog_entry` with every problem of every file.
    """
    models = dict(base.models) if base else {}
    gpus = dict(base.gpus) if base else {}
    images = dict(base.images) if base else {}
    data = dict(base.data) if base else {}
    commit = base.slime_commit if base else ""
    version = base.slime_docs_version if base else ""
    problems: list[Problem] = []
    for name, text in files.items():
        tables = _read_toml(name, text)
        for model_id, table in tables.get("models", {}).items():
            model = _build_model(model_id, table, name, problems)
            if model is not None:
                models[model_id] = model
        for gpu_id, table in tables.get("gpus", {}).items():
            gpu = _build(Gpu, table, f'{name}: gpus."{gpu_id}"', problems, id=gpu_id)
            if gpu is not None:
                gpus[gpu_id] = gpu
        images.update(tables.get("images", {}))
        data.update(tables.get("data", {}))
        commit = tables.get("slime_commit", commit)
        version = tables.get("slime_docs_version", version)
    if problems:
        raise InputError.of(problems)
    return Catalog(
        MappingProxyType(models),
        MappingProxyType(gpus),
        MappingProxyType(images),
        MappingProxyType(data),
        commit,
        version,
    )


@lru_cache(maxsize=1)
def _load_packaged() -> Catalog:
    texts = {name: (_FOLDER / name).read_text(encoding="utf-8") for name in _PACKAGED}
    texts["models.toml"], models = split_entries(texts["models.toml"], "models")
    texts["gpus.toml"], gpus = split_entries(texts["gpus.toml"], "gpus")
    return parse_catalog(texts)._replace(
        models=LazyEntries(models, lambda text: parse_catalog({"models.toml": text}).models),
        gpus=LazyEntries(gpus, lambda text: parse_catalog({"gpus.toml": text}).gpus),
    )


def load_catalog(more: Sequence[Path] = ()) -> Catalog:
    """Return the packaged catalogue, with the tables of further TOML files added or replaced.

    Raises: InputError `catalog_entry` when a file is absent, is not TOML, or holds an unknown or missing key.
    """
    packaged = _load_packaged()
    if not more:
        return packaged
    texts = {}
    for path in more:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                "catalog_entry", f"cannot be read: {error.strerror}", where=str(path), do="Give a TOML file."
            ) from error
    return parse_catalog(texts, packaged)


def _find(kind: str, wanted: str, known: Sequence[str]) -> InputError:
    near = difflib.get_close_matches(wanted, known, 1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return InputError(
        f"unknown_{kind}",
        f"is not in the catalogue of {len(known)}",
        where=f"{kind} = {wanted}",
        do=f"{hint}Known: {', '.join(known)}.",
    )


def find_model(catalog: Catalog, model_id: str) -> Model:
    """Return a model. Raises: InputError `unknown_model` with the nearest name."""
    if model_id not in catalog.models:
        raise _find("model", model_id, list(catalog.models))
    return catalog.models[model_id]


def find_gpu(catalog: Catalog, gpu_id: str) -> Gpu:
    """Return a GPU. Raises: InputError `unknown_gpu` with the nearest name."""
    if gpu_id not in catalog.gpus:
        raise _find("gpu", gpu_id, list(catalog.gpus))
    return catalog.gpus[gpu_id]
