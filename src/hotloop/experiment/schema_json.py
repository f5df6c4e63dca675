"""The JSON schema of an experiment file, for editors, the page and anybody's own tools.

Owns: `build_schema`, `render_schema`. The schema is generated from `Experiment`; the page's TypeScript types are
generated from it in turn, so it carries every choice, its default, its bounds and its documentation.

Promises: the same schema gives the same bytes.
"""

from __future__ import annotations

import ast
import inspect
import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaValue

from hotloop.experiment import choices, sections
from hotloop.experiment.choices import SCHEMA, Experiment


def build_schema() -> JsonSchemaValue:
    """Return the JSON schema of an experiment (draft 2020-12); the text under each field is its description."""
    schema = Experiment.model_json_schema(mode="validation")
    _describe(schema, Experiment.__name__)
    for name, definition in schema.get("$defs", {}).items():
        _describe(definition, name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hotloop experiment",
        "x-schema": SCHEMA,
        **{key: value for key, value in schema.items() if key != "title"},
    }


def render_schema() -> str:
    """Return the schema as indented JSON text."""
    return json.dumps(build_schema(), indent=2, ensure_ascii=True) + "\n"


def _describe(definition: dict[str, Any], class_name: str) -> None:
    docs = read_field_docs(class_name)
    for field, entry in definition.get("properties", {}).items():
        if field in docs and "description" not in entry:
            entry["description"] = docs[field]


def read_field_docs(class_name: str) -> dict[str, str]:
    """Return the documentation that stands under each field of a section, bases included."""
    docs: dict[str, str] = {}
    for module in (choices, sections):
        record = getattr(module, class_name, None)
        if not (inspect.isclass(record) and issubclass(record, BaseModel)):
            continue
        for base in reversed(record.__mro__):
            if base.__module__ in (choices.__name__, sections.__name__):
                docs.update(_docs_in_source(base))
        break
    return docs


def _docs_in_source(record: type) -> dict[str, str]:
    """Read the string that follows each annotated field in the class body."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(record))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for entry, after in zip(body.body, body.body[1:], strict=False):
        is_field = isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        is_text = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        if is_field and is_text:
            assert isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            docs[entry.target.id] = " ".join(str(after.value.value).split())
    return docs
