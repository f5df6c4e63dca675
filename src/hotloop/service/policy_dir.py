"""The directory that an engine is opened from: config, tokenizer and weights of a staged snapshot.

Owns: `<state>/policy/`: the small files of the snapshot and one `model.safetensors`.
Promises: written beside and renamed, so that it is whole or absent. Bytes are the snapshot's, whatever the dtype.
Does not do: the host copy that deltas are applied to (snapshots/mirror.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hotloop.models.tokenizer import Tokenizer, open_tokenizer
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.fetch import Fetcher
from hotloop.snapshots.materialize import StagedSnapshot
from hotloop.snapshots.shard import ShardWriter

WEIGHTS_NAME = "model.safetensors"
_SHOWN_AS = "the deployment's tokenizer"
"""What errors of a request call it: where it lies on the server is no client's business."""


def fetch_small_files(staged: StagedSnapshot, fetcher: Fetcher) -> dict[str, bytes]:
    """Return the config and tokenizer files of a chain, the newest of each name."""
    found: dict[str, bytes] = {}
    for file in staged.files:
        if file.role in ("config", "other") and not file.name.endswith(".safetensors"):
            found[file.name] = bytes(fetcher.fetch(file))
    return found


def write_policy_dir(root: Path, small_files: Mapping[str, bytes], tensors: Mapping[str, TensorBytes]) -> Path:
    """Write `<root>/policy`; small files of an earlier one are kept where no new one has their name."""
    final, fresh = root / "policy", root / "policy.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    if final.exists():
        for path in final.iterdir():
            if path.name != WEIGHTS_NAME:
                shutil.copyfile(path, fresh / path.name)
    for name, data in small_files.items():
        (fresh / name).write_bytes(data)
    planned = {name: (tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())}
    with ShardWriter(fresh / WEIGHTS_NAME, planned) as writer:
        for name in planned:
            writer.begin(name)
            writer.write(tensors[name].data)
            writer.end()
        writer.finish({"format": "pt"})
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)
    return final


def open_policy_tokenizer(policy_dir: Path, override_dir: str) -> Tokenizer | None:
    """Open the snapshot's tokenizer, or the configured one; None when there is neither: token ids only."""
    if override_dir:
        return open_tokenizer(override_dir, where=_SHOWN_AS)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if any((policy_dir / name).exists() for name in names):
        return open_tokenizer(policy_dir, where=_SHOWN_AS)
    return None
