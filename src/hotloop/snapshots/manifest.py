"""`snapshot.json`, schema 1: the record of one snapshot, and the rules it obeys. Pure; no I/O.

Owns: `Manifest` and its parts, parsing with every rule checked, rendering, and the manifest digest, which identifies
the content of an identity wherever snapshots are compared.

Promises: a parsed manifest names its own directory, its files are plain names, its tensors lie in its files, and its
numbers are in range; unknown keys stay in the digest and are otherwise ignored.

Does not do: rules between two manifests (chain.py), reading one from a bucket (reader.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import orjson

from hotloop.errors import SnapshotError
from hotloop.snapshots.layout import MANIFEST_NAME, MAX_POLICY_VERSION, is_file_name, is_identity

SCHEMA = 1
MAX_MANIFEST_BYTES = 256 * 1024**2
MAX_CHAIN_LENGTH = 128
ROLES = ("weights", "index", "config", "other")
Kind = Literal["anchor", "delta"]
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Formats:
    """How a delta is written. All None for an anchor."""

    compression_format: str | None = None
    checksum_format: str | None = None
    delta_encoding: str | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a snapshot."""

    size: int
    sha256: str
    """64 lower-case hex digits."""
    role: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the resulting checkpoint."""

    file: str
    """For an anchor and `arc_v2` the shard that holds it; empty when a delta leaves an unchanged tensor out."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    adler32: int
    """Of the new little-endian bytes; 1 for an empty tensor."""
    changed: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `snapshot.json` says."""

    identity: str
    kind: Kind
    parent: str | None
    anchor: str
    chain_length: int
    policy_version: int
    created_at: str
    formats: Formats
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    config_sha256: str = ""
    """SHA-256 of `config.json`; empty when the snapshot has none."""
    producer: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    """SHA-256 of the JSON with sorted keys and no white space, unknown keys included."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files in the bucket, without the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors of the resulting checkpoint."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def num_changed(self) -> int:
        """Tensors that differ from the parent."""
        return sum(entry.changed for entry in self.tensors.values())


def render_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as canonical JSON: sorted keys, no white space, UTF-8."""
    document = {
        "schema": SCHEMA,
        "identity": manifest.identity,
        "kind": manifest.kind,
        "parent": manifest.parent,
        "anchor": manifest.anchor,
        "chain_length": manifest.chain_length,
        "policy_version": manifest.policy_version,
        "created_at": manifest.created_at,
        "producer": dict(manifest.producer),
        "formats": {
            "compression_format": manifest.formats.compression_format,
            "checksum_format": manifest.formats.checksum_format,
            "delta_encoding": manifest.formats.delta_encoding,
        },
        "model": {"config_sha256": manifest.config_sha256},
        "files": {
            name: {"size": entry.size, "sha256": entry.sha256, "role": entry.role}
            for name, entry in manifest.files.items()
        },
        "tensors": {
            name: {
                "file": entry.file,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "nbytes": entry.nbytes,
                "adler32": entry.adler32,
                "changed": entry.changed,
            }
            for name, entry in manifest.tensors.items()
        },
        "totals": {
            "tensors": len(manifest.tensors),
            "changed": manifest.num_changed,
            "full_bytes": manifest.full_bytes,
            "stored_bytes": manifest.stored_bytes,
        },
    }
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def compute_digest(document: Any) -> str:
    """Compute the manifest digest of a parsed JSON document."""
    return hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()


def is_same_content(left: Manifest, right: Manifest) -> bool:
    """Say whether two manifests describe the same snapshot, whoever published it and when."""
    return (
        left.identity == right.identity
        and left.kind == right.kind
        and left.parent == right.parent
        and left.policy_version == right.policy_version
        and left.formats == right.formats
        and dict(left.files) == dict(right.files)
        and dict(left.tensors) == dict(right.tensors)
    )


def parse_manifest(data: bytes, *, identity: str) -> Manifest:
    """Parse and check the manifest found under `<identity>/`.

    Raises: SnapshotError `manifest_invalid`; `invalid_index` for a file name that is not one plain segment.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise _invalid(identity, f"is {len(data)} bytes long, above the limit of {MAX_MANIFEST_BYTES}")
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _invalid(identity, f"is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise _invalid(identity, "is not a JSON object")
    return _Parser(identity, document).parse()


def _invalid(identity: str, why: str) -> SnapshotError:
    return SnapshotError(
        "manifest_invalid",
        why,
        where=f"{identity}/{MANIFEST_NAME}",
        do="Publish the snapshot again under a new identity.",
        details={"identity": identity},
    )


class _Parser:
    """Checks one document field by field; every refusal names the field."""

    def __init__(self, identity: str, document: dict[str, Any]) -> None:
        self.identity = identity
        self.document = document

    def refuse(self, why: str) -> SnapshotError:
        return _invalid(self.identity, why)

    def integer(self, value: object, name: str, *, low: int = 0, high: int = MAX_POLICY_VERSION) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(f"{name} must be an integer from {low} to {high}, not {str(value)[:40]}")
        return value

    def text(self, value: object, name: str) -> str:
        if not isinstance(value, str):
            raise self.refuse(f"{name} must be a text")
        return value

    def mapping(self, value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(f"{name} must be an object")
        return cast("dict[str, Any]", value)

    def parse(self) -> Manifest:
        document = self.document
        if type(document.get("schema")) is not int or document["schema"] != SCHEMA:
            raise self.refuse(f"schema must be {SCHEMA}, not {str(document.get('schema'))[:40]}")
        if document.get("identity") != self.identity:
            raise self.refuse(f"names the identity {str(document.get('identity'))[:160]!r}, not its directory")
        kind = document.get("kind")
        if kind not in ("anchor", "delta"):
            raise self.refuse(f"kind must be anchor or delta, not {str(kind)[:40]!r}")
        parent, anchor, chain_length = self.lineage(kind)
        files = self.files()
        model = self.mapping(document.get("model", {}), "model")
        return Manifest(
            identity=self.identity,
            kind=kind,
            parent=parent,
            anchor=anchor,
            chain_length=chain_length,
            policy_version=self.integer(document.get("policy_version"), "policy_version"),
            created_at=self.text(document.get("created_at", ""), "created_at"),
            formats=self.formats(kind),
            files=files,
            tensors=self.tensors(files, kind),
            config_sha256=self.text(model.get("config_sha256") or "", "model.config_sha256"),
            producer={
                key: self.text(value, f"producer.{key}")
                for key, value in self.mapping(document.get("producer", {}), "producer").items()
            },
            digest=compute_digest(document),
        )

    def lineage(self, kind: str) -> tuple[str | None, str, int]:
        parent, anchor = self.document.get("parent"), self.document.get("anchor")
        chain_length = self.integer(self.document.get("chain_length"), "chain_length", high=MAX_CHAIN_LENGTH)
        if kind == "anchor":
            if parent is not None or anchor not in (None, self.identity) or chain_length != 0:
                raise self.refuse("an anchor has parent null, itself as anchor and chain_length 0")
            return None, self.identity, 0
        if not isinstance(parent, str) or not is_identity(parent) or parent == self.identity:
            raise self.refuse(f"a delta needs another identity as parent, not {str(parent)[:160]!r}")
        if not isinstance(anchor, str) or not is_identity(anchor) or anchor == self.identity:
            raise self.refuse(f"a delta needs another identity as anchor, not {str(anchor)[:160]!r}")
        if chain_length == 0:
            raise self.refuse("a delta has a chain_length of at least 1")
        return parent, anchor, chain_length

    def formats(self, kind: str) -> Formats:
        found = self.mapping(self.document.get("formats", {}), "formats")
        names = ("compression_format", "checksum_format", "delta_encoding")
        values = {
            name: None if found.get(name) is None else self.text(found[name], f"formats.{name}") for name in names
        }
        if kind == "anchor" and any(value is not None for value in values.values()):
            raise self.refuse("the formats of an anchor are null")
        if kind == "delta" and (values["compression_format"] is None or values["checksum_format"] is None):
            raise self.refuse("a delta names its compression_format and checksum_format")
        return Formats(**values)

    def files(self) -> dict[str, FileEntry]:
        files: dict[str, FileEntry] = {}
        for name, raw in self.mapping(self.document.get("files"), "files").items():
            if not is_file_name(name) or name == MANIFEST_NAME:
                raise SnapshotError(
                    "invalid_index",
                    f"names the file {name[:160]!r}, which is not one plain name in the snapshot's own directory",
                    where=f"{self.identity}/{MANIFEST_NAME}",
                    do="Publish the snapshot again under a new identity.",
                    details={"file": name[:160]},
                )
            entry = self.mapping(raw, f"files.{name}")
            sha256 = self.text(entry.get("sha256"), f"files.{name}.sha256")
            if _HEX_SHA256.fullmatch(sha256) is None:
                raise self.refuse(f"files.{name}.sha256 must be 64 lower-case hex digits")
            role = entry.get("role")
            if role not in ROLES:
                raise self.refuse(f"files.{name}.role must be one of {', '.join(ROLES)}")
            files[name] = FileEntry(self.integer(entry.get("size"), f"files.{name}.size"), sha256, role)
        return files

    def tensors(self, files: Mapping[str, FileEntry], kind: str) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        for name, raw in self.mapping(self.document.get("tensors"), "tensors").items():
            where = f"tensors.{name[:160]}"
            entry = self.mapping(raw, where)
            file = self.text(entry.get("file") or "", f"{where}.file")
            changed = entry.get("changed", True)
            if not isinstance(changed, bool):
                raise self.refuse(f"{where}.changed must be true or false")
            # Only a delta that leaves unchanged tensors out may have a tensor without a file.
            if (file or kind == "anchor" or changed) and (file not in files or files[file].role != "weights"):
                raise self.refuse(f"{where}.file {file[:160]!r} is not one of its weight files")
            shape = entry.get("shape")
            if not isinstance(shape, list):
                raise self.refuse(f"{where}.shape must be a list of integers")
            dims = tuple(self.integer(size, f"{where}.shape") for size in shape)
            nbytes = self.integer(entry.get("nbytes"), f"{where}.nbytes")
            adler32 = self.integer(entry.get("adler32"), f"{where}.adler32", high=2**32 - 1)
            if (0 in dims) != (nbytes == 0):
                raise self.refuse(f"{where}: shape {list(dims)} and nbytes {nbytes} do not agree")
            if nbytes == 0 and adler32 != 1:
                raise self.refuse(f"{where}.adler32 of an empty tensor is 1")
            dtype = self.text(entry.get("dtype"), f"{where}.dtype")
            tensors[name] = TensorEntry(file, dtype, dims, nbytes, adler32, changed)
        return tensors
