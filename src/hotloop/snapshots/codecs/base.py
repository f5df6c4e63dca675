"""What every delta format speaks: tensors as bytes, a format's names, changes as absolute values.

Owns: `TensorBytes` (one tensor's stored bytes, from a file or from a trainer's memory), `DeltaFormats` (the three
names of a delta format, checked in one place), `EncodedTensor` and `TensorChange` (what encoding and decoding yield),
and the errors that both formats raise.

Promises: a `TensorChange` is verified before anybody sees it, and holds absolute new bytes, never a difference, so
that applying it twice does no harm. Nothing here needs torch.

Does not do: the formats themselves (`arc_v2`, `xor_zstd`), or where the files lie.

    base tensors --+                         base tensors --+
                   +-> encode_shard -> file                 +-> decode_shard -> TensorChange, TensorChange, ...
    new tensors  --+                         delta shard  --+      (verified)        |
                                                                                     +-> write_into(buffer)
                                                           +-> rebuild_shard -> RebuiltTensor, ...
                                                                  +-> write(name, position, new bytes), or buffers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum
from hotloop.snapshots.codecs.kernel import WORD_BYTES
from hotloop.snapshots.shard import Shard

ARC_V2 = "arc_v2"
ZSTD = "zstd"
_ARC_V2_ALIASES = frozenset({"arc_v2", "xor_one_to_one_zstd"})
_SLIME_ENCODINGS = ("xor", "overwrite")
_SUPPORTED = ("arc_v2", "zstd with delta_encoding xor or overwrite")
# Scattering through an index array costs 8 bytes of index per byte; batches keep that small.
_SCATTER_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor as a codec sees it: bytes with a label."""

    dtype: str
    """The safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    data: memoryview
    """The stored bytes, little-endian, C order: one dimension, format `B`."""
    file: str = ""
    """Name of the file it lies in; empty when it comes from memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.data.nbytes


def list_tensors(shards: Iterable[Shard]) -> dict[str, TensorBytes]:
    """Return every tensor of some shards by name; nothing is copied.

    Raises:
        SnapshotError: `tensor_set_mismatch` when two shards hold the same name.
    """
    tensors: dict[str, TensorBytes] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if name in tensors:
                raise SnapshotError(
                    "tensor_set_mismatch",
                    f"tensor {name!r} lies in {tensors[name].file} and in {shard.name}",
                    where=shard.name,
                    do="A checkpoint must hold each tensor once.",
                    details={"tensor": name, "files": [tensors[name].file, shard.name]},
                )
            tensors[name] = TensorBytes(entry.dtype, entry.shape, shard.read(name), shard.name)
    return tensors


@dataclass(frozen=True, slots=True)
class DeltaFormats:
    """The names that say how a delta is stored; spelt as in `snapshot.json` and in a slime index."""

    compression_format: str
    """`arc_v2` or `zstd`."""
    checksum_format: str
    """`alder32` (decimal text), `adler32`, `xxh3-128` or `blake3` (hex text)."""
    delta_encoding: str
    """`xor` or `overwrite`."""

    @property
    def is_arc_v2(self) -> bool:
        """Whether shards mirror the base's files (arc_v2) rather than being numbered by the writer (slime)."""
        return self.compression_format == ARC_V2


ARC_V2_FORMATS = DeltaFormats(ARC_V2, "alder32", "xor")
SLIME_FORMATS = DeltaFormats(ZSTD, "xxh3-128", "xor")


def parse_formats(
    compression_format: Any, checksum_format: Any = None, delta_encoding: Any = None, *, where: str = ""
) -> DeltaFormats:
    """Turn the names that a manifest, an index or a request gives into a supported format.

    Args:
        compression_format: `arc_v2` (any case, or its alias `xor_one_to_one_zstd`) or `zstd`.
        checksum_format: None means the format's own default.
        delta_encoding: None means `xor`.
        where: what named the format, for messages.
    Raises:
        SnapshotError: `unsupported_format` or `unsupported_checksum`, with the supported list in `details`.
    """
    name = compression_format.lower() if isinstance(compression_format, str) else ""
    encoding = "xor" if delta_encoding is None else delta_encoding
    encoding = encoding.lower() if isinstance(encoding, str) else encoding
    if name in _ARC_V2_ALIASES and encoding == "xor":
        default, name = "alder32", ARC_V2
    elif name == ZSTD and encoding in _SLIME_ENCODINGS:
        default = "xxh3-128"
    else:
        raise SnapshotError(
            "unsupported_format",
            f"compression_format {compression_format!r} with delta_encoding {encoding!r} is not supported",
            where=where,
            do=f"Supported: {'; '.join(_SUPPORTED)}.",
            details={
                "compression_format": compression_format,
                "delta_encoding": encoding,
                "supported": list(_SUPPORTED),
            },
        )
    chosen = default if checksum_format is None else checksum_format
    chosen = chosen.lower() if isinstance(chosen, str) else chosen
    if chosen not in checksum.FORMATS:
        raise SnapshotError(
            "unsupported_checksum",
            f"checksum_format {checksum_format!r} is not supported",
            where=where,
            do=f"Supported: {', '.join(checksum.FORMATS)}.",
            details={"checksum_format": checksum_format, "supported": list(checksum.FORMATS)},
        )
    return DeltaFormats(name, chosen, encoding)


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """What encoding one tensor found out; enough for a manifest's `tensors` entry."""

    name: str
    nbytes: int
    adler32: int
    """Of the new tensor's bytes; 1 for an empty tensor."""
    changed: bool
    stored_bytes: int
    """Bytes of its payload in the delta; 0 when left out."""
    changed_bytes: int
    """How many of its bytes differ from the base."""


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """What `encode_shard` wrote."""

    file: str
    nbytes: int
    """Size of the written file."""
    tensors: tuple[EncodedTensor, ...]
    """Every tensor that was compared, those left out of the file included; sorted by name."""


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The verified difference of one tensor from its base, as absolute values."""

    name: str
    file: str
    """The base file that holds the tensor."""
    nbytes: int
    """Bytes of the whole tensor."""
    ranges: npt.NDArray[np.int64]
    """[R, 2] begin and end of each changed range, bytes from the tensor's start; rising, never overlapping or empty.
    Ranges may touch, and may hold a few bytes that did not change."""
    data: memoryview
    """The new bytes of all ranges, one after the other."""
    checksum: str
    """The text that was verified, in the delta's checksum format; empty when the delta left the tensor out."""
    adler32: int | None
    """Of the whole new tensor, where it was computed: always for Adler formats, else only when it was asked for."""

    @property
    def is_changed(self) -> bool:
        """Whether any byte differs."""
        return len(self.ranges) > 0

    def write_into(self, target: memoryview | bytearray | npt.NDArray[np.uint8]) -> None:
        """Write the new bytes into a buffer that holds (or will hold) the whole tensor.

        Args:
            target: writable, `nbytes` long.
        """
        whole = np.frombuffer(target, dtype=np.uint8)
        if whole.nbytes != self.nbytes:
            raise ValueError(f"{self.name!r} has {self.nbytes} bytes, the buffer {whole.nbytes}")
        new = np.frombuffer(self.data, dtype=np.uint8)
        lengths = self.ranges[:, 1] - self.ranges[:, 0]
        first = 0
        for begin, end in _split_ranges(lengths):
            count = int(lengths[begin:end].sum())
            _scatter(whole, self.ranges[begin:end], new[first : first + count])
            first += count


@dataclass(frozen=True, slots=True)
class RebuiltTensor:
    """A new tensor that was written out as a whole, and verified."""

    name: str
    nbytes: int
    changed_bytes: int
    """How many of its bytes differ from the base."""

    @property
    def is_changed(self) -> bool:
        """Whether any byte differs."""
        return self.changed_bytes > 0


def _split_ranges(lengths: npt.NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Cut a list of ranges into batches that cover at most `_SCATTER_BATCH_BYTES`, or one range each."""
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(lengths):
        limit = (int(ends[begin - 1]) if begin else 0) + _SCATTER_BATCH_BYTES
        end = max(begin + 1, int(np.searchsorted(ends, limit, side="right")))
        yield begin, end
        begin = end


def _scatter(whole: npt.NDArray[np.uint8], ranges: npt.NDArray[np.int64], new: npt.NDArray[np.uint8]) -> None:
    if len(ranges) == 1:
        whole[ranges[0, 0] : ranges[0, 1]] = new
        return
    if (ranges % WORD_BYTES).any():
        whole[_expand(ranges)] = new
        return
    words = whole[: whole.nbytes // WORD_BYTES * WORD_BYTES].view(np.uint64)
    indexes = ranges // WORD_BYTES
    are_single = len(ranges) * WORD_BYTES == new.nbytes
    words[indexes[:, 0] if are_single else _expand(indexes)] = new.view(np.uint64)


def _expand(ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return every position that some ranges cover."""
    lengths = ranges[:, 1] - ranges[:, 0]
    shift = ranges[:, 0] - (np.cumsum(lengths) - lengths)
    positions: npt.NDArray[np.int64] = np.arange(int(lengths.sum()), dtype=np.int64)
    positions += np.repeat(shift, lengths)
    return positions


def check_same_layout(base: Mapping[str, TensorBytes], new: Mapping[str, TensorBytes], *, where: str) -> None:
    """Check that a new checkpoint has the tensors of its base, byte for byte in layout.

    Raises:
        SnapshotError: `tensor_set_mismatch` or `layout_changed`.
    """
    check_same_names(base, new, where=where)
    for name, old in base.items():
        if (old.dtype, old.shape) != (new[name].dtype, new[name].shape):
            raise SnapshotError(
                "layout_changed",
                f"tensor {name!r} was {old.dtype} {list(old.shape)} "
                f"and is now {new[name].dtype} {list(new[name].shape)}",
                where=where,
                do="Publish the new checkpoint as an anchor.",
                details={"tensor": name},
            )


def check_same_names(expected: Iterable[str], found: Iterable[str], *, where: str) -> None:
    """Check that two sets of tensor names are equal.

    Raises:
        SnapshotError: `tensor_set_mismatch` with the names in `details`.
    """
    expected, found = set(expected), set(found)
    if expected == found:
        return
    missing, extra = sorted(expected - found), sorted(found - expected)
    parts = [
        f"{len(names)} {kind}, first {names[0]!r}" for kind, names in (("missing", missing), ("extra", extra)) if names
    ]
    raise SnapshotError(
        "tensor_set_mismatch",
        f"the tensors differ from the base's: {'; '.join(parts)}",
        where=where,
        do="A delta keeps the tensor names of its base. Publish an anchor if the model changed.",
        details={"missing": missing[:20], "extra": extra[:20]},
    )
