"""Turning a checkpoint into the objects of an anchor: shard payloads, index and tensor entries.

Promises: shards of a checkpoint in memory are streamed as header and buffers, never gathered; those of a directory are
uploaded byte for byte. Each tensor's Adler-32 is of its stored bytes.

Does not do: uploading (publisher.py).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hotloop.snapshots import checksum
from hotloop.snapshots.bucket import Chunk
from hotloop.snapshots.checkpoint import Checkpoint
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.index import render_index
from hotloop.snapshots.manifest import TensorEntry
from hotloop.snapshots.upload import Payload, split


def make_shard_payload(checkpoint: Checkpoint, shard: str) -> Payload:
    """Hash one shard of an anchor and say how to read it."""
    path = checkpoint.shard_paths.get(shard)
    if path is not None:
        return Payload.of_pieces(lambda: _read_file(path))
    tensors = checkpoint.shards[shard]
    return Payload.of_pieces(lambda: render_shard(tensors))


def render_shard(tensors: Mapping[str, TensorBytes]) -> Iterable[Chunk]:
    """Yield a safetensors file: header, then each tensor in name order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in sorted(tensors.items()):
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Data starts at a multiple of 8 so that readers may map words.
    text = text.ljust(-(-len(text) // 8) * 8, b" ")
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in sorted(tensors.items()):
        yield from split(tensor.data)


def _read_file(path: Path) -> Iterable[Chunk]:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    yield from split(view)


def describe_tensors(
    tensors: Mapping[str, TensorBytes], *, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> dict[str, TensorEntry]:
    """Compute the manifest entries of an anchor's tensors; all count as changed."""
    entries: dict[str, TensorEntry] = {}
    for name, tensor in tensors.items():
        entries[name] = TensorEntry(
            tensor.file, tensor.dtype, tensor.shape, tensor.nbytes, compute_adler32(tensor), changed=True
        )
        on_bytes(tensor.nbytes)
    return entries


def compute_adler32(tensor: TensorBytes) -> int:
    """Compute the Adler-32 of a tensor's stored bytes; 1 for an empty one."""
    value = checksum.EMPTY_ADLER32
    for piece in split(tensor.data, chunk_bytes=1024**2):
        value = checksum.adler32(piece, value)
    return value


def make_index(checkpoint: Checkpoint) -> bytes:
    """Generate the index; the metadata of the directory's own index is kept."""
    weight_map = {name: tensor.file for name, tensor in checkpoint.tensors.items()}
    return render_index(weight_map, checkpoint.index_metadata or {"total_size": checkpoint.nbytes})
