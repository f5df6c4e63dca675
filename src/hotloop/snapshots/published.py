"""What the bucket already holds, as a publisher needs it: which parent, which versions are taken.

Owns: the catalogue of complete snapshots, read once and then only for what is new.

Promises: a policy version is used once in a bucket; the newest snapshot is the one with the highest policy version.

Does not do: describing a snapshot (reader.py), writing (publisher.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hotloop.errors import SnapshotError
from hotloop.snapshots.chain import Link, resolve_chain
from hotloop.snapshots.reader import SnapshotInfo, SnapshotReader


@dataclass(frozen=True, slots=True)
class Known:
    """One complete snapshot of the bucket."""

    link: Link
    anchor: str
    chain_length: int
    stored_bytes: int
    has_manifest: bool


class Catalogue:
    """The complete snapshots of one bucket."""

    def __init__(self, reader: SnapshotReader, *, workers: int = 8) -> None:
        """Start empty; nothing is read yet."""
        self._reader = reader
        self._workers = workers
        self._known: dict[str, Known] = {}

    def refresh(self) -> dict[str, Known]:
        """Read what is new in the bucket; foreign directories are read each time, because they can change."""
        identities = self._reader.list_identities()
        self._known = {name: known for name, known in self._known.items() if name in identities and known.has_manifest}
        unknown = [name for name in identities if name not in self._known]
        with ThreadPoolExecutor(self._workers) as pool:
            infos = [info for info in pool.map(self._describe, unknown) if info is not None]
        found = {info.identity: info for info in infos}
        for info in infos:
            anchor, chain_length = self._find_anchor(info, found)
            self._known[info.identity] = Known(
                info.link, anchor, chain_length, info.stored_bytes, info.manifest is not None
            )
        return dict(self._known)

    def add(self, known: Known) -> None:
        """Note a snapshot that this process has just published."""
        self._known[known.link.identity] = known

    def find_newest(self, *, but: str = "") -> Known | None:
        """Return the snapshot with the highest policy version; None in an empty bucket."""
        candidates = [
            known
            for known in self._known.values()
            if known.link.policy_version is not None and known.link.identity != but and known.anchor
        ]
        return max(candidates, key=lambda known: known.link.policy_version or 0, default=None)

    def check_version_free(self, identity: str, policy_version: int) -> None:
        """Refuse a policy version that another snapshot has.

        Raises: SnapshotError `policy_version_taken`.
        """
        for known in self._known.values():
            if known.link.policy_version == policy_version and known.link.identity != identity:
                raise SnapshotError(
                    "policy_version_taken",
                    f"policy version {policy_version} is already that of {known.link.identity}",
                    where=f"snapshot {identity}",
                    do="Give a higher one; a version is used once in a bucket, also by a resumed run.",
                    details={"identity": identity, "taken_by": known.link.identity, "policy_version": policy_version},
                    exit_code=2,
                )

    def _describe(self, identity: str) -> SnapshotInfo | None:
        try:
            return self._reader.describe(identity)
        except SnapshotError as error:
            # A directory that is no usable snapshot is nobody's parent; a fault of the store must not pass for one.
            if error.code.startswith("storage_"):
                raise
            return None

    def _find_anchor(self, info: SnapshotInfo, found: dict[str, SnapshotInfo]) -> tuple[str, int]:
        """Return anchor and number of deltas; an empty anchor when the chain is broken."""
        if info.manifest is not None:
            return info.manifest.anchor, info.manifest.chain_length

        def find(name: str) -> Link | None:
            if name in self._known:
                return self._known[name].link
            return found[name].link if name in found else None

        try:
            steps = resolve_chain(info.identity, find).steps
        except SnapshotError:
            return "", 0
        return steps[0].identity, len(steps) - 1
