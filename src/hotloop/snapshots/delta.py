"""Encoding a checkpoint as a delta of its parent, one shard at a time.

Promises: names follow the parent (tied tensors are matched first); the encoded shard lies in the given folder only
while it is being uploaded. Encoding one shard overlaps the upload of the one before it.

Does not do: the formats (codecs/), uploading (publisher.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotloop.snapshots.checkpoint import match_tied
from hotloop.snapshots.codecs import arc_v2, xor_zstd
from hotloop.snapshots.codecs.base import DeltaFormats, EncodedShard, TensorBytes, check_same_layout
from hotloop.snapshots.foreign import SLIME_IDENTITY
from hotloop.snapshots.index import render_index
from hotloop.snapshots.layout import parse_trailing_version
from hotloop.snapshots.manifest import TensorEntry
from hotloop.snapshots.upload import Payload, split


@dataclass(frozen=True, slots=True)
class BuiltDelta:
    """What a finished delta says about its tensors."""

    tensors: dict[str, TensorEntry]
    index: bytes
    changed_bytes: int


@dataclass(slots=True)
class _Plan:
    """Which tensors go into which delta file."""

    names: list[str]
    nbytes: int


@dataclass(slots=True)
class DeltaBuilder:
    """Encodes the shards of one delta."""

    base: Mapping[str, TensorBytes]
    new: Mapping[str, TensorBytes]
    """Matched to the names and files of the base at once."""
    folder: Path
    formats: DeltaFormats
    level: int
    parent_identity: str
    policy_version: int
    _plans: dict[str, _Plan] = field(default_factory=dict)
    _encoded: dict[str, EncodedShard] = field(default_factory=dict)
    _encoding: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Match names and plan the files.

        Raises: SnapshotError `tensor_set_mismatch`, `layout_changed`.
        """
        self.new = match_tied(self.base, self.new)
        check_same_layout(self.base, self.new, where="the new checkpoint")
        groups: dict[str, list[str]] = {}
        if self.formats.is_arc_v2:
            for name, tensor in sorted(self.base.items()):
                groups.setdefault(tensor.file, []).append(name)
        else:
            lists = xor_zstd.split_names(self.new)
            groups = {f"model-{at:05d}-of-{len(lists):05d}.safetensors": names for at, names in enumerate(lists)}
        for file, names in groups.items():
            self._plans[file] = _Plan(names, sum(self.base[name].nbytes for name in names))

    @property
    def shards(self) -> list[str]:
        """The delta files, in order."""
        return sorted(self._plans)

    def shard_nbytes(self, shard: str) -> int:
        """Bytes of the tensors that a delta file covers."""
        return self._plans[shard].nbytes

    def is_empty(self) -> bool:
        """Say whether no byte differs; stops at the first difference."""
        return all(
            np.array_equal(np.frombuffer(tensor.data, np.uint8), np.frombuffer(self.new[name].data, np.uint8))
            for name, tensor in self.base.items()
        )

    @contextmanager
    def encode(self, shard: str) -> Iterator[Payload | None]:
        """Encode one shard into the folder for as long as the context lasts; None when nothing has to be uploaded."""
        names = self._plans[shard].names
        path = self.folder / shard
        # One shard at a time: the codec already uses every core, and the lock bounds the files in the folder.
        with self._encoding:
            if self.formats.is_arc_v2:
                encoded = arc_v2.encode_shard(
                    {name: self.base[name] for name in names},
                    {name: self.new[name] for name in names},
                    path,
                    formats=self.formats,
                    level=self.level,
                )
            else:
                encoded = xor_zstd.encode_shard(
                    names, self.base, self.new, path, formats=self.formats, level=self.level
                )
            self._encoded[shard] = encoded
        try:
            if not self.formats.is_arc_v2 and not any(tensor.changed for tensor in encoded.tensors):
                yield None
            else:
                yield Payload.of_pieces(lambda: _read(path))
        finally:
            path.unlink(missing_ok=True)

    def finish(self) -> BuiltDelta:
        """Describe the resulting checkpoint, once every shard was encoded."""
        tensors: dict[str, TensorEntry] = {}
        changed_bytes = 0
        for shard in self.shards:
            for encoded in self._encoded[shard].tensors:
                new = self.new[encoded.name]
                is_present = self.formats.is_arc_v2 or encoded.changed
                tensors[encoded.name] = TensorEntry(
                    shard if is_present else "", new.dtype, new.shape, new.nbytes, encoded.adler32, encoded.changed
                )
                changed_bytes += encoded.changed_bytes
        return BuiltDelta(tensors, self._render_index(tensors), changed_bytes)

    def _render_index(self, tensors: Mapping[str, TensorEntry]) -> bytes:
        weight_map = {name: entry.file for name, entry in tensors.items() if entry.file}
        if self.formats.is_arc_v2:
            return render_index(weight_map, {"total_size": sum(entry.nbytes for entry in tensors.values())})
        index = xor_zstd.render_index(
            weight_map,
            version=f"{self.policy_version:06d}",
            base_version=_render_base_version(self.parent_identity),
            formats=self.formats,
        )
        return render_index(index["weight_map"], index["metadata"])


def _render_base_version(parent: str) -> str:
    """Write the parent as slime does (six digits) where its name is slime's, else by its identity."""
    version = parse_trailing_version(parent)
    if version is not None and parent == SLIME_IDENTITY.format(version=version):
        return f"{version:06d}"
    return parent


def _read(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while piece := file.read(8 * 1024**2):
            yield from split(memoryview(piece))
