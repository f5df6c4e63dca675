"""A checkpoint or delta directory on disk: its shards, its index, and new ones made in one step.

Owns: opening every safetensors file of a directory, reading its index, saying in which format a delta directory is
stored, and `new_directory`, which makes a directory appear complete or not at all.
Promises: nothing but plain files directly in the directory is read; an index can name nothing else.
Does not do: encode or apply (offline), or buckets.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hotloop.errors import EXIT_BAD_INPUT, InputError, SnapshotError
from hotloop.snapshots.codecs import xor_zstd
from hotloop.snapshots.codecs.base import DeltaFormats, check_same_names, parse_formats
from hotloop.snapshots.disk import report_full_disk
from hotloop.snapshots.shard import Shard, open_shard

INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "snapshot.json"
SHARD_SUFFIX = ".safetensors"
MAX_INDEX_BYTES = 256 << 20


def open_shards(directory: Path, stack: ExitStack) -> dict[str, Shard]:
    """Open every safetensors file of a directory, by file name; the stack closes them.

    Raises:
        SnapshotError: `malformed_shard`.
        InputError: `not_a_directory`.
    """
    _check_directory(directory)
    paths = sorted(path for path in directory.iterdir() if path.suffix == SHARD_SUFFIX and path.is_file())
    return {path.name: stack.enter_context(open_shard(path)) for path in paths}


def open_checkpoint_shards(directory: Path, stack: ExitStack) -> dict[str, Shard]:
    """Open every safetensors file of a full checkpoint, which must be all that its index names.

    Raises:
        SnapshotError: as `open_shards`, `check_has_weights` and `check_weight_map`.
        InputError: `not_a_directory`.
    """
    shards = open_shards(directory, stack)
    check_has_weights(shards, directory)
    index = read_index(directory)
    if index is not None and isinstance(index.get("weight_map"), dict):
        check_weight_map(index["weight_map"], shards, where=str(directory / INDEX_NAME))
    return shards


def check_has_weights(shards: Mapping[str, Shard], directory: Path) -> None:
    """Refuse a directory without a safetensors file.

    Raises:
        SnapshotError: `missing_object`.
    """
    if not shards:
        raise SnapshotError(
            "missing_object",
            "there is no safetensors file",
            where=str(directory),
            do="Name a checkpoint directory. Pickled weights are not read.",
            details={"key": f"*{SHARD_SUFFIX}"},
            exit_code=EXIT_BAD_INPUT,
        )


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise InputError(
            "not_a_directory", "there is no such directory", where=str(directory), do="Name an existing directory."
        )


def read_index(directory: Path) -> dict[str, Any] | None:
    """Read a directory's index; None when it has none.

    Raises:
        SnapshotError: `invalid_index`.
    """
    return _read_object(directory / INDEX_NAME, "invalid_index")


def _read_object(path: Path, code: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    why = ""
    if path.stat().st_size > MAX_INDEX_BYTES:
        why = f"it is larger than {MAX_INDEX_BYTES} bytes"
    else:
        try:
            parsed = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            why = f"it is not JSON: {error}"
        else:
            if isinstance(parsed, dict):
                return parsed
            why = "it is not a JSON object"
    raise SnapshotError(
        code, why, where=path.name, do="Fetch or publish the snapshot again.", details={"file": path.name}
    )


def detect_formats(directory: Path) -> DeltaFormats | None:
    """Say how a delta directory is stored: its manifest, else its index, else None.

    Raises:
        SnapshotError: `manifest_invalid`, `invalid_index`, `unsupported_format`, `unsupported_checksum`.
    """
    manifest = _read_object(directory / MANIFEST_NAME, "manifest_invalid")
    if manifest is not None and isinstance(manifest.get("formats"), dict) and manifest.get("kind") == "delta":
        named = manifest["formats"]
        return parse_formats(
            named.get("compression_format"),
            named.get("checksum_format"),
            named.get("delta_encoding"),
            where=MANIFEST_NAME,
        )
    index = read_index(directory)
    if index is not None and xor_zstd.is_delta_index(index):
        return xor_zstd.parse_index(index, where=INDEX_NAME).formats
    return None


@contextmanager
def new_directory(out: Path, inputs: Sequence[Path]) -> Iterator[Path]:
    """Yield an empty hidden directory that becomes `out` when the block ends well, and goes when it does not."""
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("output_exists", "the output exists and is not empty", where=str(out), do="Name a new one.")
    if any(out.resolve() == path.resolve() for path in inputs):
        raise InputError("output_exists", "the output is one of the inputs", where=str(out), do="Name a new one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.partial-"
    for left_over in out.parent.iterdir():
        owner = left_over.name.removeprefix(prefix).partition("-")[0]
        if left_over.name.startswith(prefix) and owner.isdecimal() and not _is_running(int(owner)):
            shutil.rmtree(left_over)
    partial = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=out.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes it private; a checkpoint is as readable as any other output
        yield partial
        if out.exists():
            out.rmdir()  # it is empty; not every system replaces a directory
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_running(pid: int) -> bool:
    """Whether a process with this number may be alive. Only POSIX systems can tell without touching it."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's process
    return True


def copy_others(source: Path, target: Path, *, only: set[str] | None = None) -> None:
    """Copy the plain files of a directory that are not weights, over those already there."""
    for path in sorted(source.iterdir()):
        wanted = path.name in only if only is not None else path.name != MANIFEST_NAME
        if wanted and path.is_file() and path.suffix != SHARD_SUFFIX:
            with report_full_disk(target):
                shutil.copyfile(path, target / path.name)


def check_weight_map(weight_map: Mapping[str, Any], shards: Mapping[str, Shard], *, where: str = INDEX_NAME) -> None:
    """Check that an index names exactly the tensors that the shards hold, and only files beside it.

    Raises:
        SnapshotError: `invalid_index`, `missing_object`, `tensor_set_mismatch`.
    """
    for name, file in weight_map.items():
        is_plain = isinstance(file, str) and not any(part in file for part in ("/", "\\", "\0", ".."))
        if not is_plain or not file.endswith(SHARD_SUFFIX):
            raise SnapshotError(
                "invalid_index",
                f"weight_map names {file!r} for tensor {name!r}; it must be a safetensors file beside the index",
                where=where,
                do="Publish the snapshot again with plain file names.",
                details={"tensor": name, "file": file},
            )
    missing = sorted(set(weight_map.values()) - shards.keys())
    if missing:
        raise SnapshotError(
            "missing_object",
            f"the index names {len(missing)} files that are not there, first {missing[0]}",
            where=where,
            do="Fetch or publish the snapshot again.",
            details={"key": missing[0]},
        )
    held = {name: shard.name for shard in shards.values() for name in shard.tensors}
    check_same_names(weight_map, held, where=where)
