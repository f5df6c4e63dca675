"""What is to be published: the tensors of one checkpoint by name, from a directory or from a trainer's memory.

Owns: `Checkpoint`, opening a Hugging Face directory, taking a state dictionary of numpy arrays, torch tensors or plain
byte records, and matching tied tensors to the names of a parent.

Promises: nothing is copied; tensors are views of mapped files or of the trainer's own memory. Pickled weights are never
opened. Nothing here imports torch: a torch tensor is recognised by its module.

Does not do: uploading (publisher.py), the file format (shard.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from hotloop.errors import EXIT_BAD_INPUT, SnapshotError
from hotloop.snapshots.codecs.base import TensorBytes, check_same_names, list_tensors
from hotloop.snapshots.index import Index, parse_index
from hotloop.snapshots.layout import CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, SINGLE_FILE_NAME, file_role, is_file_name
from hotloop.snapshots.shard import compute_nbytes, open_shard

DEFAULT_MAX_SHARD_BYTES = 2 * 1024**3
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_EXTRA_NAMES = ("generation_config.json", "model.weight.spec.json", "chat_template.jinja", "special_tokens_map.json")
_EXTRA_PREFIXES = ("tokenizer", "vocab", "merges", "added_tokens", "preprocessor")
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors and side files of one version of a policy."""

    tensors: Mapping[str, TensorBytes]
    """Every tensor; its `file` is the shard it will lie in."""
    extras: Mapping[str, bytes] = field(default_factory=dict)
    """Small files published beside the weights: config, tokenizer. Without the index, which is generated or kept."""
    shard_paths: Mapping[str, Path] = field(default_factory=dict)
    """Files whose bytes can be uploaded as they are; empty for a checkpoint in memory."""
    index_metadata: Mapping[str, Any] = field(default_factory=dict)
    """`metadata` of the directory's own index; empty when there is none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def shards(self) -> dict[str, dict[str, TensorBytes]]:
        """Shard name -> its tensors, both sorted by name."""
        shards: dict[str, dict[str, TensorBytes]] = {}
        for name, tensor in sorted(self.tensors.items()):
            shards.setdefault(tensor.file, {})[name] = tensor
        return dict(sorted(shards.items()))


def open_checkpoint(directory: Path | str, *, max_shard_bytes: int | None = None) -> Checkpoint:
    """Open a Hugging Face checkpoint directory: `config.json`, safetensors, tokenizer.

    Args:
        max_shard_bytes: cut the tensors into new shards of at most this size; None keeps the files as they are.

    Raises:
        SnapshotError: `checkpoint_unreadable` for a directory that is none, `unsupported_snapshot` for pickled weights,
            `invalid_index`, `malformed_shard`, `tensor_set_mismatch` between index and files.
    """
    try:
        return _read_checkpoint(Path(directory), max_shard_bytes)
    except SnapshotError as error:
        error.exit_code = EXIT_BAD_INPUT  # elsewhere these codes mean a damaged bucket; here a user named the files
        raise


def _read_checkpoint(directory: Path, max_shard_bytes: int | None) -> Checkpoint:
    if not directory.is_dir():
        raise _unreadable(directory, "is not a directory")
    files = {path.name: path for path in sorted(directory.iterdir()) if path.is_file() and is_file_name(path.name)}
    shard_paths = {name: path for name, path in files.items() if name.endswith(".safetensors")}
    if not shard_paths:
        pickled = [name for name in files if name.endswith(_PICKLED)]
        if pickled:
            raise SnapshotError(
                "unsupported_snapshot",
                f"holds pickled weights ({pickled[0]}), which can run code when they are opened",
                where=str(directory),
                do="Save the model again as safetensors.",
                exit_code=2,
            )
        raise _unreadable(directory, "holds no .safetensors file")
    index: Index | None = None
    if INDEX_NAME in files:
        index = parse_index(files[INDEX_NAME].read_bytes(), where=str(directory))
        missing = [name for name in index.files if name not in shard_paths]
        if missing:
            raise _unreadable(directory, f"lacks {missing[0]}, which its index names")
        shard_paths = {name: shard_paths[name] for name in index.files}
    elif len(shard_paths) > 1:
        raise _unreadable(directory, f"holds {len(shard_paths)} .safetensors files and no {INDEX_NAME}")
    elif SINGLE_FILE_NAME not in shard_paths:
        raise _unreadable(directory, f"its one file must be called {SINGLE_FILE_NAME}, or have an index")
    if CONFIG_NAME not in files:
        raise _unreadable(directory, f"holds no {CONFIG_NAME}")
    tensors = list_tensors(open_shard(path) for path in shard_paths.values())
    if not tensors:
        raise _unreadable(directory, "holds no tensor")
    if index is not None:
        check_same_names(index.weight_map, tensors, where=f"{directory}/{INDEX_NAME}")
        for name, file in index.weight_map.items():
            if tensors[name].file != file:
                raise _unreadable(
                    directory, f"its index places {name!r} in {file}, but it lies in {tensors[name].file}"
                )
    extras = {name: path.read_bytes() for name, path in files.items() if _is_extra(name)}
    if max_shard_bytes is None:
        return Checkpoint(tensors, extras, shard_paths, index.metadata if index is not None else {})
    return Checkpoint(_cut_into_shards(tensors, max_shard_bytes), extras)


def make_checkpoint(
    state: Mapping[str, Any],
    *,
    extras: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> Checkpoint:
    """Take a trainer's state dictionary without copying it.

    Args:
        state: name -> numpy array, torch tensor, `(dtype, shape, buffer)` with a safetensors dtype, or TensorBytes. The
            buffers must not change until `publish` has returned.
        extras: side files by name; `config.json` is what engines need.

    Raises: SnapshotError `checkpoint_unreadable` for a value that is none of these.
    """
    tensors = {name: take_tensor(name, value) for name, value in state.items()}
    for name in extras or {}:
        if not is_file_name(name) or file_role(name) in ("weights", "index") or name == MANIFEST_NAME:
            raise SnapshotError(
                "checkpoint_unreadable", f"{name[:160]!r} cannot be a side file", where="extras", exit_code=2
            )
    return Checkpoint(_cut_into_shards(tensors, max_shard_bytes), dict(extras or {}))


def take_tensor(name: str, value: Any) -> TensorBytes:
    """View one tensor's bytes.

    Raises: SnapshotError `checkpoint_unreadable`.
    """
    if isinstance(value, TensorBytes):
        return value
    if isinstance(value, tuple) and len(value) == 3:
        dtype, shape, buffer = value
        data = memoryview(buffer).cast("B")
        if compute_nbytes(dtype, shape) != data.nbytes:
            raise _bad_tensor(name, f"is {dtype} {list(shape)} but has {data.nbytes} bytes")
        return TensorBytes(dtype, tuple(shape), data)
    if type(value).__module__.split(".", 1)[0] == "torch":
        return _take_torch(name, value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.byteorder == ">":
            raise _bad_tensor(name, "is big-endian")
        return _view_array(name, array, array.dtype.name, array.shape)
    raise _bad_tensor(
        name, f"is a {type(value).__name__}; give a numpy array, a torch tensor or (dtype, shape, buffer)"
    )


def _take_torch(name: str, value: Any) -> TensorBytes:
    # Whoever passes a torch tensor has imported torch; looking it up keeps this module free of it.
    torch = sys.modules["torch"]
    tensor = value.detach()
    flat = tensor.cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    dtype = str(value.dtype).removeprefix("torch.")
    return _view_array(name, data, dtype, tuple(value.shape))


def _view_array(name: str, array: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> TensorBytes:
    if dtype not in _DTYPES:
        raise _bad_tensor(name, f"has the dtype {dtype}; known: {', '.join(sorted(_DTYPES))}")
    flat = np.ascontiguousarray(array).reshape(-1)
    data = flat.view(np.uint8).data if flat.size else memoryview(b"")
    return TensorBytes(_DTYPES[dtype], tuple(int(side) for side in shape), data)


def _bad_tensor(name: str, why: str) -> SnapshotError:
    return SnapshotError(
        "checkpoint_unreadable",
        why,
        where=f"tensor {name!r}",
        do="Convert it before publishing.",
        details={"tensor": name},
        exit_code=2,
    )


def _unreadable(directory: Path, why: str) -> SnapshotError:
    return SnapshotError(
        "checkpoint_unreadable",
        why,
        where=str(directory),
        do="Give a Hugging Face checkpoint directory: config.json, safetensors files and their index.",
        exit_code=2,
    )


def _is_extra(name: str) -> bool:
    return name == CONFIG_NAME or name in _EXTRA_NAMES or name.startswith(_EXTRA_PREFIXES)


def _cut_into_shards(tensors: Mapping[str, TensorBytes], max_shard_bytes: int) -> dict[str, TensorBytes]:
    """Assign tensors, in name order, to shards of at most max_shard_bytes (a larger tensor gets its own)."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        nbytes = tensors[name].nbytes
        if groups[-1] and size + nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    cut: dict[str, TensorBytes] = {}
    for position, names in enumerate(groups, start=1):
        file = f"model-{position:05d}-of-{len(groups):05d}.safetensors"
        for name in names:
            old = tensors[name]
            cut[name] = TensorBytes(old.dtype, old.shape, old.data, file)
    return cut


def match_tied(base: Mapping[str, TensorBytes], new: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """Bring the names of a new checkpoint to those of its base where tied tensors explain the difference.

    A name that only the new checkpoint has is dropped when it repeats the bytes of a tensor that stays; a name that
    only the base has is filled in when the base had it tied (equal bytes) to a tensor that the new one has. Tensors
    of the result lie in the base's files.

    Raises: SnapshotError `tensor_set_mismatch` for any other difference.
    """
    kept = {name: tensor for name, tensor in new.items() if name in base}
    extra = [name for name in new if name not in base]
    missing = [name for name in base if name not in new]
    unexplained_extra = [name for name in extra if not _has_twin(new[name], kept)]
    for name in missing:
        twin = _find_twin(base[name], {other: base[other] for other in kept})
        if twin is not None:
            kept[name] = new[twin]
    if unexplained_extra or len(kept) != len(base):
        expected = [*kept, *(name for name in base if name not in kept)]
        check_same_names(expected, [*kept, *unexplained_extra], where="the new checkpoint")
    return {
        name: TensorBytes(tensor.dtype, tensor.shape, tensor.data, base[name].file) for name, tensor in kept.items()
    }


def _has_twin(tensor: TensorBytes, others: Mapping[str, TensorBytes]) -> bool:
    return _find_twin(tensor, others) is not None


def _find_twin(tensor: TensorBytes, others: Mapping[str, TensorBytes]) -> str | None:
    for name, other in others.items():
        same_kind = (other.dtype, other.shape, other.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
        if same_kind and tensor.nbytes and np.array_equal(_as_array(other), _as_array(tensor)):
            return name
    return None


def _as_array(tensor: TensorBytes) -> np.ndarray[Any, Any]:
    return cast("np.ndarray[Any, Any]", np.frombuffer(tensor.data, dtype=np.uint8))
