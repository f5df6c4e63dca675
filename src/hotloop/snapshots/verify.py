"""Checking what lies in a bucket, and listing it.

Promises: a plain check reads manifests and compares sizes; a deep one reads every byte, rebuilds each snapshot along
its chain, once per step, and checks every tensor's checksum. A fault of the store raises; it never passes for a bad
snapshot.

Does not do: repairing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hotloop.errors import SnapshotError
from hotloop.snapshots.chain import Link, resolve_chain
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.materialize import Built, advance
from hotloop.snapshots.progress import OnProgress, ignore_progress
from hotloop.snapshots.reader import Incomplete, SnapshotInfo, SnapshotReader
from hotloop.snapshots.retry import call_with_retries
from hotloop.units import format_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """The result for one snapshot."""

    identity: str
    is_sound: bool
    summary: str

    def render(self) -> str:
        """One line: `ok` or `BAD`, the identity, and what was found."""
        return f"{'ok ' if self.is_sound else 'BAD'}  {self.identity}  {self.summary}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the listing."""

    identity: str
    kind: str | None
    parent: str | None
    chain_length: int | None
    policy_version: int | None
    stored_bytes: int
    is_complete: bool
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON types; `complete` for `is_complete`."""
        row = asdict(self)
        row["complete"] = row.pop("is_complete")
        return row


def find_startup(reader: SnapshotReader) -> str | None:
    """Read STARTUP_SNAPSHOT; None when there is none."""
    try:
        return reader.read_startup()
    except SnapshotError as error:
        if error.code != "startup_missing":
            raise
        return None


def list_rows(reader: SnapshotReader) -> tuple[str | None, list[Row]]:
    """List every directory of the bucket, by policy version, and what STARTUP_SNAPSHOT names."""
    found = reader.list_snapshots()
    infos = {info.identity: info for info in found if isinstance(info, SnapshotInfo)}
    rows: list[Row] = []
    for info in found:
        if isinstance(info, Incomplete):
            rows.append(Row(info.identity, None, None, None, None, 0, False, info.error.code))
            continue
        chain_length = info.manifest.chain_length if info.manifest is not None else _count_deltas(info, infos)
        rows.append(
            Row(info.identity, info.kind, info.parent, chain_length, info.policy_version, info.stored_bytes, True)
        )
    rows.sort(key=lambda row: (row.policy_version is None, row.policy_version or 0, row.identity))
    return find_startup(reader), rows


def _count_deltas(info: SnapshotInfo, infos: dict[str, SnapshotInfo]) -> int | None:
    try:
        return len(resolve_chain(info.identity, lambda name: _link(infos, name)).steps) - 1
    except SnapshotError:
        # A listing shows broken chains as a dash; verify says what is wrong with them.
        return None


def _link(infos: dict[str, SnapshotInfo], name: str) -> Link | None:
    return infos[name].link if name in infos else None


def verify_bucket(
    reader: SnapshotReader,
    *,
    identity: str | None = None,
    is_deep: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> list[Report]:
    """Check one snapshot with its chain, or all.

    Raises: SnapshotError `storage_*`, and `snapshot_incomplete` and its like for a named snapshot that is not there.
    """
    if identity is not None:
        found: Sequence[SnapshotInfo | Incomplete] = [reader.describe(identity)]
    else:
        found = reader.list_snapshots()
    infos = [info for info in found if isinstance(info, SnapshotInfo)]
    reports = [
        Report(info.identity, False, f"not complete: {info.error.why} [{info.error.code}]")
        for info in found
        if isinstance(info, Incomplete)
    ]
    # Along a chain each step is checked on the one before it, so that nothing is rebuilt twice.
    infos.sort(key=lambda info: (info.policy_version or 0, info.identity))
    fetcher = MemoryFetcher(reader.bucket, retry=reader.retry)
    built: Built | None = None
    for info in infos:
        try:
            _check_sizes(reader, info)
            if is_deep:
                built = advance(info.identity, reader, fetcher, built=built, on_progress=on_progress)
            else:
                resolve_chain(info.identity, lambda name: _find(reader, name))
        except SnapshotError as error:
            if error.code.startswith("storage_"):
                raise
            reports.append(Report(info.identity, False, f"{error.why} [{error.code}]"))
            continue
        reports.append(Report(info.identity, True, _describe(info, is_deep)))
    return sorted(reports, key=lambda report: report.identity)


def _find(reader: SnapshotReader, name: str) -> Link | None:
    info = reader.find(name)
    return info.link if info is not None else None


def _check_sizes(reader: SnapshotReader, info: SnapshotInfo) -> None:
    """Compare what the store holds with the manifest: presence and size, and SHA-256 where the store notes it.

    Raises: SnapshotError `missing_object`, `object_corrupt`.
    """
    for file in info.files.values():
        found = call_with_retries(reader.retry, partial(reader.bucket.head, file.key))
        if found.size != file.size or (None not in (found.sha256, file.sha256) and found.sha256 != file.sha256):
            raise SnapshotError(
                "object_corrupt",
                f"{file.name} has {found.size} bytes, {file.size} were expected"
                if found.size != file.size
                else f"{file.name} has another SHA-256 than its manifest says",
                where=f"{reader.bucket.url}/{file.key}",
                do="Publish the snapshot again under a new identity.",
                details={"key": file.key, "identity": info.identity},
            )


def _describe(info: SnapshotInfo, is_deep: bool) -> str:
    parts = [info.kind if info.parent is None else f"{info.kind} of {info.parent}"]
    parts.append(f"policy_version={info.policy_version}")
    parts.append(format_bytes(info.stored_bytes))
    if info.manifest is not None:
        checked = "checked" if is_deep else "listed"
        parts.append(f"{len(info.manifest.tensors)} tensors {checked}")
    parts.append(f"digest {info.digest[:12]}")
    return ", ".join(parts)
