"""What a checkpoint or delta directory holds, found without its base.

Owns: the facts that `hotloop snapshots inspect` prints.
Promises: everything that can be checked without the base was checked: headers, frames, checksum texts, and the index
against the files. Payloads are expanded piece by piece, so memory stays small.
Does not do: compare with a base, so a delta that passes may still not fit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hotloop.snapshots.codecs import overwrite
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, DeltaFormats, list_tensors
from hotloop.snapshots.codecs.entry import DeltaEntry, check_entry, expand_payload
from hotloop.snapshots.codecs.parallel import map_in_order
from hotloop.snapshots.directory import check_has_weights, check_weight_map, detect_formats, open_shards, read_index
from hotloop.snapshots.shard import Shard

KIND_FULL = "full"
KIND_DELTA = "delta"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts about one directory."""

    kind: str
    """`full` or `delta`."""
    formats: DeltaFormats | None
    """None for a full checkpoint."""
    files: int
    tensors: int
    changed_tensors: int | None
    """Entries with a changed byte; None for a full checkpoint."""
    changed_bytes: int | None
    """Bytes that the delta changes; None for a full checkpoint."""
    dtypes: dict[str, int]
    """Number of tensors per stored dtype."""
    full_bytes: int | None
    """Bytes of the tensors themselves; None for an overwrite delta, which does not say."""
    stored_bytes: int
    """Bytes of the weight files."""
    seconds: float


def inspect_directory(directory: Path) -> Inspection:
    """Look at a directory.

    A directory whose index and manifest do not say what it is counts as an arc_v2 delta when every tensor is a
    one-dimensional U8 with a decimal checksum in its file's metadata, which no full checkpoint has.

    Raises:
        InputError: `not_a_directory`.
        SnapshotError: what is wrong with it; see `arc_v2.decode_shard`, and `invalid_index`, `manifest_invalid`,
            `missing_object`.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        shards = open_shards(directory, stack)
        index = read_index(directory)
        if index is not None and isinstance(index.get("weight_map"), dict):
            check_weight_map(index["weight_map"], shards)
        formats = detect_formats(directory)
        if formats is None:  # a delta that changes nothing may have no weights
            check_has_weights(shards, directory)
        formats = formats or (ARC_V2_FORMATS if _looks_like_arc_v2(shards.values()) else None)
        tensors = list_tensors(shards.values())
        full_bytes: int | None = sum(tensor.nbytes for tensor in tensors.values())
        changes: list[_Change] | None = None
        if formats is not None:
            changes = _measure_delta(shards.values(), formats)
            sizes = [change.tensor_bytes for change in changes]
            full_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        return Inspection(
            kind=KIND_FULL if formats is None else KIND_DELTA,
            formats=formats,
            files=len(shards),
            tensors=len(tensors),
            changed_tensors=None if changes is None else sum(change.changed_bytes > 0 for change in changes),
            changed_bytes=None if changes is None else sum(change.changed_bytes for change in changes),
            dtypes=dict(sorted(Counter(tensor.dtype for tensor in tensors.values()).items())),
            full_bytes=full_bytes,
            stored_bytes=sum(shard.nbytes for shard in shards.values()),
            seconds=time.perf_counter() - began,
        )


def _looks_like_arc_v2(shards: Iterable[Shard]) -> bool:
    seen = False
    for shard in shards:
        for name, entry in shard.tensors.items():
            text = shard.metadata.get(name, "")
            if entry.dtype != "U8" or len(entry.shape) != 1 or not (text.isascii() and text.isdigit()):
                return False
            seen = True
    return seen


@dataclass(frozen=True, slots=True)
class _Change:
    changed_bytes: int
    tensor_bytes: int | None


def _measure_delta(shards: Iterable[Shard], formats: DeltaFormats) -> list[_Change]:
    entries = [check_entry(shard, name, formats) for shard in shards for name in sorted(shard.tensors)]
    return list(map_in_order(partial(_measure, formats=formats), entries))


def _measure(entry: DeltaEntry, *, formats: DeltaFormats) -> _Change:
    if formats.delta_encoding == "overwrite":
        head = next(expand_payload(entry), None)
        return _Change(0 if head is None else int.from_bytes(head[: overwrite.COUNT_BYTES].tobytes(), "little"), None)
    if entry.layout.is_zero:
        return _Change(0, entry.layout.zero_bytes)
    changed_bytes = tensor_bytes = 0
    for piece in expand_payload(entry):
        changed_bytes += int(np.count_nonzero(piece))
        tensor_bytes += piece.nbytes
    return _Change(changed_bytes, tensor_bytes)
