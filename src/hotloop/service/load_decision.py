"""What a POST leads to. Pure: the deployment's state and what the bucket said in; accept, join, queue or refuse out.

Owns: idempotency, the one waiting slot, rewinds, the need for an anchor, the parent's rules.
Promises: the same state and request give the same decision; nothing here waits, reads or writes.
Does not do: looking at the bucket (deployment.py), loading (reconciler.py).
Source: hot_load.md sections 6.1 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hotloop.errors import ServiceError
from hotloop.service.hot_load_api import LoadRequest

Action = Literal["start", "queue", "join", "nothing"]


@dataclass(frozen=True, slots=True)
class Known:
    """What the bucket said of an identity within the POST's budget; `digest` is empty when it said nothing yet."""

    kind: Literal["anchor", "delta", ""] = ""
    parent: str | None = None
    parent_exists: bool = True
    parent_version: int | None = None
    policy_version: int | None = None
    digest: str = ""
    formats: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What the deployment is doing when a POST arrives."""

    served_identity: str | None = None
    """The identity that every replica serves, or that most recently loaded everywhere."""
    served_version: int | None = None
    served_everywhere: bool = False
    active_identity: str | None = None
    waiting_identity: str | None = None
    needs_anchor: bool = False
    known_digest: str = ""
    """Digest under which the requested identity was loaded before; empty when never."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and what the reply says."""

    action: Action
    already_current: bool = False
    joined: bool = False
    superseded: str | None = None


def decide_load(state: DeploymentState, request: LoadRequest, known: Known) -> Decision:
    """Decide one POST.

    Raises:
        ServiceError: `identity_conflict`, `anchor_required`, `parent_unknown`, `metadata_conflict`, `rewind_rejected`.
    """
    identity = request.identity
    if state.known_digest and known.digest and state.known_digest != known.digest:
        raise ServiceError(
            "identity_conflict",
            f"snapshot {identity} was loaded before with other content",
            do="Publish the new content under a new identity.",
            details={"identity": identity, "loaded_digest": state.known_digest, "bucket_digest": known.digest},
        )
    if state.active_identity is None and state.served_everywhere and state.served_identity == identity:
        return Decision("nothing", already_current=True)
    if identity in (state.active_identity, state.waiting_identity):
        return Decision("join", joined=True)
    if known.kind == "delta":
        _check_delta(state, request, known)
    served, wanted = state.served_version, known.policy_version
    if served is not None and wanted is not None and wanted < served and not request.allow_rewind:
        raise ServiceError(
            "rewind_rejected",
            f"snapshot {identity} has policy version {wanted}, below the {served} that is served",
            do='Send "allow_rewind": true to go back, or load a newer snapshot.',
            details={"identity": identity, "served_policy_version": served, "policy_version": wanted},
        )
    if state.active_identity is None:
        return Decision("start")
    return Decision("queue", superseded=state.waiting_identity)


def _check_delta(state: DeploymentState, request: LoadRequest, known: Known) -> None:
    if state.needs_anchor:
        raise ServiceError(
            "anchor_required",
            f"snapshot {request.identity} is a delta, and the deployment's history was reset",
            do="Load an anchor first.",
            details={"identity": request.identity},
        )
    if not known.parent_exists and known.parent != state.served_identity:
        raise ServiceError(
            "parent_unknown",
            f"snapshot {request.identity} is a delta of {known.parent}, which is not in the bucket and not served",
            do='Publish an anchor with "hotloop publish full".',
            details={"identity": request.identity, "parent": known.parent, "served": state.served_identity},
        )
    if (
        known.parent_version is not None
        and known.policy_version is not None
        and known.policy_version <= known.parent_version
    ):
        raise ServiceError(
            "metadata_conflict",
            f"snapshot {request.identity} has policy version {known.policy_version}, not above the "
            f"{known.parent_version} of its parent {known.parent}",
            do="Publish it under a policy version that rises along the chain.",
            details={"identity": request.identity, "parent": known.parent},
        )
