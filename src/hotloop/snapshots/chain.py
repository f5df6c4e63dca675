"""From a wanted identity to the snapshots that build it, or to what is missing. Pure; the caller looks links up.

Owns: walking parents from the target to content that is held, or to an anchor; the rules between a delta and its
parent; and the choice of anchor or delta for the next snapshot.

Promises: a resolved chain is applied oldest first, its steps follow each other, its policy versions rise, and it has
at most 128 deltas. A delta is never planned on a parent whose content is not the one it was made from.

Does not do: reading links from a bucket (reader.py) or applying them (materialize.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hotloop.errors import SnapshotError
from hotloop.snapshots.manifest import MAX_CHAIN_LENGTH

DEFAULT_FULL_EVERY = 25
"""Snapshots from one anchor to the next; vendors of hot-loaded deployments advise 20 to 30."""


@dataclass(frozen=True, slots=True)
class Link:
    """What the chain needs to know of one complete snapshot."""

    identity: str
    kind: Literal["anchor", "delta"]
    parent: str | None
    policy_version: int | None
    """None when a foreign directory does not say."""
    digest: str
    """Manifest digest, or the content digest of a directory without a manifest."""


@dataclass(frozen=True, slots=True)
class Held:
    """The content that a replica or a publisher already has in memory, checked by checksums."""

    identity: str
    digest: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Snapshots to apply, oldest first."""

    base: str | None
    """The held identity that the first step is applied to; None when the first step is an anchor."""
    steps: tuple[Link, ...]
    """Empty when the target itself is held."""

    @property
    def identities(self) -> list[str]:
        """The identities of the steps, oldest first."""
        return [link.identity for link in self.steps]


def resolve_chain(target: str, find: Callable[[str], Link | None], *, held: Held | None = None) -> Chain:
    """Walk from the target to held content or to an anchor.

    Args:
        target: the wanted identity.
        find: looks up a complete snapshot by identity; None when the bucket has none. Called once per link.
        held: content to start from; ignored where its digest differs from the bucket's.

    Raises:
        SnapshotError: `snapshot_incomplete` when the target itself is not there, `parent_unknown` when its parent
            is not, `chain_broken` for a link further back that is missing or for a loop, `chain_too_long` above 128
            deltas, `metadata_conflict` when a delta's policy version is not above its parent's.
    """
    walked: list[Link] = []
    seen: set[str] = set()
    wanted = target
    while True:
        if wanted in seen:
            raise _broken(target, walked, wanted, f"its parents form a loop at {wanted}")
        seen.add(wanted)
        link = find(wanted)
        if link is None:
            raise _missing(target, walked, wanted)
        if walked:
            check_version_rises(link, walked[-1])
        if held is not None and (link.identity, link.digest) == (held.identity, held.digest):
            return Chain(held.identity, tuple(reversed(walked)))
        walked.append(link)
        if link.kind == "anchor":
            return Chain(None, tuple(reversed(walked)))
        if len(walked) > MAX_CHAIN_LENGTH:
            raise SnapshotError(
                "chain_too_long",
                f"is more than {MAX_CHAIN_LENGTH} deltas away from an anchor",
                where=f"snapshot {target}",
                do='Publish an anchor with "hotloop publish full".',
                details={"identity": target, "limit": MAX_CHAIN_LENGTH},
                exit_code=2,
            )
        if link.parent is None:
            raise SnapshotError(
                "missing_parent",
                "is a delta and names no parent",
                where=f"snapshot {link.identity}",
                do="Name it with previous_snapshot_identity.",
                details={"identity": link.identity},
            )
        wanted = link.parent


def check_version_rises(parent: Link, child: Link) -> None:
    """Refuse a delta whose policy version is not above its parent's.

    Raises: SnapshotError `metadata_conflict`.
    """
    if parent.policy_version is None or child.policy_version is None:
        return
    if child.policy_version <= parent.policy_version:
        raise SnapshotError(
            "metadata_conflict",
            f"has policy version {child.policy_version}, not above the {parent.policy_version} of its parent"
            f" {parent.identity}",
            where=f"snapshot {child.identity}",
            do="Publish it under a policy version that rises along the chain.",
            details={"identity": child.identity, "parent": parent.identity},
            exit_code=2,
        )


def _missing(target: str, walked: list[Link], missing: str) -> SnapshotError:
    if not walked:
        return SnapshotError(
            "snapshot_incomplete",
            "has no snapshot.json and is no complete directory of a known kind",
            where=f"snapshot {target}",
            do="Wait until its upload has ended, or publish it.",
            details={"identity": target},
            retryable=True,
            exit_code=2,
        )
    if len(walked) == 1:
        return SnapshotError(
            "parent_unknown",
            f"is a delta of {missing}, which is not in the bucket",
            where=f"snapshot {target}",
            do='Publish an anchor with "hotloop publish full".',
            details={"identity": target, "parent": missing},
            exit_code=2,
        )
    return _broken(target, walked, missing, f"delta {walked[-1].identity} needs {missing}, which is not in the bucket")


def _broken(target: str, walked: list[Link], missing: str, why: str) -> SnapshotError:
    return SnapshotError(
        "chain_broken",
        f"cannot be built: {why}",
        where=f"snapshot {target}",
        do=f'Publish an anchor with "hotloop publish full", or restore {missing}.',
        details={"identity": target, "missing": missing, "chain": [link.identity for link in walked]},
        exit_code=2,
    )


def choose_kind(chain_length: int | None, *, full_every: int = DEFAULT_FULL_EVERY) -> Literal["anchor", "delta"]:
    """Choose what the next snapshot is.

    Args:
        chain_length: deltas between the parent and its anchor; None when there is no parent.
        full_every: the snapshot that is this many steps after the anchor becomes an anchor itself; 0 never forces one
            below the limit of 128 deltas.
    """
    if chain_length is None:
        return "anchor"
    step = chain_length + 1
    if step > MAX_CHAIN_LENGTH or (full_every > 0 and step >= full_every):
        return "anchor"
    return "delta"
