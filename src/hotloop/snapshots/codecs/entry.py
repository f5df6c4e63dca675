"""One delta entry: from two tensors to a payload, and from a payload to a verified change; and a shard of them.

Owns: what `arc_v2` and `xor_zstd` have in common: choosing the payload form, every check on a delta entry, checksum
verification, and spreading the tensors of a shard over threads.

Promises: `decode_entries` and `rebuild_entries` make all checks that need no decompression before they return, so a
broken entry is found before work starts. Each tensor they yield was verified against the delta's checksum, and against
the manifest's Adler-32 where the caller has one.

Does not do: which tensors a shard must hold (the two formats differ in that).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs import difference, overwrite
from hotloop.snapshots.codecs.base import (
    DeltaFormats,
    EncodedShard,
    EncodedTensor,
    RebuiltTensor,
    TensorBytes,
    TensorChange,
)
from hotloop.snapshots.codecs.kernel import Bytes
from hotloop.snapshots.codecs.parallel import map_in_order
from hotloop.snapshots.codecs.sink import BufferSink, ChangeSink, Sink, WholeSink
from hotloop.snapshots.codecs.zstd_frame import FrameError, Payload, PayloadReader, walk_frames
from hotloop.snapshots.shard import Shard, ShardWriter

_MOST_EXPANSION = 1 << 15
"""A run of zeros: 4 bytes for 128 KiB."""

WriteTensor = Callable[[str, int, memoryview], None]
"""Takes a tensor's name, a position in bytes from its start, and the new bytes from there on."""
Target = WriteTensor | Mapping[str, memoryview]
"""Where new tensors go: a function, or for each name a writable buffer of its size, which spares a copy."""


def _compute_most_stored(tensor_bytes: int) -> int:
    """Return an upper bound of a payload: every byte changed, nothing compressed, zstd's and its frame's overhead."""
    most = overwrite.compute_most_bytes(tensor_bytes)
    return most + most // 128 + 1024


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """One tensor of a delta shard, checked as far as possible without its base and without decompressing."""

    name: str
    payload: memoryview
    layout: Payload
    checksum: str
    where: str
    """The delta file, for messages."""


@dataclass(frozen=True, slots=True)
class _DecodeJob:
    entry: DeltaEntry
    base: TensorBytes
    adler32: int | None
    """What the manifest says about the new tensor, where there is one."""


# ---- encode


def encode_shard_of(
    names: Sequence[str],
    base: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    out: Path,
    *,
    formats: DeltaFormats,
    level: int,
    keeps_unchanged: bool,
    workers: int | None,
    scratch: Path | None,
) -> EncodedShard:
    """Encode some tensors and write them, in the order of their names, as one delta file.

    Args:
        names: the tensors of this file.
        keeps_unchanged: whether an unchanged tensor is written as zeros or left out.
    Raises:
        SnapshotError: `checksum_unavailable`, `no_space`, `unsupported_format` (overwrite on a tensor above 4 GiB).
    """
    checksum.check_available(formats.checksum_format)
    scratch = out.parent if scratch is None else scratch
    ordered = sorted(names)
    job = partial(_encode_one, base=base, new=new, formats=formats, level=level, scratch=scratch)
    done: list[EncodedTensor] = []
    texts: dict[str, str] = {}
    widest_text = "0" * checksum.TEXT_LENGTHS[formats.checksum_format]
    with ShardWriter(
        out,
        dict.fromkeys(ordered, ("U8", None)),
        data_bytes=sum(_compute_most_stored(new[name].nbytes) for name in ordered),
        metadata_bytes=len(json.dumps(dict.fromkeys(ordered, widest_text), ensure_ascii=False).encode()),
    ) as writer:
        for name, encoded in zip(
            ordered, map_in_order(job, ordered, workers=workers, weigh=lambda name: new[name].nbytes), strict=True
        ):
            changed = encoded.changed_bytes > 0
            stored = len(encoded.payload) if changed or keeps_unchanged else 0
            nbytes = new[name].nbytes
            done.append(EncodedTensor(name, nbytes, encoded.adler32, changed, stored, encoded.changed_bytes))
            if changed or keeps_unchanged:
                writer.begin(name)
                writer.write(encoded.payload)
                writer.end()
                texts[name] = encoded.digest
            else:
                writer.omit(name)
        size = writer.finish(texts)
    return EncodedShard(out.name, size, tuple(done))


def _encode_one(
    name: str,
    *,
    base: Mapping[str, TensorBytes],
    new: Mapping[str, TensorBytes],
    formats: DeltaFormats,
    level: int,
    scratch: Path,
) -> difference.Encoded:
    encode = overwrite.encode_overwrite if formats.delta_encoding == "overwrite" else difference.encode_xor
    return encode(
        base[name].data, new[name].data, checksum_format=formats.checksum_format, level=level, scratch=scratch
    )


# ---- decode


def decode_entries(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    *,
    formats: DeltaFormats,
    expected_adler32: Mapping[str, int] | None,
    workers: int | None,
    scratch: Path | None,
) -> Iterator[TensorChange]:
    """Check all entries of a delta shard now, and yield their changes, by name, when iterated.

    Args:
        delta: its names are known to be in `base`.
        expected_adler32: per tensor from the manifest; may hold other names, too.
        scratch: directory for what does not fit the memory bound; None means the system's.
    Raises:
        SnapshotError: now `checksum_unavailable`, `checksum_missing`, `checksum_malformed`, `malformed_shard`,
            `decode_failed`, `size_mismatch`; while iterating also `checksum_mismatch` and `no_space`.
    """
    jobs = _check_entries(delta, base, formats, expected_adler32)
    return map_in_order(partial(_decode_changes, formats=formats, scratch=scratch), jobs, workers=workers, weigh=_weigh)


def rebuild_entries(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    target: Target,
    *,
    formats: DeltaFormats,
    expected_adler32: Mapping[str, int] | None,
    workers: int | None,
    scratch: Path | None,
) -> Iterator[RebuiltTensor]:
    """Check all entries of a delta shard now, and write every new tensor out when iterated; yield what was written.

    Args:
        target: a function is called from several threads; what lies in the target is verified only once the tensor
            was yielded.
    Other arguments and errors as `decode_entries`, and what the function raises.
    """
    jobs = _check_entries(delta, base, formats, expected_adler32)
    return map_in_order(
        partial(_rebuild, target=target, formats=formats, scratch=scratch), jobs, workers=workers, weigh=_weigh
    )


def _check_entries(
    delta: Shard,
    base: Mapping[str, TensorBytes],
    formats: DeltaFormats,
    expected_adler32: Mapping[str, int] | None,
) -> list[_DecodeJob]:
    checksum.check_available(formats.checksum_format)
    jobs = []
    for name in sorted(delta.tensors):
        entry = check_entry(delta, name, formats, base[name].nbytes)
        jobs.append(_DecodeJob(entry, base[name], (expected_adler32 or {}).get(name)))
    return jobs


def _weigh(job: _DecodeJob) -> int:
    return job.base.nbytes


def check_entry(delta: Shard, name: str, formats: DeltaFormats, tensor_bytes: int | None = None) -> DeltaEntry:
    """Check one entry of a delta shard without decompressing it.

    Args:
        tensor_bytes: size of the base's tensor, where it is known.
    Raises:
        SnapshotError: `malformed_shard`, `checksum_missing`, `checksum_malformed`, `decode_failed`, `size_mismatch`.
    """
    where, found = delta.name, delta.tensors[name]
    if found.dtype != "U8" or len(found.shape) != 1:
        raise SnapshotError(
            "malformed_shard",
            f"delta entry {name!r} is {found.dtype} {list(found.shape)}; it must be U8 with one dimension",
            where=where,
            do="This may be a full snapshot; give it as an anchor, not as a delta.",
            details={"tensor": name, "file": where},
        )
    text = checksum.check_text(delta.metadata.get(name), formats.checksum_format, tensor=name, where=where)
    payload = delta.read(name)
    is_xor = formats.delta_encoding == "xor"
    if tensor_bytes is None:
        most = len(payload) * _MOST_EXPANSION
    else:
        most = tensor_bytes if is_xor else overwrite.compute_most_bytes(tensor_bytes)
    try:
        layout = walk_frames(payload, most)
    except FrameError as error:
        raise _refuse_payload(name, error, where) from error
    if is_xor and tensor_bytes is not None and layout.content_bytes not in (None, tensor_bytes):
        raise difference.refuse_size(name, tensor_bytes, layout.content_bytes or 0, where)
    return DeltaEntry(name, payload, layout, text, where)


def expand_payload(entry: DeltaEntry) -> Iterator[Bytes]:
    """Yield what a payload expands to, piece by piece; the array is used again for the next piece.

    Raises:
        SnapshotError: `decode_failed`.
    """
    reader = PayloadReader(entry.payload)
    piece = np.empty(difference.PIECE_BYTES, np.uint8)
    try:
        while filled := reader.fill(piece.data):
            yield piece[:filled]
    except FrameError as error:
        raise _refuse_payload(entry.name, error, entry.where) from error


def _decode_changes(job: _DecodeJob, *, formats: DeltaFormats, scratch: Path | None) -> TensorChange:
    sink = ChangeSink(scratch)
    adler32 = _decode(job, sink, formats, scratch)
    ranges, data = sink.finish()
    return TensorChange(
        name=job.entry.name,
        file=job.base.file,
        nbytes=job.base.nbytes,
        ranges=ranges,
        data=data,
        checksum=job.entry.checksum,
        adler32=adler32,
    )


def _rebuild(job: _DecodeJob, *, target: Target, formats: DeltaFormats, scratch: Path | None) -> RebuiltTensor:
    name = job.entry.name
    sink = WholeSink(partial(target, name)) if callable(target) else BufferSink(_open_buffer(target, job))
    _decode(job, sink, formats, scratch)
    return RebuiltTensor(name=name, nbytes=job.base.nbytes, changed_bytes=sink.changed_bytes)


def _open_buffer(targets: Mapping[str, memoryview], job: _DecodeJob) -> Bytes:
    buffer = np.frombuffer(targets[job.entry.name], dtype=np.uint8)
    needed = job.base.nbytes
    if buffer.nbytes != needed or not buffer.flags.writeable:
        raise ValueError(f"{job.entry.name!r} needs a writable buffer of {needed} bytes; this one has {buffer.nbytes}")
    if np.may_share_memory(buffer, difference.view_bytes(job.base.data)):
        raise ValueError(f"the buffer of {job.entry.name!r} lies over its base, which must stay as it is")
    return buffer


def _decode(job: _DecodeJob, sink: Sink, formats: DeltaFormats, scratch: Path | None) -> int | None:
    """Decode one entry into a sink, verify it, and return the new tensor's Adler-32 where it was computed."""
    entry, base = job.entry, job.base
    hasher, adler = difference.make_hashers(formats.checksum_format, with_adler32=job.adler32 is not None)
    hashers = [hasher] if adler is None or hasher is adler else [hasher, adler]
    try:
        if formats.delta_encoding == "overwrite":
            overwrite.decode_overwrite(base.data, entry.payload, hashers, sink, entry.name, entry.where, scratch)
        elif entry.layout.is_zero and entry.layout.zero_bytes == base.nbytes:
            difference.keep_all(base.data, hashers, sink)
        else:
            found = difference.decode_xor(base.data, entry.payload, hashers, sink)
            if found is not None:
                raise difference.refuse_size(entry.name, base.nbytes, found, entry.where)
    except FrameError as error:
        raise _refuse_payload(entry.name, error, entry.where) from error
    _verify(entry, entry.checksum, hasher.hexdigest())
    if adler is not None and job.adler32 is not None:
        _verify(entry, job.adler32, adler.value)
    return None if adler is None else adler.value


def _verify(entry: DeltaEntry, expected: str | int, actual: str | int) -> None:
    if expected != actual:
        raise SnapshotError(
            "checksum_mismatch",
            f"tensor {entry.name!r} has checksum {actual} after the delta; {expected} was expected",
            where=entry.where,
            do="The base is not the delta's parent, or the file is damaged. Nothing was changed; fetch it again once, "
            "then rebuild from an anchor.",
            details={"tensor": entry.name, "expected": expected, "actual": actual},
        )


def _refuse_payload(name: str, error: FrameError, where: str) -> SnapshotError:
    return SnapshotError(
        "decode_failed",
        f"the payload of tensor {name!r} is not sound: {error}",
        where=where,
        do="Fetch the file again; if it fails again, publish the snapshot again under a new identity.",
        details={"tensor": name, "cause": str(error)},
    )
