"""What the whole deployment converges to: one active load, one waiting slot, a ledger.

    POST -> look at the bucket (2 s budget) -> decide -> start | queue | join
                                                          |
            replica statuses -> on_status -> all alive replicas done or failed -> ledger -> next in the waiting slot

Owns: the targets. Runs in the gateway's event loop; only the bucket is read in threads.
Promises: the active load is never interrupted; latest wins in the waiting slot and the displaced one is in the ledger
as `superseded`; a replica that joins gets the current target, not an older `STARTUP_SNAPSHOT`.
Does not do: replica processes (supervisor.py), installing (reconciler.py), the rules (load_decision.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hotloop.errors import HotloopError, ReplicaLost, ServiceError, SnapshotError
from hotloop.service.config import DeploymentConfig
from hotloop.service.hot_load_api import LoadingState, LoadRequest, render_status
from hotloop.service.ledger import Entry, Ledger, State
from hotloop.service.load_decision import DeploymentState, Known, decide_load
from hotloop.service.membership import Member, Membership
from hotloop.service.replica_client import ReplicaClient
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.reader import SnapshotReader

STARTUP_RETRY_S = 5.0
LOAD_ATTEMPTS = 3
RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 30.0
RETRY_DOUBLINGS = 5
"""Beyond these the wait is at its bound; an unbounded exponent would overflow after a day of failures."""
RESEND_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    """One load of one identity."""

    load_id: int
    request: LoadRequest
    known: Known
    entry: Entry
    attempts: dict[str, int] = field(default_factory=dict)
    activated: set[str] = field(default_factory=set)
    retrying: set[str] = field(default_factory=set)
    """Replicas that failed and get the target again after a wait."""
    losses: dict[str, int] = field(default_factory=dict)
    """How often a replica died while this load was active."""
    is_canceled: bool = False


class Deployment:
    """Moves all replicas to one identity at a time."""

    def __init__(
        self,
        config: DeploymentConfig,
        reader: SnapshotReader,
        ledger: Ledger,
        membership: Membership,
        client_of: Callable[[Member], ReplicaClient],
        clock: Callable[[], str],
    ) -> None:
        self._config = config
        self._reader = reader
        self._ledger = ledger
        self._membership = membership
        self._client_of = client_of
        self._clock = clock
        self._next_id = 1
        self._active: Load | None = None
        self._waiting: Load | None = None
        self._current: Load | None = None
        """The newest load that at least one replica finished."""
        self._startup_error: HotloopError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._posting = asyncio.Lock()

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def target_version(self) -> int | None:
        load = self._active or self._current
        return load.known.policy_version if load is not None else None

    @property
    def target_identity(self) -> str:
        load = self._active or self._current
        return load.request.identity if load is not None else ""

    # ---- requests -----------------------------------------------------------------------------------------------

    async def post(self, request: LoadRequest) -> dict[str, Any]:
        """Take one wish.

        Raises:
            HotloopError: every code of a POST; see hot_load.md 6.3.
        """
        if not self._membership.members:
            raise ServiceError("no_replicas", "this deployment has no replicas", do="Set replicas to 1 or more.")
        self._ledger.check()
        async with self._posting:
            served_identity, served_version, everywhere = self._served()
            known = await self._look(request, served_identity, served_version)
            served_identity, served_version, everywhere = self._served()  # a load may have ended during the look
            state = DeploymentState(
                served_identity=served_identity,
                served_version=served_version,
                served_everywhere=everywhere,
                active_identity=self._active.request.identity if self._active else None,
                waiting_identity=self._waiting.request.identity if self._waiting else None,
                needs_anchor=self._ledger.needs_anchor,
                known_digest=self._ledger.digest_of(request.identity),
            )
            decision = decide_load(state, request, known)
            if decision.action == "start":
                self._start(self._make_load(request, known))
            elif decision.action == "queue":
                displaced, self._waiting = self._waiting, self._make_load(request, known)
                if displaced is not None:
                    self._note_end(displaced, "superseded", "superseded")
        return {
            "accepted": True,
            "identity": request.identity,
            "already_current": decision.already_current,
            "joined": decision.joined,
            "queued": decision.action == "queue",
            "superseded": decision.superseded,
            "current_snapshot_identity": served_identity,
            "target_snapshot_identity": self.target_identity or None,
            "policy_version": known.policy_version,
        }

    async def cancel(self) -> dict[str, Any]:
        """Give up what is not installed yet: the waiting one first, else the active one.

        Raises:
            ServiceError: `not_cancellable`.
        """
        if self._waiting is not None:
            given_up, self._waiting = self._waiting, None
            self._note_end(given_up, "canceled", "canceled")
            return {"canceled": given_up.request.identity}
        load = self._active
        stages = {member.status.loading.stage for member in self._members_of(load)} if load else set()
        if load is None or stages & {"loading", "done"}:
            raise ServiceError(
                "not_cancellable",
                "no load is waiting or being staged" if load is None else "the load is being installed",
                do="See GET for what is served.",
            )
        load.is_canceled = True
        for member in self._members_of(load):
            with contextlib.suppress(ReplicaLost):
                await self._client_of(member).cancel(load.load_id)
        return {"canceled": load.request.identity}

    def status(self, *, vendor_dialect: bool) -> dict[str, Any]:
        """Show every replica."""
        statuses = self._membership.statuses()
        if self._startup_error is not None and self.target_identity == "":
            for status in statuses:
                status.loading = _error_state(self._startup_error, None, self._clock())
        queued = self._waiting.request.identity if self._waiting else None
        return render_status(statuses, self.target_identity or None, queued, vendor_dialect=vendor_dialect)

    def clear_ledger(self) -> None:
        """Forget the history; what is served goes on, and the next load must be an anchor."""
        self._ledger.clear()

    # ---- loads --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find what new replicas load, retrying until the bucket says; then watch it if asked to."""
        while self._active is None and self._current is None:
            try:
                request = await asyncio.to_thread(self._startup_request)
                known = await self._look(request, None, None)
                self._startup_error = None
                if self._active is None and self._current is None:
                    load = self._make_load(request, known)
                    self._start(load)
                    await self._take_up_interrupted(load)
            except HotloopError as error:
                self._startup_error = error
                await asyncio.sleep(STARTUP_RETRY_S)
        if self._config.watch:
            await self._watch()

    async def _take_up_interrupted(self, startup: Load) -> None:
        """Go on with the wish that had been accepted when the last gateway died, unless a newer one comes first."""
        entry = self._ledger.take_interrupted()
        if entry is None or entry.identity == startup.request.identity:
            return
        # Its version was compared with the served one when it was accepted, where it was known.
        was_checked = entry.policy_version is not None
        request = LoadRequest.from_json({"identity": entry.identity, **entry.hints, "allow_rewind": was_checked})
        while self._next_id == startup.load_id + 1:
            try:
                await self.post(request)
                return
            except HotloopError as error:
                logger.warning("the interrupted load of %s is not taken up yet: %s", entry.identity, error)
                if error.code not in ("storage_unavailable", "storage_access"):
                    return
                await asyncio.sleep(STARTUP_RETRY_S)

    def _startup_request(self) -> LoadRequest:
        done = self._ledger.newest_done()
        if done is None:
            return LoadRequest(self._reader.read_startup())
        return LoadRequest.from_json({"identity": done.identity, **done.hints})

    async def _watch(self) -> None:
        """Ask for each newer snapshot once: what failed for good or was canceled is not asked for again."""
        asked = ""
        while True:
            await asyncio.sleep(self._config.watch_interval_s)
            try:
                newest = await asyncio.to_thread(self._newest_manifest)
                _, served, _ = self._served()
                wanted = self.target_version if self.target_version is not None else served
                if newest is not None and newest[0] != asked and (wanted is None or newest[1] > wanted):
                    await self.post(LoadRequest(newest[0]))
                    asked = newest[0]
            except HotloopError as error:
                logger.warning("watching the bucket: %s", error)

    def _newest_manifest(self) -> tuple[str, int] | None:
        found = []
        for identity in self._reader.list_identities():
            manifest = self._reader.find_manifest(identity)
            if manifest is not None:
                found.append((manifest.policy_version, identity))
        return (max(found)[1], max(found)[0]) if found else None

    async def _look(self, request: LoadRequest, served_identity: str | None, served_version: int | None) -> Known:
        """Describe the identity and its parent's marker within the budget; what takes longer is unknown."""
        limit = self._config.limits.post_budget_s
        try:
            return await asyncio.wait_for(
                asyncio.to_thread(self._describe, request, served_identity, served_version), limit
            )
        except TimeoutError:
            return Known(policy_version=request.policy_version)

    def _describe(self, request: LoadRequest, served_identity: str | None, served_version: int | None) -> Known:
        identity = request.identity
        self._reader.forget(identity)
        manifest = self._reader.find_manifest(identity)
        parent_if_unnamed = None if manifest is not None else served_identity
        try:
            info = self._reader.describe(identity, request.hints(parent_if_unnamed, served_version))
        except SnapshotError as error:
            if manifest is None and error.code == "missing_object":
                return Known(policy_version=request.policy_version)  # an upload without a marker; the replica waits
            raise
        parent = self._reader.find(info.parent) if info.parent is not None else None
        return Known(
            kind=info.kind,
            parent=info.parent,
            parent_exists=parent is not None,
            parent_version=parent.policy_version if parent is not None else None,
            policy_version=info.policy_version,
            digest=info.digest,
            formats=None if info.formats is None else asdict(info.formats),
        )

    def _make_load(self, request: LoadRequest, known: Known) -> Load:
        hints = {
            name: value
            for name, value in request.to_json().items()
            if name in ("is_incremental", "parent", "compression_format", "checksum_format", "policy_version")
            and value not in (None, False)
        }
        if known.parent is not None and request.is_incremental:
            hints["parent"] = known.parent
        entry = Entry(
            identity=request.identity,
            kind=known.kind,
            parent=known.parent,
            policy_version=known.policy_version,
            manifest_digest=known.digest,
            formats=known.formats or {},
            requested_at=self._clock(),
            hints=hints,
        )
        self._ledger.add(entry)
        load = Load(self._next_id, request, known, entry)
        self._next_id += 1
        return load

    def _start(self, load: Load) -> None:
        self._active = load
        for member in self._membership.members.values():
            if member.url:
                self._spawn(self._send(member, load, 0.0))

    async def _send(self, member: Member, load: Load, delay_s: float) -> None:
        """Give a replica its target, until it took it, is gone, or something else is wanted."""
        url = member.url
        await asyncio.sleep(delay_s)
        request = load.request
        transition = self._config.transition
        filled = LoadRequest.from_json(
            {
                **request.to_json(),
                "transition": request.transition or transition.mode,
                "drain_timeout_s": transition.drain_timeout_s
                if request.drain_timeout_s is None
                else request.drain_timeout_s,
            }
        )
        if not self._is_wanted(load, member, url):
            return
        load.attempts[member.replica_id] = load.attempts.get(member.replica_id, 0) + 1
        while self._is_wanted(load, member, url):
            hints = {entry.identity: entry.hints for entry in self._ledger.entries if entry.hints}
            try:
                await self._client_of(member).set_target(
                    load.load_id,
                    filled,
                    policy_version=load.known.policy_version,
                    hints=hints,
                    may_activate=transition.max_concurrent_swaps == 0,
                )
                break
            except ReplicaLost:
                await asyncio.sleep(RESEND_S)
        load.retrying.discard(member.replica_id)

    def _is_wanted(self, load: Load, member: Member, url: str) -> bool:
        """Say whether a command still makes sense: nothing newer came, and the replica has not been replaced."""
        return load is (self._active or self._current) and member.url == url

    def on_join(self, member: Member) -> None:
        """Give a replica that has just come up the current target."""
        load = self._active or self._current
        if load is not None:
            load.attempts.pop(member.replica_id, None)
            load.activated.discard(member.replica_id)
            load.retrying.discard(member.replica_id)
            self._spawn(self._send(member, load, 0.0))

    def on_status(self, member: Member) -> None:
        """Go on from what a replica has just said."""
        load = self._load_of(member)
        if load is None:
            return
        loading = member.status.loading
        has_failed = member.status.load_id == load.load_id and loading.stage == "error"
        if has_failed and (member.replica_id in load.retrying or self._may_retry(member, load)):
            loading.stage = "pending"
            if member.replica_id not in load.retrying:  # its status says the same every second until it gets the target
                load.retrying.add(member.replica_id)
                load.activated.discard(member.replica_id)
                doublings = min(load.attempts.get(member.replica_id, 1) - 1, RETRY_DOUBLINGS)
                delay = min(RETRY_FIRST_S * 2**doublings, RETRY_LONGEST_S)
                self._spawn(self._send(member, load, delay))
            return
        self._activate_next(load)
        if load is self._active:
            self._finish_if_over(load)

    def _load_of(self, member: Member) -> Load | None:
        """The load that a replica is busy with: the active one, or the current one if it joined after its end."""
        current = self._current
        if current is not None and member.status.load_id == current.load_id:
            return current
        return self._active

    def on_lost(self, member: Member) -> None:
        """A replica has died; the load goes on without it, and it gets the target when it is back.

        A load under which every replica died again and again is given up if there is another one to turn to: the
        snapshot itself may be what ends them.
        """
        load = self._active
        if load is None:
            return
        load.activated.discard(member.replica_id)
        load.losses[member.replica_id] = load.losses.get(member.replica_id, 0) + 1
        members = self._membership.members
        has_another = self._current is not None or self._waiting is not None
        if has_another and all(load.losses.get(name, 0) >= LOAD_ATTEMPTS for name in members):
            self._end(load, "error", "replica_lost")
            return
        self._activate_next(load)
        self._finish_if_over(load)

    def _may_retry(self, member: Member, load: Load) -> bool:
        """A replica that serves nothing is tried on and on, unless a newer wish waits; one that serves, three times."""
        if not member.status.loading.retryable or load.is_canceled:
            return False
        has_nothing_to_serve = not member.status.readiness and self._waiting is None
        return has_nothing_to_serve or load.attempts.get(member.replica_id, 0) < LOAD_ATTEMPTS

    def _activate_next(self, load: Load) -> None:
        slots = self._config.transition.max_concurrent_swaps
        if slots == 0 or load.is_canceled:
            return
        members = self._members_of(load)
        swapping = [
            m for m in members if m.replica_id in load.activated and m.status.loading.stage in ("staged", "loading")
        ]
        free = slots - len(swapping)
        for member in members:
            if free > 0 and member.status.loading.stage == "staged" and member.replica_id not in load.activated:
                load.activated.add(member.replica_id)
                free -= 1
                self._spawn(self._activate(member, load))

    async def _activate(self, member: Member, load: Load) -> None:
        url = member.url
        while self._is_wanted(load, member, url) and member.status.loading.stage == "staged":
            try:
                await self._client_of(member).activate(load.load_id)
                return
            except ReplicaLost:
                await asyncio.sleep(RESEND_S)

    def _finish_if_over(self, load: Load) -> None:
        alive = [member for member in self._membership.members.values() if member.url]
        ended = [m for m in alive if m.status.load_id == load.load_id and m.status.loading.stage in ("done", "error")]
        if not alive or len(ended) < len(alive):
            return
        done = [member for member in alive if member.status.loading.stage == "done"]
        failed = next((member for member in alive if member.status.loading.stage == "error"), None)
        for member in alive:
            load.entry.replicas[member.replica_id] = {
                "state": member.status.loading.stage,
                "ready_at": member.status.loading.updated_at,
                "pause_ms": member.status.pause_ms,
            }
        if load.entry.policy_version is None and done:
            load.entry.policy_version = done[0].status.policy_version
        if done:
            self._current = load
        if failed is None:
            self._end(load, "done", "")  # even where a cancel came too late
        elif load.is_canceled:
            self._end(load, "canceled", "canceled")
        else:
            self._end(load, "error", failed.status.loading.reason)

    def _end(self, load: Load, state: State, reason: str) -> None:
        """Close the active load and begin the waiting one."""
        self._active = None
        self._note_end(load, state, reason)
        if self._waiting is not None:
            following, self._waiting = self._waiting, None
            self._start(following)

    def _note_end(self, load: Load, state: State, reason: str) -> None:
        """Write the end of a load down. What is served does not depend on the disk: the next POST tells of it."""
        try:
            self._ledger.finish(load.entry, state, reason)
        except ServiceError as error:
            logger.error("%s", error)

    # ---- state --------------------------------------------------------------------------------------------------

    def _members_of(self, load: Load | None) -> list[Member]:
        if load is None:
            return []
        return [m for m in self._membership.members.values() if m.url and m.status.load_id == load.load_id]

    def _served(self) -> tuple[str | None, int | None, bool]:
        """What is served: identity, version, and whether every replica serves it."""
        statuses = [status for status in self._membership.statuses() if status.readiness]
        if not statuses:
            return None, None, False
        newest = max(statuses, key=lambda status: status.policy_version if status.policy_version is not None else -1)
        everywhere = len(statuses) == len(self._membership.members) and all(
            status.current_snapshot_identity == newest.current_snapshot_identity for status in statuses
        )
        return newest.current_snapshot_identity, newest.policy_version, everywhere

    def hints_for(self, identity: str) -> Hints:
        """What earlier requests said of an identity, for a hint's prefetch."""
        request = LoadRequest.from_json({"identity": identity, **self._ledger.hints_for(identity)})
        served_identity, served_version, _ = self._served()
        return request.hints(served_identity, served_version)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop every task of this deployment."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _error_state(error: HotloopError, target: str | None, now: str) -> LoadingState:
    return LoadingState(
        stage="error",
        target=target,
        updated_at=now,
        reason=error.code,
        message=str(error),
        details=error.details,
        retryable=error.retryable,
    )
