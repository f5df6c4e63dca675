"""The delta form of slime, Miles and cwtrain: changed tensors only, lineage in the index.

Owns: encoding a checkpoint's changed tensors into numbered files, decoding such a file against a whole checkpoint,
and the index that names version, base version, encoding and checksum.

Promises: unchanged tensors are left out, and a tensor that is left out keeps its parent's bytes. Both encodings, `xor`
and `overwrite`, and the checksums `xxh3-128`, `blake3` and `adler32` are read and written. An index with an empty
`weight_map` is a valid, empty delta. The promises of `arc_v2` about checks and verification hold here, too.

Does not do: finding the parent from `base_version` (manifest rules).

Source: slime 624b824a; hot_load.md section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.errors import SnapshotError
from hotloop.snapshots.codecs.base import (
    SLIME_FORMATS,
    ZSTD,
    DeltaFormats,
    EncodedShard,
    RebuiltTensor,
    TensorBytes,
    TensorChange,
    check_same_layout,
    parse_formats,
)
from hotloop.snapshots.codecs.entry import Target, decode_entries, encode_shard_of, rebuild_entries
from hotloop.snapshots.shard import Shard

DEFAULT_LEVEL = 1
MAX_FILE_TENSOR_BYTES = 5 << 30
"""Tensors are put together in one delta file up to this many uncompressed bytes."""


@dataclass(frozen=True, slots=True)
class DeltaIndex:
    """The `model.safetensors.index.json` of a delta in this form."""

    formats: DeltaFormats
    version: str
    base_version: str
    weight_map: dict[str, str]
    """Tensor name to delta file."""


def is_delta_index(index: Mapping[str, Any]) -> bool:
    """Whether an index is one of this form: its metadata names a delta encoding."""
    metadata = index.get("metadata")
    return isinstance(metadata, dict) and "delta_encoding" in metadata


def parse_index(index: Mapping[str, Any], *, where: str) -> DeltaIndex:
    """Read the index of a delta.

    Raises:
        SnapshotError: `invalid_index`, `unsupported_format`, `unsupported_checksum`.
    """
    metadata, weight_map = index.get("metadata"), index.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise _refuse_index("metadata and weight_map must be objects", where)
    for key in ("version", "base_version"):
        if not isinstance(metadata.get(key), str | int) or isinstance(metadata.get(key), bool):
            raise _refuse_index(f"metadata.{key} is missing", where)
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise _refuse_index("weight_map must map tensor names to file names", where)
    formats = parse_formats(
        metadata.get("compression_format", ZSTD),  # the readers of this form take it for granted
        metadata.get("checksum_format"),
        metadata.get("delta_encoding"),
        where=where,
    )
    return DeltaIndex(formats, str(metadata["version"]), str(metadata["base_version"]), dict(weight_map))


def render_index(
    weight_map: Mapping[str, str], *, version: str, base_version: str, formats: DeltaFormats
) -> dict[str, Any]:
    """Return the index of a delta, as JSON types. `version` and `base_version` are usually six digits."""
    return {
        "metadata": {
            "version": version,
            "base_version": base_version,
            "delta_encoding": formats.delta_encoding,
            "compression_format": formats.compression_format,
            "checksum_format": formats.checksum_format,
        },
        "weight_map": dict(sorted(weight_map.items())),
    }


def _refuse_index(why: str, where: str) -> SnapshotError:
    return SnapshotError(
        "invalid_index",
        why,
        where=where,
        do="Publish the snapshot again; the index must name a file for each tensor.",
        details={"file": where},
    )


def split_names(tensors: Mapping[str, TensorBytes], max_bytes: int = MAX_FILE_TENSOR_BYTES) -> list[list[str]]:
    """Cut the sorted names of a checkpoint into files of about equal size, at least one name each."""
    files: list[list[str]] = []
    room = 0
    for name in sorted(tensors):
        if not files or tensors[name].nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= tensors[name].nbytes
    return files


def encode_shard(
    names: Sequence[str],
    base: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    out: Path,
    *,
    formats: DeltaFormats = SLIME_FORMATS,
    level: int = DEFAULT_LEVEL,
    workers: int | None = None,
    scratch: Path | None = None,
) -> EncodedShard:
    """Write the delta of some tensors as one file; unchanged ones are left out.

    Args:
        names: which tensors; see `split_names`.
        base: the whole base checkpoint.
        new: the whole new checkpoint.
    Other arguments and errors as `arc_v2.encode_shard`, and `unsupported_format` for overwrite above 4 GiB.
    """
    chosen = set(names)
    check_same_layout(
        {name: tensor for name, tensor in base.items() if name in chosen},
        {name: tensor for name, tensor in new.items() if name in chosen},
        where=out.name,
    )
    return encode_shard_of(
        names,
        base,
        new,
        out,
        formats=formats,
        level=level,
        keeps_unchanged=False,
        workers=workers,
        scratch=scratch,
    )


def decode_shard(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    *,
    formats: DeltaFormats,
    expected_adler32: Mapping[str, int] | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
) -> Iterator[TensorChange]:
    """Check a delta file and yield the verified change of every tensor in it, by name.

    Args:
        delta: the delta file.
        base: the whole base checkpoint.
    Other arguments and errors as `arc_v2.decode_shard`; `tensor_set_mismatch` when a name is not in the base.
    """
    _check_names_known(delta, base)
    return decode_entries(
        delta, base, formats=formats, expected_adler32=expected_adler32, workers=workers, scratch=scratch
    )


def rebuild_shard(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    target: Target,
    *,
    formats: DeltaFormats,
    expected_adler32: Mapping[str, int] | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
) -> Iterator[RebuiltTensor]:
    """Check a delta file and write every new tensor in it out as a whole, as `arc_v2.rebuild_shard`.

    Args:
        base: the whole base checkpoint.
    Other arguments and errors as `arc_v2.rebuild_shard`; `tensor_set_mismatch` when a name is not in the base.
    """
    _check_names_known(delta, base)
    return rebuild_entries(
        delta, base, target, formats=formats, expected_adler32=expected_adler32, workers=workers, scratch=scratch
    )


def _check_names_known(delta: Shard, base: Mapping[str, TensorBytes]) -> None:
    unknown = sorted(delta.tensors.keys() - base.keys())
    if unknown:
        raise SnapshotError(
            "tensor_set_mismatch",
            f"{len(unknown)} tensors are not in the base, first {unknown[0]!r}",
            where=delta.name,
            do="A delta keeps the tensor names of its base. Publish an anchor if the model changed.",
            details={"missing": [], "extra": unknown[:20]},
        )
