"""The content that the next delta is taken from: in memory, in a directory, or rebuilt from the bucket.

Promises: a parent's tensors have the checksums that its manifest gives, whatever they were loaded from.

Does not do: choosing the parent (publisher.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotloop.errors import SnapshotError
from hotloop.snapshots.anchor import compute_adler32
from hotloop.snapshots.chain import Link
from hotloop.snapshots.checkpoint import match_tied, open_checkpoint
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.codecs.parallel import map_in_order
from hotloop.snapshots.manifest import Manifest
from hotloop.snapshots.materialize import rebuild
from hotloop.snapshots.published import Known
from hotloop.snapshots.reader import SnapshotReader


@dataclass(frozen=True, slots=True)
class Parent:
    """One complete snapshot and its tensors."""

    link: Link
    anchor: str
    chain_length: int
    tensors: Mapping[str, TensorBytes]

    @classmethod
    def from_directory(cls, known: Known, directory: Path | str, reader: SnapshotReader) -> Parent:
        """Take the tensors of a checkpoint directory after checking that they are the parent's.

        Raises: SnapshotError `parent_mismatch` (exit 2), and what `open_checkpoint` raises.
        """
        found = open_checkpoint(directory).tensors
        manifest = reader.find_manifest(known.link.identity)
        if manifest is None:
            # A foreign parent states no checksums of its own; only its rebuilt content can be compared.
            built = rebuild(known.link.identity, reader)
            tensors = match_tied(built.tensors, found)
            for name, tensor in tensors.items():
                if tensor.data != built.tensors[name].data:
                    raise _mismatch(known.link.identity, directory, name)
        else:
            anchor = reader.find_manifest(known.anchor)
            tensors = _check_against(manifest, anchor or manifest, found, directory)
        return cls(known.link, known.anchor, known.chain_length, tensors)

    @classmethod
    def from_bucket(cls, known: Known, reader: SnapshotReader) -> Parent:
        """Rebuild the parent from its chain.

        Raises: SnapshotError, as `rebuild` does.
        """
        built = rebuild(known.link.identity, reader)
        return cls(known.link, known.anchor, known.chain_length, built.tensors)


def _check_against(
    manifest: Manifest, anchor: Manifest, found: Mapping[str, TensorBytes], directory: Path | str
) -> dict[str, TensorBytes]:
    missing = [name for name in manifest.tensors if name not in found]
    if missing:
        raise _mismatch(manifest.identity, directory, missing[0])
    names = sorted(manifest.tensors)
    sums = map_in_order(lambda name: compute_adler32(found[name]), names)
    tensors: dict[str, TensorBytes] = {}
    for name, adler32 in zip(names, sums, strict=True):
        entry, tensor = manifest.tensors[name], found[name]
        if (entry.dtype, entry.shape, entry.adler32) != (tensor.dtype, tensor.shape, adler32):
            raise _mismatch(manifest.identity, directory, name)
        # The anchor's files, not the directory's: an arc_v2 delta has the file names of its chain's anchor.
        home = anchor.tensors.get(name, entry).file
        tensors[name] = TensorBytes(tensor.dtype, tensor.shape, tensor.data, home or tensor.file)
    return tensors


def _mismatch(identity: str, directory: Path | str, tensor: str) -> SnapshotError:
    return SnapshotError(
        "parent_mismatch",
        f"its tensor {tensor!r} is not that of the parent {identity}",
        where=f"base directory {directory}",
        do="Give the directory that the parent was published from, or leave --base-dir out.",
        details={"parent": identity, "tensor": tensor},
        exit_code=2,
    )


def copy_tensors(tensors: Mapping[str, TensorBytes], *, into: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """Copy tensors into memory of our own, reusing the buffers of an earlier copy where the sizes fit."""

    def copy(name: str) -> TensorBytes:
        tensor = tensors[name]
        old = into.get(name)
        if old is not None and old.nbytes == tensor.nbytes and not old.data.readonly:
            buffer = np.frombuffer(old.data, dtype=np.uint8)
        else:
            buffer = np.empty(tensor.nbytes, dtype=np.uint8)
        np.copyto(buffer, np.frombuffer(tensor.data, dtype=np.uint8))
        return TensorBytes(tensor.dtype, tensor.shape, buffer.data, tensor.file)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(tensors, pool.map(copy, tensors), strict=True))
