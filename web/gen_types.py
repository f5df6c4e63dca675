"""Write src/lib/types.gen.ts from the JSON schema of an experiment file; a test compares the two.

Run: python web/gen_types.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotloop.experiment.choices import Experiment

TARGET = Path(__file__).parent / "src" / "lib" / "types.gen.ts"
HEAD = "// Made by web/gen_types.py from the JSON schema of hotloop.experiment.choices; never edited.\n"


def render() -> str:
    """Write the TypeScript of every record of the schema, the experiment last."""
    schema = Experiment.model_json_schema(mode="serialization")
    parts = [HEAD]
    for name, record in schema["$defs"].items():
        parts.append(_render_record(name, record))
    parts.append(_render_record("Experiment", schema))
    return "\n".join(parts)


def _render_record(name: str, record: dict[str, Any]) -> str:
    lines = [f"export interface {name} {{"]
    for key, value in record["properties"].items():
        if note := value.get("description"):
            lines.append(f"  /** {note} */")
        lines.append(f"  {key}: {_render_type(value)};")
    return "\n".join([*lines, "}", ""])


def _render_type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "const" in value:
        return _quote(value["const"])
    if "enum" in value:
        return " | ".join(_quote(item) for item in value["enum"])
    for key in ("anyOf", "oneOf"):
        if key in value:
            return " | ".join(_render_type(item) for item in value[key])
    kind = value.get("type")
    if kind == "array":
        inner = _render_type(value.get("items", {}))
        return f"readonly ({inner})[]" if "|" in inner else f"readonly {inner}[]"
    if kind == "object":
        return f"Record<string, {_render_type(value.get('additionalProperties', {}))}>"
    return {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}[
        str(kind)
    ]


def _quote(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
