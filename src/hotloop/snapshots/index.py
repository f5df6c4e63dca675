"""`model.safetensors.index.json`: which file holds which tensor. Pure; no I/O.

Promises: a parsed index names only plain `.safetensors` files of its own directory, so that no other key is fetched.

Does not do: whether those files exist (reader.py) or what lies in them (shard.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from hotloop.errors import SnapshotError
from hotloop.snapshots.layout import INDEX_NAME, MANIFEST_NAME, check_file_name

MAX_INDEX_BYTES = 256 * 1024**2
COMPLETED_BY_KEY = "completed_by"
"""Index metadata: the object that completes the set. Without it, an upload of ours that was cut short just before its
manifest, or a prune cut short just after it, would look like a whole checkpoint of a foreign writer."""


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed index."""

    weight_map: Mapping[str, str]
    """Tensor name -> file name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_manifest(self) -> bool:
        """The writer says that the set is complete only with its manifest."""
        return self.metadata.get(COMPLETED_BY_KEY) == MANIFEST_NAME

    @property
    def files(self) -> list[str]:
        """The weight files, sorted."""
        return sorted(set(self.weight_map.values()))


def parse_index(data: bytes, *, where: str) -> Index:
    """Parse and check an index.

    Raises: SnapshotError `invalid_index`.
    """

    def refuse(why: str) -> SnapshotError:
        return SnapshotError(
            "invalid_index",
            why,
            where=f"{where}/{INDEX_NAME}",
            do="Write the index again; its weight_map names one .safetensors file per tensor.",
        )

    if len(data) > MAX_INDEX_BYTES:
        raise refuse(f"is {len(data)} bytes long, above the limit of {MAX_INDEX_BYTES}")
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise refuse(f"is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise refuse("is not a JSON object")
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        raise refuse("has no weight_map object")
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise refuse("its metadata is not an object")
    for tensor, file in weight_map.items():
        check_file_name(file, where=f"{where}/{INDEX_NAME}")
        if not file.endswith(".safetensors"):
            raise refuse(f"places the tensor {tensor[:160]!r} in {file[:160]!r}, which is no .safetensors file")
    return Index(weight_map, metadata)


def render_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> bytes:
    """Write an index as Hugging Face writes it, two spaces and sorted keys, with our mark in its metadata."""
    document = {"metadata": {**metadata, COMPLETED_BY_KEY: MANIFEST_NAME}, "weight_map": dict(weight_map)}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
