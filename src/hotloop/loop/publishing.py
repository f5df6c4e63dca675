"""A run's policy versions into a bucket: where it is, what goes beside the weights, and which version is free.

Owns: `RunPublisher`.

Promises: a policy version is never used twice in a bucket, not even by a resumed run. A killed run may have published
beyond its checkpoint, so a resumed one starts above everything that the bucket holds an object for, complete or not,
and with an anchor.
Does not do: formats and order of a publish (snapshots/publisher.py), when to push (controller.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.loop.weight_sync import Pushed
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.layout import parse_trailing_version
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher

_SIDE_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_NOT_FOR_SERVING = ("policy.json", "model.safetensors.index.json")


class RunPublisher:
    """Publishes the versions of one run, one after the other."""

    def __init__(self, address: str, policy_dir: Path, *, full_every: int) -> None:
        """Open the bucket; a plain path means a folder, which is made.

        Raises:
            SnapshotError: `invalid_bucket_url`, `storage_access`, `storage_unavailable`.
        """
        self._bucket = open_bucket(make_bucket_url(address))
        self._publisher = Publisher(self._bucket, PublishSettings(full_every=full_every))
        self._extras = read_side_files(policy_dir)

    def next_version(self, stored: int) -> int:
        """Return the first version that a resumed run may use: above its own and above all the bucket has seen."""
        seen = [parse_trailing_version(name) for name in self._bucket.list_directories()]
        return 1 + max([stored, *(version for version in seen if version is not None)])

    def publish(self, tensors: Mapping[str, Any], identity: str, policy_version: int, as_anchor: bool) -> Pushed:
        """Publish one version and return what it cost.

        Raises:
            SnapshotError: whatever `Publisher.publish` raises.
        """
        published = self._publisher.publish(
            tensors, identity, policy_version, kind="anchor" if as_anchor else "auto", extras=self._extras
        )
        return Pushed(published.identity, published.kind, published.stored_bytes, published.changed_frac)


def make_bucket_url(address: str) -> str:
    """Turn a plain path into a file URL and make the folder; a URL stays as it is."""
    if "://" in address:
        return address
    folder = Path(address).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder.as_uri()


def read_side_files(policy_dir: Path) -> dict[str, bytes]:
    """Read what an engine needs beside the weights: configuration, tokenizer, chat template."""
    return {
        path.name: path.read_bytes()
        for path in sorted(policy_dir.iterdir())
        if path.is_file() and path.suffix in _SIDE_FILE_SUFFIXES and path.name not in _NOT_FOR_SERVING
    }
