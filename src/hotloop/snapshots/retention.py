"""Which snapshots may be deleted. Pure; the deletion itself is one function at the end.

Promises: a plan keeps the startup snapshot, everything protected, the last N anchors, every delta after the oldest kept
anchor, and every ancestor of a kept snapshot. A snapshot disappears manifest first, so that no reader ever sees one
that is complete but lacks files.

Does not do: deciding when to prune; nothing in the serving path deletes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket import Bucket
from hotloop.snapshots.chain import Link
from hotloop.snapshots.layout import MANIFEST_NAME, snapshot_key
from hotloop.snapshots.retry import RetryPolicy, call_with_retries


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune keeps and deletes."""

    delete: tuple[str, ...]
    """Identities, lowest policy version first."""
    keep: Mapping[str, str]
    """Identity -> why it is kept."""


def plan_prune(
    links: Sequence[Link],
    *,
    keep_anchors: int,
    keep_from: str | None = None,
    startup: str | None = None,
    protected: Iterable[str] = (),
) -> PrunePlan:
    """Choose what to delete.

    Args:
        links: the complete snapshots of the bucket; incomplete directories are never touched.
        keep_anchors: how many of the newest anchors stay; at least 1.
        keep_from: keep this identity and everything with a higher policy version.
        startup: what STARTUP_SNAPSHOT names.
        protected: identities that stay.

    Raises: SnapshotError `prune_refused` for `keep_anchors` below 1 or an unknown identity.
    """
    by_name = {link.identity: link for link in links}
    if keep_anchors < 1:
        raise _refuse(f"keep-anchors is {keep_anchors}; at least one anchor must stay")
    for name in [*protected, *([keep_from] if keep_from else [])]:
        if name not in by_name:
            raise _refuse(f"{name} is not a complete snapshot of the bucket")
    keep: dict[str, str] = {}
    if startup is not None:
        keep[startup] = "named by STARTUP_SNAPSHOT"
    for name in protected:
        keep.setdefault(name, "protected")
    anchors = sorted((link for link in links if link.kind == "anchor"), key=_order)
    kept_anchors = anchors[-keep_anchors:]
    for link in kept_anchors:
        keep.setdefault(link.identity, f"one of the last {keep_anchors} anchors")
    if kept_anchors:
        oldest = kept_anchors[0]
        for link in links:
            if link.kind == "delta" and _order(link) > _order(oldest):
                keep.setdefault(link.identity, f"delta after {oldest.identity}")
    else:
        # Without any anchor nothing can be told to be superseded.
        for link in links:
            keep.setdefault(link.identity, "no anchor in the bucket")
    if keep_from is not None:
        for link in links:
            if _order(link) >= _order(by_name[keep_from]):
                keep.setdefault(link.identity, f"from {keep_from} on")
    for name in list(keep):
        parent = by_name[name].parent if name in by_name else None
        child = name
        while parent is not None and parent in by_name and parent not in keep:
            keep[parent] = f"ancestor of {child}"
            child, parent = parent, by_name[parent].parent
    delete = [link.identity for link in sorted(links, key=_order) if link.identity not in keep]
    return PrunePlan(tuple(delete), {name: why for name, why in keep.items() if name in by_name})


def _order(link: Link) -> tuple[int, str]:
    # A foreign directory without a version counts as newest, so that it is not deleted by mistake.
    return (link.policy_version if link.policy_version is not None else 2**63, link.identity)


def _refuse(why: str) -> SnapshotError:
    return SnapshotError(
        "prune_refused", why, where="prune", do="See what is there with: hotloop publish list", exit_code=2
    )


def delete_snapshots(bucket: Bucket, identities: Sequence[str], *, retry: RetryPolicy) -> int:
    """Delete snapshots, last given first, each manifest before its files.

    A plan lists a parent before its deltas, so that a prune that is cut short leaves no delta without its parent.

    Returns: the number of deleted objects.

    Raises: SnapshotError `storage_*`; what was deleted until then stays deleted, and a second call goes on.
    """
    deleted = 0
    for identity in reversed(identities):
        manifest = snapshot_key(identity, MANIFEST_NAME)
        call_with_retries(retry, partial(bucket.delete, [manifest]))
        keys = [info.key for info in call_with_retries(retry, partial(bucket.list_objects, identity))]
        call_with_retries(retry, partial(bucket.delete, keys))
        deleted += len(keys) + 1
    return deleted
