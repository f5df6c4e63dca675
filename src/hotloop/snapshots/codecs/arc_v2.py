"""The delta format `arc_v2`: one file per base file, one zstd frame of `old XOR new` per tensor.

Owns: encoding a shard against the base shard of the same name, and decoding it again.

Promises: what is written is read by the package fireworks-delta-compression, and the other way round (checked by
tests). Names equal the base's; unchanged tensors are present as frames of zeros; `__metadata__` maps each name to its
new Adler-32. Equal input, level and zstd library give equal bytes. All checks that need no decompression pass before
the first tensor is decoded, and each change is verified before it is yielded.

Does not do: whole checkpoints (`offline`, the publisher), or lineage: nothing in the file names the parent.

Source: behaviour of fireworks-delta-compression 0.1.0, backend `arc_v2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hotloop.snapshots.codecs.base import (
    ARC_V2_FORMATS,
    DeltaFormats,
    EncodedShard,
    RebuiltTensor,
    TensorBytes,
    TensorChange,
    check_same_layout,
    check_same_names,
)
from hotloop.snapshots.codecs.entry import Target, decode_entries, encode_shard_of, rebuild_entries
from hotloop.snapshots.shard import Shard

DEFAULT_LEVEL = 3


def encode_shard(
    base: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    out: Path,
    *,
    formats: DeltaFormats = ARC_V2_FORMATS,
    level: int = DEFAULT_LEVEL,
    workers: int | None = None,
    scratch: Path | None = None,
) -> EncodedShard:
    """Write the delta of one file.

    Args:
        base: the tensors of one base file.
        new: the same tensors of the new checkpoint, from wherever.
        out: the delta file; its name must be the base file's.
        level: zstd level; 1 is faster and often smaller when few values changed.
        workers: threads; None means one per core, at most 8.
        scratch: directory for payloads too large for memory; None means that of `out`.
    Raises:
        SnapshotError: `tensor_set_mismatch`, `layout_changed`, `checksum_unavailable`, `no_space`.
    """
    check_same_layout(base, new, where=out.name)
    return encode_shard_of(
        list(new),
        base,
        new,
        out,
        formats=formats,
        level=level,
        keeps_unchanged=True,
        workers=workers,
        scratch=scratch,
    )


def decode_shard(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    *,
    formats: DeltaFormats = ARC_V2_FORMATS,
    expected_adler32: Mapping[str, int] | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
) -> Iterator[TensorChange]:
    """Check a delta file and yield the verified change of every tensor, by name; unchanged ones have no ranges.

    A later tensor may still turn out broken. Keep the changes aside, or write them to a copy, until the last one came.

    Args:
        delta: the delta file.
        base: exactly the tensors of the base file of the same name.
        expected_adler32: Adler-32 of the new tensors from the manifest, checked too.
        workers: threads; None means one per core, at most 8.
        scratch: directory for changes too large for memory; None means the system's.
    Raises:
        SnapshotError: at the call: `tensor_set_mismatch`, `checksum_missing`, `checksum_malformed`, `malformed_shard`,
            `decode_failed`, `size_mismatch`, `checksum_unavailable`; while iterating also `checksum_mismatch` and
            `no_space`.
    """
    check_same_names(base, delta.tensors, where=delta.name)
    return decode_entries(
        delta, base, formats=formats, expected_adler32=expected_adler32, workers=workers, scratch=scratch
    )


def rebuild_shard(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    target: Target,
    *,
    formats: DeltaFormats = ARC_V2_FORMATS,
    expected_adler32: Mapping[str, int] | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
) -> Iterator[RebuiltTensor]:
    """Check a delta file, write every new tensor out as a whole, and yield each when it was verified, by name.

    Quicker than `decode_shard` where the new tensors are wanted somewhere else than over the base. When it raises,
    what was written is to be thrown away.

    Args:
        target: a function that takes name, position and new bytes, and is called from several threads; or for each
            name a writable buffer as large as its tensor, not over the base, which spares a copy.
    Other arguments and errors as `decode_shard`, and what the function raises.
    Raises:
        ValueError, KeyError: a buffer of another size, read-only, over its base, or absent.
    """
    check_same_names(base, delta.tensors, where=delta.name)
    return rebuild_entries(
        delta, base, target, formats=formats, expected_adler32=expected_adler32, workers=workers, scratch=scratch
    )
