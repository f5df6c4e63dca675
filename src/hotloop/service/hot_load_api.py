"""The bodies of the hot_load API: what a POST may ask, what GET shows.

Owns: `LoadRequest` and its parsing, the replies, the status of replicas in both dialects.
Promises: an unknown field is refused by name, so that a client can retry without it; nothing here touches storage.
Does not do: deciding (deployment.py).
Source: hot_load.md sections 6.1 and 6.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hotloop.errors import ServiceError, SnapshotError
from hotloop.snapshots.codecs.base import parse_formats
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.layout import MAX_POLICY_VERSION, check_file_name, check_identity

Stage = Literal["idle", "pending", "downloading", "verifying", "staged", "loading", "done", "error"]
ResetPromptCache = Literal["all", "new_session", "none"]

LOAD_FIELDS = frozenset(
    {
        "identity",
        "incremental_snapshot_metadata",
        "policy_version",
        "reset_prompt_cache",
        "transition",
        "allow_rewind",
        "validation",
    }
)
INCREMENTAL_FIELDS = frozenset({"previous_snapshot_identity", "compression_format", "checksum_format"})


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One wish to move to an identity."""

    identity: str
    is_incremental: bool = False
    """The request itself says that the snapshot is a delta."""
    parent: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    policy_version: int | None = None
    reset_prompt_cache: ResetPromptCache = "all"
    transition: Literal["ASYNC", "SYNC"] | None = None
    drain_timeout_s: float | None = None
    allow_rewind: bool = False
    extra_fields_ignore: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Write it for a replica."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> LoadRequest:
        """Read what `to_json` wrote."""
        return cls(**{**body, "extra_fields_ignore": tuple(body.get("extra_fields_ignore", ()))})

    def hints(self, served_identity: str | None, served_version: int | None) -> Hints:
        """What this request tells of its snapshot.

        Args:
            served_identity: the parent where the request names none; None where a manifest names it.
        """
        return Hints(
            is_incremental=self.is_incremental,
            previous_identity=self.parent or served_identity,
            compression_format=self.compression_format,
            checksum_format=self.checksum_format,
            policy_version=self.policy_version,
            served_policy_version=served_version,
        )


def parse_load_request(body: Mapping[str, Any], headers: Mapping[str, str]) -> LoadRequest:
    """Read the body of a POST.

    Raises:
        ServiceError: `unknown_field`, `missing_identity`, `invalid_identity`, `invalid_field`, `unsupported_format`,
            `unsupported_checksum`.
    """
    _refuse_unknown(body, LOAD_FIELDS, "")
    if body.get("identity") in (None, ""):
        raise ServiceError(
            "missing_identity",
            "the body names no identity",
            do='Send {"identity": "step000001"}.',
            details={"param": "identity"},
        )
    try:
        identity = check_identity(body["identity"])
        incremental = body.get("incremental_snapshot_metadata")
        facts = _incremental(incremental)
    except SnapshotError as error:
        raise ServiceError(error.code, error.why, where=error.where, do=error.do, details=error.details) from None
    version = body.get("policy_version")
    if version is not None and (
        isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_POLICY_VERSION
    ):
        raise _invalid("policy_version", "must be an integer of at least 0")
    transition = body.get("transition")
    if transition not in (None, "ASYNC", "SYNC"):
        raise _invalid("transition", "must be ASYNC or SYNC")
    if not isinstance(body.get("allow_rewind", False), bool):
        raise _invalid("allow_rewind", "must be true or false")
    return LoadRequest(
        identity=identity,
        is_incremental=incremental is not None,
        policy_version=version,
        reset_prompt_cache=_reset(body.get("reset_prompt_cache")),
        transition=transition,
        drain_timeout_s=parse_drain_timeout(headers),
        allow_rewind=body.get("allow_rewind", False),
        extra_fields_ignore=_ignored_config_keys(body.get("validation")),
        **facts,
    )


def parse_drain_timeout(headers: Mapping[str, str]) -> float | None:
    """Read the waiting limit of a request or a POST, in seconds.

    Raises:
        ServiceError: `invalid_field`.
    """
    for name in ("x-hot-load-drain-timeout", "x-fireworks-hot-load-drain-timeout"):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e6:
            raise _invalid(name, f"{text!r} must be a number of seconds")
        return seconds
    return None


def _incremental(raw: Any) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise _invalid("incremental_snapshot_metadata", "must be an object")
    _refuse_unknown(raw, INCREMENTAL_FIELDS, "incremental_snapshot_metadata.")
    for name, value in raw.items():
        if value is not None and not isinstance(value, str):
            raise _invalid(f"incremental_snapshot_metadata.{name}", "must be a text")
    if raw.get("previous_snapshot_identity"):
        check_identity(raw["previous_snapshot_identity"])
    if raw.get("compression_format") is not None:
        parse_formats(raw["compression_format"], raw.get("checksum_format"))
    return {
        "parent": raw.get("previous_snapshot_identity") or None,
        "compression_format": raw.get("compression_format"),
        "checksum_format": raw.get("checksum_format"),
    }


def _reset(raw: Any) -> ResetPromptCache:
    if raw is None or raw is True:
        return "all"
    if raw is False:
        return "none"
    if raw in ("all", "new_session", "none"):
        return raw  # type: ignore[no-any-return]  # narrowed by the membership test
    raise _invalid("reset_prompt_cache", "must be all, new_session, none, true or false")


def _ignored_config_keys(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, dict):
        raise _invalid("validation", "must be an object")
    _refuse_unknown(raw, frozenset({"extra_fields_ignore"}), "validation.")
    names = raw.get("extra_fields_ignore") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _invalid("validation.extra_fields_ignore", "must be a list of names")
    return tuple(names)


def parse_hint(body: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Read the body of a hint: an identity and the files to fetch, none meaning all.

    Raises:
        ServiceError: `unknown_field`, `missing_identity`, `invalid_identity`, `invalid_field`, `invalid_index`.
    """
    _refuse_unknown(body, frozenset({"identity", "files"}), "")
    if not body.get("identity"):
        raise ServiceError("missing_identity", "the body names no identity", details={"param": "identity"})
    files = body.get("files") or []
    if not isinstance(files, list):
        raise _invalid("files", "must be a list of file names")
    try:
        identity = check_identity(body["identity"])
        return identity, tuple(check_file_name(name, where="files") for name in files)
    except SnapshotError as error:
        raise ServiceError(error.code, error.why, where=error.where, do=error.do, details=error.details) from None


def _refuse_unknown(body: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
    unknown = [name for name in body if name not in known]
    if unknown:
        raise ServiceError(
            "unknown_field",
            f"{prefix}{unknown[0]} is not a field of this request",
            do=f"Fields here: {', '.join(sorted(known))}.",
            details={"param": f"{prefix}{unknown[0]}", "fields": unknown},
        )


def _invalid(name: str, why: str) -> ServiceError:
    return ServiceError("invalid_field", why, where=name, details={"param": name})


@dataclass(slots=True)
class LoadingState:
    """How far one replica is with its target."""

    stage: Stage = "idle"
    target: str | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    chain: tuple[str, ...] = ()
    step: int = 0
    started_at: str = ""
    updated_at: str = ""
    reason: str = ""
    message: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    retryable: bool = False

    def to_json(self) -> dict[str, Any]:
        """Write it as GET shows it; the error's fields only on `error`."""
        body: dict[str, Any] = {
            "stage": self.stage,
            "target_snapshot_identity": self.target,
            "bytes_done": self.bytes_done,
            "bytes_total": self.bytes_total,
            "chain": list(self.chain),
            "step": self.step,
            "started_at": self.started_at,
            "updated_at": self.updated_at,
        }
        if self.stage == "error":
            body |= {
                "reason": self.reason,
                "message": self.message,
                "details": self.details,
                "retryable": self.retryable,
            }
        return body


@dataclass(slots=True)
class ReplicaStatus:
    """What one replica says of itself."""

    replica_id: str
    readiness: bool = False
    current_snapshot_identity: str | None = None
    policy_version: int | None = None
    loading: LoadingState = field(default_factory=LoadingState)
    in_flight: int = 0
    pause_ms: float | None = None
    """How long the last install held generation."""
    load_id: int = 0
    """The load that `loading` speaks of; 0 before the first."""

    def to_json(self) -> dict[str, Any]:
        """Write it as one entry of GET's `replicas`."""
        body: dict[str, Any] = {
            "replica_id": self.replica_id,
            "readiness": self.readiness,
            "current_snapshot_identity": self.current_snapshot_identity,
            "policy_version": self.policy_version,
            "loading_state": self.loading.to_json(),
        }
        if self.loading.stage == "error":
            body["reason"] = self.loading.reason
        return body

    def to_wire(self) -> dict[str, Any]:
        """Write it for the gateway."""
        return {**self.to_json(), "in_flight": self.in_flight, "pause_ms": self.pause_ms, "load_id": self.load_id}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> ReplicaStatus:
        """Read what `to_wire` wrote."""
        raw = body["loading_state"]
        loading = LoadingState(
            stage=raw["stage"],
            target=raw["target_snapshot_identity"],
            bytes_done=raw["bytes_done"],
            bytes_total=raw["bytes_total"],
            chain=tuple(raw["chain"]),
            step=raw["step"],
            started_at=raw["started_at"],
            updated_at=raw["updated_at"],
            reason=raw.get("reason", ""),
            message=raw.get("message", ""),
            details=raw.get("details", {}),
            retryable=raw.get("retryable", False),
        )
        return cls(
            replica_id=body["replica_id"],
            readiness=body["readiness"],
            current_snapshot_identity=body["current_snapshot_identity"],
            policy_version=body["policy_version"],
            loading=loading,
            in_flight=body["in_flight"],
            pause_ms=body["pause_ms"],
            load_id=body["load_id"],
        )


def render_status(
    replicas: Sequence[ReplicaStatus], target: str | None, queued: str | None, *, vendor_dialect: bool
) -> dict[str, Any]:
    """Build the body of GET. `ready`: there is a replica, and all are done on the target."""
    ready = bool(replicas) and all(
        each.loading.stage == "done" and each.readiness and each.current_snapshot_identity == target
        for each in replicas
    )
    rows = [each.to_json() for each in replicas]
    if vendor_dialect:
        for row in rows:
            if row["loading_state"]["stage"] == "done":
                row["loading_state"]["stage"] = "ready"
    return {
        "ready": ready,
        "target_snapshot_identity": target,
        "queued_snapshot_identity": queued,
        "replicas": rows,
    }
