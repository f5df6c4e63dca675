"""One safetensors file, read without trust and written as a stream.

Owns: the file format (an 8-byte little-endian length, a JSON header, then tensor bytes), every check that must hold
before a byte of it is used, zero-copy reading through a memory map, and writing without knowing sizes in advance.

Promises: `open_shard` returns only files whose header is a bounded JSON object, whose tensors lie in the file without
gap or overlap up to its last byte, and whose dtype and shape agree with their byte count; anything else is
`SnapshotError("malformed_shard")`. Tensor bytes stay bytes: no dtype is ever converted, so BF16 and FP8 need no
library that knows them. `ShardWriter` leaves either the whole file or none.

Does not do: what the bytes mean (codecs/), which files belong together (manifest, layout), or deltas.

Source: the format note of github.com/huggingface/safetensors (header length, `data_offsets`, `__metadata__`, trailing
spaces allowed after the JSON object).
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hotloop.errors import SnapshotError
from hotloop.snapshots.disk import report_full_disk

LENGTH_BYTES = 8
MIN_HEADER_BYTES = 2
MAX_HEADER_BYTES = 100 << 20
MAX_TENSOR_BITS = 1 << 66
METADATA_KEY = "__metadata__"
TEMPORARY_SUFFIX = ".partial"

# Bits, not bytes: F4 and the 6-bit floats are packed.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in its file."""

    dtype: str
    """A key of `DTYPE_BITS`."""
    shape: tuple[int, ...]
    offset: int
    """Byte position of the first data byte, counted from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The checked header of one file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    """Byte position where tensor data begins."""


def compute_nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the bytes of a tensor, or None when the dtype is unknown or its bits do not fill whole bytes."""
    total = DTYPE_BITS.get(dtype)
    if total is None:
        return None
    if 0 in shape:
        return 0
    for side in shape:
        total *= side
        if total > MAX_TENSOR_BITS:  # also keeps a hostile shape of a million sides from building a huge integer
            return None
    return total // 8 if total % 8 == 0 else None


def _refuse(where: str, why: str, **details: Any) -> NoReturn:
    raise SnapshotError(
        "malformed_shard",
        why,
        where=where,
        do="Fetch the file again; if it is still malformed, publish the snapshot again under a new identity.",
        details={"file": where, **details},
    )


def parse_header_length(prefix: bytes | memoryview, file_bytes: int, *, where: str) -> int:
    """Return the JSON header's length from the first 8 bytes.

    Args:
        prefix: at least the first 8 bytes of the file, if it has as many.
        file_bytes: size of the whole file.
        where: file name for messages.
    Raises:
        SnapshotError: `malformed_shard` when the length is out of bounds or runs past the file.
    """
    if file_bytes < LENGTH_BYTES + MIN_HEADER_BYTES:
        _refuse(where, f"the file has {file_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(bytes(prefix[:LENGTH_BYTES]), "little")
    if not MIN_HEADER_BYTES <= length <= MAX_HEADER_BYTES:
        _refuse(where, f"the header says {length} bytes; {MIN_HEADER_BYTES} to {MAX_HEADER_BYTES} are allowed")
    if LENGTH_BYTES + length > file_bytes:
        _refuse(where, f"the header says {length} bytes but the file has only {file_bytes}")
    return length


def parse_header(header: bytes | memoryview, file_bytes: int, *, where: str) -> ShardHeader:
    """Check a JSON header against the size of its file (rules of hot_load.md section 3.3).

    Args:
        header: exactly the JSON bytes, without the 8-byte length.
        file_bytes: size of the whole file.
        where: file name for messages.
    Raises:
        SnapshotError: `malformed_shard`.
    """
    parsed = _load_json_object(header, where)
    metadata = _check_metadata(parsed.pop(METADATA_KEY, None), where)
    data_start = LENGTH_BYTES + len(header)
    data_bytes = file_bytes - data_start
    tensors = {name: _check_entry(name, raw, data_start, data_bytes, where) for name, raw in parsed.items()}
    _check_cover(tensors, data_start, file_bytes, where)
    return ShardHeader(tensors=tensors, metadata=metadata, data_start=data_start)


def _load_json_object(header: bytes | memoryview, where: str) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key appears twice")
        return made

    try:
        parsed = json.loads(bytes(header).decode("utf-8"), object_pairs_hook=refuse_duplicates)
        for name in parsed if isinstance(parsed, dict) else ():
            name.encode("utf-8")  # an escaped lone surrogate is JSON, but no name
    except (ValueError, RecursionError) as error:
        _refuse(where, f"the header is not JSON: {error}")
    if not isinstance(parsed, dict):
        _refuse(where, f"the header is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _check_metadata(raw: Any, where: str) -> dict[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        _refuse(where, f"{METADATA_KEY} must map text to text")
    return raw


def _is_count(value: Any) -> bool:
    # bool is an int in Python; sizes above 2**63 cannot be file positions.
    return type(value) is int and 0 <= value < 1 << 63


def _check_entry(name: str, raw: Any, data_start: int, data_bytes: int, where: str) -> TensorEntry:
    if not isinstance(raw, dict) or not raw.keys() >= {"dtype", "shape", "data_offsets"}:
        _refuse(where, f"tensor {name!r} must have dtype, shape and data_offsets", tensor=name)
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(where, f"tensor {name!r} has the unknown dtype {dtype!r}", tensor=name)
    if not isinstance(shape, list) or not all(_is_count(side) for side in shape):
        _refuse(where, f"tensor {name!r} has a shape that is not a list of counts", tensor=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(end) for end in offsets):
        _refuse(where, f"tensor {name!r} has data_offsets that are not two counts", tensor=name)
    begin, end = offsets
    if begin > end or end > data_bytes:
        _refuse(where, f"tensor {name!r} lies at {begin}..{end} of {data_bytes} data bytes", tensor=name)
    expected = compute_nbytes(dtype, shape)
    if expected != end - begin:
        _refuse(where, f"tensor {name!r} is {dtype} {shape} but holds {end - begin} bytes", tensor=name)
    return TensorEntry(dtype=dtype, shape=tuple(shape), offset=data_start + begin, nbytes=end - begin)


def _check_cover(tensors: Mapping[str, TensorEntry], data_start: int, file_bytes: int, where: str) -> None:
    position = data_start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            kind = "overlaps the tensor before it" if entry.offset < position else "follows a gap"
            _refuse(where, f"tensor {name!r} {kind}: it starts at byte {entry.offset}, not {position}", tensor=name)
        position += entry.nbytes
    if position != file_bytes:
        _refuse(where, f"tensor data ends at byte {position} but the file at byte {file_bytes}")


class Shard:
    """A checked safetensors file in a memory map. Views stay valid after `close`; the map goes with the last one."""

    def __init__(self, path: Path, header: ShardHeader, view: memoryview) -> None:
        self.path = path
        self.tensors: dict[str, TensorEntry] = header.tensors
        self.metadata: dict[str, str] = header.metadata
        self.nbytes = len(view)
        """Size of the whole file."""
        self._view: memoryview | None = view
        self._data_start = header.data_start

    @property
    def name(self) -> str:
        """The file's name without its directory."""
        return self.path.name

    def read(self, name: str) -> memoryview:
        """Return a tensor's stored bytes as a read-only view of the file; nothing is copied.

        Raises:
            KeyError: when the shard has no such tensor.
            ValueError: when the shard was closed.
        """
        if self._view is None:
            raise ValueError(f"{self.path} is closed")
        entry = self.tensors[name]
        return self._view[entry.offset : entry.offset + entry.nbytes]

    def read_head(self) -> memoryview:
        """Return the file's bytes before its tensors as a read-only view.

        Raises:
            ValueError: when the shard was closed.
        """
        if self._view is None:
            raise ValueError(f"{self.path} is closed")
        return self._view[: self._data_start]

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        self._view = None

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_shard(path: Path | str) -> Shard:
    """Open and check one safetensors file.

    The file must not shrink while it is open: a memory map of a truncated file kills the process on access. Snapshot
    files are immutable, and the cache replaces them by rename only.

    Raises:
        SnapshotError: `malformed_shard`.
        OSError: when the file cannot be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = parse_header_length(file.read(LENGTH_BYTES), file_bytes, where=path.name)
        view = memoryview(mmap.mmap(file.fileno(), file_bytes, access=mmap.ACCESS_READ))
    header = parse_header(view[LENGTH_BYTES : LENGTH_BYTES + length], file_bytes, where=path.name)
    return Shard(path, header, view)


class ShardWriter:
    """Write a safetensors file tensor by tensor, in one pass, sizes unknown until each tensor ends.

    Room for the largest possible header is left at the front and filled with spaces, which the format allows. The
    file appears under its name only when `finish` returns, so a crash leaves at most a `.partial` file.

    ```
    with ShardWriter(path, {"a": ("U8", None)}, metadata_bytes=64) as writer:
        writer.begin("a")
        writer.write(b"...")
        writer.end()
        writer.finish({"a": "1"})
    ```
    """

    def __init__(
        self,
        path: Path | str,
        tensors: Mapping[str, tuple[str, tuple[int, ...] | None]],
        *,
        data_bytes: int = (1 << 63) - 1,
        metadata_bytes: int = 0,
        sync: bool = False,
    ) -> None:
        """Open the temporary file and leave room for its header.

        Args:
            path: final name.
            tensors: dtype and shape of each tensor that will be written; shape None means one dimension, as long as
                what is written (U8 payloads).
            data_bytes: upper bound of all tensor bytes together; only the room for its digits depends on it.
            metadata_bytes: upper bound of the JSON text of the metadata that `finish` gets.
            sync: flush to the device before the file gets its name.
        """
        self.path = Path(path)
        self._planned = dict(tensors)
        self._sync = sync
        self._written: dict[str, dict[str, Any]] = {}
        self._current: str | None = None
        self._position = 0
        self._is_done = False
        self._current_start = 0
        bound = (
            len(self._render_header(_widest(self._planned, data_bytes), {})) + metadata_bytes + len(METADATA_KEY) + 8
        )
        if bound > MAX_HEADER_BYTES:
            _refuse(self.path.name, f"its header would need {bound} bytes; {MAX_HEADER_BYTES} are allowed")
        # Data starts at a multiple of 8, as the reference writer has it, so that readers may map words.
        self._header_bytes = -(-(LENGTH_BYTES + bound) // 8) * 8 - LENGTH_BYTES
        self._temporary = self.path.with_name(self.path.name + TEMPORARY_SUFFIX)
        self._file = self._temporary.open("wb")
        self._file.seek(LENGTH_BYTES + self._header_bytes)

    def begin(self, name: str) -> None:
        """Start the next tensor, in the order in which the data shall lie in the file."""
        if self._current is not None or name in self._written or name not in self._planned:
            raise ValueError(f"cannot begin {name!r} now")
        self._current, self._current_start = name, self._position

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes to the current tensor."""
        if self._current is None:
            raise ValueError("no tensor was begun")
        with report_full_disk(self.path.parent):
            self._file.write(data)
        self._position += len(data)

    def end(self) -> int:
        """End the current tensor and return its bytes."""
        if self._current is None:
            raise ValueError("no tensor was begun")
        name, size = self._current, self._position - self._current_start
        dtype, shape = self._planned[name]
        stated = (size,) if shape is None else shape
        if compute_nbytes(dtype, stated) != size:
            raise ValueError(f"{name!r} is {dtype} {list(stated)} but {size} bytes were written")
        self._written[name] = {
            "dtype": dtype,
            "shape": list(stated),
            "data_offsets": [self._current_start, self._position],
        }
        self._current = None
        return size

    def omit(self, name: str) -> None:
        """Take back a planned tensor that shall not be written after all."""
        if name == self._current or name in self._written:
            raise ValueError(f"{name!r} is already written")
        del self._planned[name]

    def finish(self, metadata: Mapping[str, str] | None = None) -> int:
        """Write the header, give the file its name and return its size in bytes."""
        if self._current is not None or self._written.keys() != self._planned.keys():
            missing = sorted(self._planned.keys() - self._written.keys())
            raise ValueError(f"{self.path.name} is not complete: {missing[:3]}")
        text = self._render_header(self._written, metadata or {})
        if len(text) > self._header_bytes:
            raise ValueError(f"the header needs {len(text)} bytes, {self._header_bytes} were kept free")
        with report_full_disk(self.path.parent):
            self._file.seek(0)
            self._file.write(self._header_bytes.to_bytes(LENGTH_BYTES, "little"))
            self._file.write(text.ljust(self._header_bytes, b" "))
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
            self._file.close()
        os.replace(self._temporary, self.path)
        self._is_done = True
        return LENGTH_BYTES + self._header_bytes + self._position

    def abort(self) -> None:
        """Drop what was written. Safe to call twice, and after `finish` it does nothing."""
        if self._is_done:
            return
        self._is_done = True
        try:
            self._file.close()
        except OSError:
            # Closing writes what is still buffered, which a full disk refuses again; the file goes anyway.
            self._file.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    @staticmethod
    def _render_header(entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
        header: dict[str, Any] = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
        header.update(sorted(entries.items()))
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def _widest(planned: Mapping[str, tuple[str, tuple[int, ...] | None]], data_bytes: int) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "dtype": dtype,
            "shape": [data_bytes] if shape is None else list(shape),
            "data_offsets": [data_bytes, data_bytes],
        }
        for name, (dtype, shape) in planned.items()
    }
