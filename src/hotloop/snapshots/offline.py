"""Deltas on plain directories: encode, apply, inspect, without a bucket.

Owns: walking a checkpoint directory file by file with the codecs, and putting a new directory in place in one step.

Promises: inputs are only read. The output directory appears complete, under its name, by one rename; on any error, or
a kill at any moment, it does not exist, and at most a hidden `.NAME.partial-*` directory is left, which the next call
for the same output removes. Every tensor is verified before the rename. Works without torch.

Does not do: identities, chains and manifests (publisher, chain); it takes a directory for what it is told to be.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hotloop.errors import SnapshotError
from hotloop.snapshots.codecs import arc_v2, xor_zstd
from hotloop.snapshots.codecs.base import (
    ARC_V2_FORMATS,
    DeltaFormats,
    EncodedShard,
    RebuiltTensor,
    check_same_layout,
    list_tensors,
)
from hotloop.snapshots.codecs.entry import WriteTensor
from hotloop.snapshots.directory import (
    INDEX_NAME,
    SHARD_SUFFIX,
    check_weight_map,
    copy_others,
    detect_formats,
    new_directory,
    open_checkpoint_shards,
    open_shards,
    read_index,
)
from hotloop.snapshots.disk import report_full_disk
from hotloop.snapshots.shard import Shard

_HAS_PWRITE = hasattr(os, "pwrite")
"""Windows has none, so its threads take turns."""


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """What `encode_directory` did."""

    formats: DeltaFormats
    files: tuple[EncodedShard, ...]
    full_bytes: int
    """Bytes of all tensors."""
    stored_bytes: int
    """Bytes of the delta's weight files."""
    changed_bytes: int
    seconds: float

    @property
    def changed_frac(self) -> float:
        """Share of tensor bytes that differ, 0..1."""
        return self.changed_bytes / self.full_bytes if self.full_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What `apply_directory` did."""

    formats: DeltaFormats
    tensors: int
    changed_tensors: int
    full_bytes: int
    changed_bytes: int
    seconds: float


# ---- encode


def encode_directory(
    base: Path,
    new: Path,
    out: Path,
    *,
    formats: DeltaFormats = ARC_V2_FORMATS,
    level: int | None = None,
    workers: int | None = None,
    version: str = "000001",
    base_version: str = "000000",
) -> EncodeReport:
    """Write the delta from one checkpoint directory to another.

    Args:
        base: the parent checkpoint.
        new: the checkpoint it became; same tensors, dtypes and shapes.
        out: the delta directory; must not exist, or be empty.
        formats: see `codecs.base.parse_formats`.
        level: zstd level; None means 3 for arc_v2 and 1 for slime.
        workers: threads; None means one per core, at most 8.
        version: slime form only, for its index.
        base_version: slime form only, for its index.
    Raises:
        InputError: `not_a_directory`, `output_exists`.
        SnapshotError: as the codecs' `encode_shard`; `malformed_shard` and `missing_object` for the inputs.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        base_shards, new_shards = open_checkpoint_shards(base, stack), open_checkpoint_shards(new, stack)
        partial = stack.enter_context(new_directory(out, [base, new]))
        if formats.is_arc_v2:
            files = _encode_arc_v2(base_shards, new_shards, partial, formats, level, workers, where=str(new))
            copy_others(base, partial, only={INDEX_NAME})
            copy_others(new, partial, only={"config.json"})
        else:
            files = _encode_slime(
                base_shards, new_shards, partial, formats, level, workers, version, base_version, where=str(new)
            )
    tensors = [tensor for file in files for tensor in file.tensors]
    return EncodeReport(
        formats=formats,
        files=tuple(files),
        full_bytes=sum(tensor.nbytes for tensor in tensors),
        stored_bytes=sum(file.nbytes for file in files),
        changed_bytes=sum(tensor.changed_bytes for tensor in tensors),
        seconds=time.perf_counter() - began,
    )


def _encode_arc_v2(
    base: Mapping[str, Shard],
    new: Mapping[str, Shard],
    out: Path,
    formats: DeltaFormats,
    level: int | None,
    workers: int | None,
    *,
    where: str,
) -> list[EncodedShard]:
    """Encode file by file. The new checkpoint's tensors may lie in other files than the base's."""
    new_tensors, base_tensors = list_tensors(new.values()), list_tensors(base.values())
    check_same_layout(base_tensors, new_tensors, where=where)
    return [
        arc_v2.encode_shard(
            list_tensors([shard]),
            {name: new_tensors[name] for name in shard.tensors},
            out / file,
            formats=formats,
            level=arc_v2.DEFAULT_LEVEL if level is None else level,
            workers=workers,
        )
        for file, shard in base.items()
    ]


def _encode_slime(
    base: Mapping[str, Shard],
    new: Mapping[str, Shard],
    out: Path,
    formats: DeltaFormats,
    level: int | None,
    workers: int | None,
    version: str,
    base_version: str,
    *,
    where: str,
) -> list[EncodedShard]:
    base_tensors, new_tensors = list_tensors(base.values()), list_tensors(new.values())
    check_same_layout(base_tensors, new_tensors, where=where)
    groups = xor_zstd.split_names(new_tensors)
    files: list[EncodedShard] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups):
        path = out / f"model-{number:05d}-of-{len(groups):05d}{SHARD_SUFFIX}"
        done = xor_zstd.encode_shard(
            names,
            base_tensors,
            new_tensors,
            path,
            formats=formats,
            level=xor_zstd.DEFAULT_LEVEL if level is None else level,
            workers=workers,
        )
        stored = [tensor.name for tensor in done.tensors if tensor.changed]
        if not stored:
            path.unlink()
            done = EncodedShard(done.file, 0, done.tensors)
        weight_map.update(dict.fromkeys(stored, path.name))
        files.append(done)
    index = xor_zstd.render_index(weight_map, version=version, base_version=base_version, formats=formats)
    (out / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    return files


# ---- apply


def iter_rebuilt(
    base: Mapping[str, Shard],
    delta: Mapping[str, Shard],
    write: WriteTensor,
    formats: DeltaFormats,
    *,
    index: Mapping[str, Any] | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
) -> Iterator[RebuiltTensor]:
    """Check all files of a delta against a base, write every tensor that the delta holds, and yield each, verified.

    Args:
        base: the base's shards by file name.
        delta: the delta's shards by file name.
        write: takes name, position in the tensor and new bytes; called from several threads.
        formats: how the delta is stored.
        index: the delta's index; its `weight_map`, where there is one, must name exactly what the shards hold.
        workers: threads.
        scratch: directory for positions too large for memory.
    Raises:
        SnapshotError: at the call, for every file, all that needs no decompression; while iterating the rest. See
            `arc_v2.decode_shard`.
    """
    if index is not None and isinstance(index.get("weight_map"), dict):
        check_weight_map(index["weight_map"], delta)
    base_tensors = list_tensors(base.values())
    streams: list[Iterator[RebuiltTensor]] = []
    if formats.is_arc_v2:
        _check_same_files(base, delta)
        for file, shard in delta.items():
            tensors = {name: base_tensors[name] for name in base[file].tensors}
            streams.append(
                arc_v2.rebuild_shard(shard, tensors, write, formats=formats, workers=workers, scratch=scratch)
            )
    else:
        list_tensors(delta.values())  # refuses a tensor that two files hold
        for shard in delta.values():
            streams.append(
                xor_zstd.rebuild_shard(shard, base_tensors, write, formats=formats, workers=workers, scratch=scratch)
            )
    return (tensor for stream in streams for tensor in stream)


def _check_same_files(base: Mapping[str, Shard], delta: Mapping[str, Shard]) -> None:
    missing, extra = sorted(base.keys() - delta.keys()), sorted(delta.keys() - base.keys())
    if missing or extra:
        raise SnapshotError(
            "tensor_set_mismatch",
            f"the delta's files differ from the base's: missing {missing[:3]}, extra {extra[:3]}",
            do="An arc_v2 delta has one file for each base file, with the same name.",
            details={"missing": missing[:20], "extra": extra[:20]},
        )


class _NewFiles:
    """Files of the new checkpoint, with the names, headers and layout of the base's; written to by several threads."""

    def __init__(self, base: Mapping[str, Shard], out: Path) -> None:
        self._out = out
        self._files: dict[str, IO[bytes]] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()
        for file, shard in base.items():
            self._places.update({name: (file, entry.offset) for name, entry in shard.tensors.items()})
        with ExitStack() as stack:
            for file, shard in base.items():
                self._files[file] = stack.enter_context(_create_file(out / file))
                self._write_at(file, 0, shard.read_head())
            self._opened = stack.pop_all()

    def write(self, name: str, position: int, data: memoryview) -> None:
        """Write bytes of a tensor, from a position within it on.

        Raises:
            SnapshotError: `no_space`.
        """
        file, offset = self._places[name]
        self._write_at(file, offset + position, data)

    def _write_at(self, file: str, offset: int, data: memoryview) -> None:
        target = self._files[file]
        with report_full_disk(self._out):
            if _HAS_PWRITE:
                while len(data):
                    written = os.pwrite(target.fileno(), data, offset)
                    data, offset = data[written:], offset + written
                return
            with self._lock:
                target.seek(offset)
                while len(data):
                    data = data[target.write(data) :]

    def __enter__(self) -> _NewFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._opened.close()


def _create_file(path: Path) -> IO[bytes]:
    return path.open("xb", buffering=0)


def apply_directory(
    base: Path,
    delta: Path,
    out: Path,
    *,
    formats: DeltaFormats | None = None,
    workers: int | None = None,
) -> ApplyReport:
    """Build the checkpoint that a delta leads to.

    Args:
        base: the parent checkpoint.
        delta: the delta directory.
        out: the new checkpoint directory; must not exist, or be empty.
        formats: None means what the delta says of itself, else `arc_v2` with `alder32`.
        workers: threads; None means one per core, at most 8.
    Raises:
        InputError: `not_a_directory`, `output_exists`.
        SnapshotError: any reason of `arc_v2.decode_shard`; `invalid_index`, `missing_object`, `manifest_invalid`.
    """
    began = time.perf_counter()
    changed, changed_bytes = 0, 0
    with ExitStack() as stack:
        base_shards, delta_shards = open_checkpoint_shards(base, stack), open_shards(delta, stack)
        chosen = formats or detect_formats(delta) or ARC_V2_FORMATS
        partial = stack.enter_context(new_directory(out, [base, delta]))
        files = stack.enter_context(_NewFiles(base_shards, partial))
        rebuilt = iter_rebuilt(
            base_shards, delta_shards, files.write, chosen, index=read_index(delta), workers=workers, scratch=partial
        )
        seen = set()
        for tensor in rebuilt:
            seen.add(tensor.name)
            changed += tensor.is_changed
            changed_bytes += tensor.changed_bytes
        for shard in base_shards.values():
            for name in shard.tensors.keys() - seen:
                files.write(name, 0, shard.read(name))
        copy_others(base, partial)
        if chosen.is_arc_v2:
            copy_others(delta, partial)
    tensors = [entry for shard in base_shards.values() for entry in shard.tensors.values()]
    return ApplyReport(
        formats=chosen,
        tensors=len(tensors),
        changed_tensors=changed,
        full_bytes=sum(entry.nbytes for entry in tensors),
        changed_bytes=changed_bytes,
        seconds=time.perf_counter() - began,
    )
