"""Directories without a manifest: what they are, whose they are, and whether they are complete. Pure; no I/O.

    index metadata.completed_by              not complete: one of ours whose manifest is not there
    index metadata.delta_encoding            delta of slime, Miles or cwtrain; parent from metadata.base_version
    a request names a previous snapshot      delta in the Fireworks or Baseten manner
    adapter_config.json                      refused
    index or model.safetensors, and config   anchor
    anything else                            not complete (yet)

The first match decides (hot_load.md, section 2.2).

Promises: the same directory and the same request give the same answer; a set of files is complete only when every
file of the index is there.

Does not do: listing the directory or reading the index (reader.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import ObjectInfo
from hotloop.snapshots.codecs.base import DeltaFormats, parse_formats
from hotloop.snapshots.index import Index
from hotloop.snapshots.layout import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    MAX_POLICY_VERSION,
    SINGLE_FILE_NAME,
    is_identity,
    parse_trailing_version,
)

SLIME_IDENTITY = "weight_v{version:06d}"


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says about its target; all optional where a manifest exists."""

    is_incremental: bool = False
    """The request has `incremental_snapshot_metadata`."""
    previous_identity: str | None = None
    """`previous_snapshot_identity`; the service fills in the served identity where the request leaves it out."""
    compression_format: str | None = None
    checksum_format: str | None = None
    policy_version: int | None = None
    served_policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a directory without a manifest turned out to be."""

    kind: Literal["anchor", "delta"]
    parent: str | None
    formats: DeltaFormats | None
    policy_version: int | None
    files: tuple[str, ...]
    """Weight files, then the others that belong to the set."""
    digest: str


def describe_foreign(
    identity: str,
    objects: Mapping[str, ObjectInfo],
    index: Index | None,
    hints: Hints,
    *,
    exists: Callable[[str], bool],
) -> Foreign:
    """Decide what a directory without a manifest is.

    Args:
        objects: file name -> object, of the immediate children.
        index: the parsed index, if there is one.
        exists: says whether an identity is in the prefix.

    Raises:
        SnapshotError: `unsupported_snapshot`, `snapshot_incomplete`, `missing_object`, `missing_parent`,
            `missing_format`, `unsupported_format`, `unsupported_checksum`, `invalid_index`.
    """
    if index is not None and index.needs_manifest:
        raise SnapshotError(
            "snapshot_incomplete",
            "has no snapshot.json, which its index says completes it: its upload has not ended, or it was pruned",
            where=f"snapshot {identity}",
            do="Wait until its upload has ended, or publish it again.",
            details={"identity": identity},
            retryable=True,
            exit_code=2,
        )
    if index is not None and "delta_encoding" in index.metadata:
        parent, formats = _slime_parent(identity, index, exists), _slime_formats(identity, index)
        version = hints.policy_version
        if version is None:
            version = _parse_version(identity, "version", index.metadata.get("version"))
        return _make(identity, "delta", parent, formats, version, objects, index)
    if hints.is_incremental:
        return _make(
            identity,
            "delta",
            _request_parent(identity, hints),
            _request_formats(identity, hints),
            _guess_version(identity, hints),
            objects,
            index,
        )
    if ADAPTER_CONFIG_NAME in objects:
        raise SnapshotError(
            "unsupported_snapshot",
            "holds an adapter; only full weights and deltas of them can be loaded",
            where=f"snapshot {identity}",
            do="Merge the adapter into its base and publish that.",
            details={"identity": identity},
            exit_code=2,
        )
    if CONFIG_NAME in objects and (index is not None or SINGLE_FILE_NAME in objects):
        return _make(identity, "anchor", None, None, _guess_version(identity, hints), objects, index)
    raise SnapshotError(
        "snapshot_incomplete",
        "has no snapshot.json, and no index or model.safetensors beside a config.json",
        where=f"snapshot {identity}",
        do="Wait until its upload has ended, or publish it.",
        details={"identity": identity},
        retryable=True,
        exit_code=2,
    )


def _make(
    identity: str,
    kind: Literal["anchor", "delta"],
    parent: str | None,
    formats: DeltaFormats | None,
    policy_version: int | None,
    objects: Mapping[str, ObjectInfo],
    index: Index | None,
) -> Foreign:
    if index is None and SINGLE_FILE_NAME not in objects:
        raise SnapshotError(
            "snapshot_incomplete",
            "has neither an index nor a model.safetensors",
            where=f"snapshot {identity}",
            do="Wait until its upload has ended.",
            details={"identity": identity},
            retryable=True,
            exit_code=2,
        )
    weights = index.files if index is not None else [SINGLE_FILE_NAME]
    missing = [name for name in weights if name not in objects]
    if missing:
        raise SnapshotError(
            "missing_object",
            f"lacks {len(missing)} of the {len(weights)} files of its index, first {missing[0]}",
            where=f"snapshot {identity}",
            do="Wait until its upload has ended.",
            details={"identity": identity, "key": f"{identity}/{missing[0]}", "missing": missing[:20]},
            retryable=True,
            exit_code=2,
        )
    stray = [name for name in objects if name.endswith(".safetensors") and name not in weights]
    if stray:
        raise SnapshotError(
            "tensor_set_mismatch",
            f"holds {len(stray)} weight files that its index does not name, first {stray[0]}",
            where=f"snapshot {identity}",
            do="Remove them, or write an index that names every file.",
            details={"identity": identity, "extra": stray[:20]},
            exit_code=2,
        )
    if kind == "delta" and parent == identity:
        raise SnapshotError(
            "chain_broken",
            "names itself as its parent",
            where=f"snapshot {identity}",
            details={"identity": identity, "missing": identity},
            exit_code=2,
        )
    others = [name for name in (INDEX_NAME, CONFIG_NAME) if name in objects]
    files = (*weights, *others)
    return Foreign(kind, parent, formats, policy_version, files, _compute_digest(kind, parent, files, objects))


def _compute_digest(kind: str, parent: str | None, files: tuple[str, ...], objects: Mapping[str, ObjectInfo]) -> str:
    """Identify the content of a directory without a manifest by what the store says of its files."""
    parts = [[name, objects[name].size, objects[name].etag] for name in sorted(files)]
    return hashlib.sha256(orjson.dumps([kind, parent, parts])).hexdigest()


def _slime_parent(identity: str, index: Index, exists: Callable[[str], bool]) -> str:
    base = index.metadata.get("base_version")
    if isinstance(base, str) and is_identity(base) and base != identity and exists(base):
        return base
    version = _parse_version(identity, "base_version", base)
    if version is None:
        raise SnapshotError(
            "missing_parent",
            f"its index names the base_version {str(base)[:160]!r}, which is neither an identity in the bucket nor a"
            " number",
            where=f"snapshot {identity}",
            do="Publish the base as an anchor, or write base_version into the index.",
            details={"identity": identity},
        )
    return SLIME_IDENTITY.format(version=version)


def _slime_formats(identity: str, index: Index) -> DeltaFormats:
    metadata = index.metadata
    compression = metadata.get("compression_format")
    if compression is None:
        raise _missing_format(identity, "its index has no compression_format")
    return parse_formats(
        compression, metadata.get("checksum_format"), metadata.get("delta_encoding"), where=f"snapshot {identity}"
    )


def _parse_version(identity: str, name: str, value: Any) -> int | None:
    """Read slime's version, six digits of text or an integer; compared as integers. None when there is none."""
    if value is None:
        return None
    text = str(value)
    if isinstance(value, bool) or not isinstance(value, int | str) or not (text.isascii() and text.isdigit()):
        if name == "base_version":
            return None
        raise SnapshotError(
            "invalid_index",
            f"metadata.{name} must be a number, not {text[:80]!r}",
            where=f"{identity}/{INDEX_NAME}",
            details={"identity": identity},
        )
    if len(text) > 19 or int(text) > MAX_POLICY_VERSION:
        raise SnapshotError(
            "invalid_index",
            f"metadata.{name} {text[:40]} is above {MAX_POLICY_VERSION}",
            where=f"{identity}/{INDEX_NAME}",
            details={"identity": identity},
        )
    return int(text)


def _request_parent(identity: str, hints: Hints) -> str:
    if hints.previous_identity is None:
        raise SnapshotError(
            "missing_parent",
            "is announced as a delta, and neither the request nor the deployment names its parent",
            where=f"snapshot {identity}",
            do="Give incremental_snapshot_metadata.previous_snapshot_identity, or load an anchor first.",
            details={"identity": identity},
        )
    return hints.previous_identity


def _request_formats(identity: str, hints: Hints) -> DeltaFormats:
    if hints.compression_format is None:
        raise _missing_format(identity, "is announced as a delta without compression_format")
    return parse_formats(hints.compression_format, hints.checksum_format, where=f"snapshot {identity}")


def _missing_format(identity: str, why: str) -> SnapshotError:
    return SnapshotError(
        "missing_format",
        why,
        where=f"snapshot {identity}",
        do="Name compression_format and checksum_format, such as arc_v2 and alder32.",
        details={"identity": identity},
    )


def _guess_version(identity: str, hints: Hints) -> int | None:
    """Find the policy version of a Fireworks-style directory: the request, the identity's digits, the served + 1."""
    if hints.policy_version is not None:
        return hints.policy_version
    found = parse_trailing_version(identity)
    if found is not None:
        return found
    return None if hints.served_policy_version is None else hints.served_policy_version + 1
