"""One replica's way from what it serves to what is wanted.

    target -> pending -> downloading -> verifying -> staged -> loading -> done
                 |     (background.py, while serving)      |     |   pause, write, flip, resume
                 |                              swap made ready  |
                 +---------------- error <-----------------------+

Task `run`: consumes the newest target, produces statuses, waits for a target or for leave to swap; unblocked by
`set_target`, `activate` and `cancel`. Installs on one replica are strictly one at a time.

Promises: old weights serve until new ones are verified; a step that fails before the install leaves nothing changed; a
failure inside the install takes the replica out of rotation until it has reloaded everything; identity and version flip
only after the write. The pause holds the in-place write and nothing else.
Does not do: requests (replica.py), the snapshot's own checks (snapshots/materialize.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from hotloop.engines.base import EngineSettings, WeightUpdate
from hotloop.errors import HotloopError, ServiceError, SnapshotError
from hotloop.service.admission import Gate, Phase
from hotloop.service.background import Background, choose_workers, count_cores
from hotloop.service.hot_load_api import LoadingState, LoadRequest, ReplicaStatus
from hotloop.service.policy_dir import fetch_small_files, write_policy_dir
from hotloop.service.serving import Served, open_served
from hotloop.service.swap import prepare
from hotloop.snapshots.anchor import compute_adler32
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.materialize import StagedSnapshot, stage
from hotloop.snapshots.mirror import Mirror
from hotloop.snapshots.progress import Progress
from hotloop.snapshots.reader import SnapshotReader

INCOMPLETE_POLL_S = 0.5
PROGRESS_EVERY_S = 0.1


@dataclass(slots=True)
class Target:
    """One load as the gateway asked for it."""

    load_id: int
    request: LoadRequest
    hints: dict[str, dict[str, Any]]
    """What earlier requests said of identities without a manifest."""
    policy_version: int | None = None
    """As far as the gateway knew it from the bucket when it sent the target."""
    may_activate: asyncio.Event = field(default_factory=asyncio.Event)
    is_canceled: bool = False


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a reconciler is built from."""

    replica_id: str
    reader: SnapshotReader
    cache: Cache
    mirror: Mirror
    state_dir: Path
    engine: EngineSettings
    tokenizer_dir: str
    incomplete_wait_s: float
    clock: Callable[[], str]


class Reconciler:
    """Converges one replica. Used from one event loop."""

    def __init__(
        self,
        wiring: Wiring,
        gate: Gate,
        on_status: Callable[[], None],
        engine_ids: Callable[[str], list[str]],
    ) -> None:
        """Start with nothing served.

        Args:
            engine_ids: gives the engine requests of a request that holds the gate, so that a late one can be aborted.
        """
        self._wiring = wiring
        self._engine_ids = engine_ids
        self._gate = gate
        self._on_status = on_status
        self.served = Served()
        self.status = ReplicaStatus(wiring.replica_id)
        self._wanted: Target | None = None
        self._working: Target | None = None
        self._wake = asyncio.Event()
        self._background = Background()

    # ---- what the gateway says ----------------------------------------------------------------------------------

    @property
    def target_version(self) -> int | None:
        """Policy version that the replica is moving to, or serves; None where it is not known yet."""
        target = self._working or self._wanted
        if target is not None:
            return target.policy_version
        return self.served.policy_version if self.served.engine is not None else None

    def set_target(self, target: Target) -> None:
        """Take a target; the one that is being worked on is finished first."""
        working = self._working
        if working is not None and working.load_id == target.load_id:
            return
        self._wanted = target
        if working is None:
            self._report(target, "pending")
        self._wake.set()

    def activate(self, load_id: int) -> None:
        """Let a staged load swap."""
        for target in (self._working, self._wanted):
            if target is not None and target.load_id == load_id:
                target.may_activate.set()

    def cancel(self, load_id: int) -> None:
        """Give a load up; without effect once it is being installed."""
        for target in (self._working, self._wanted):
            if target is not None and target.load_id == load_id:
                target.is_canceled = True
                target.may_activate.set()

    # ---- the task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Converge until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._wanted is not None:
                self._working, self._wanted = self._wanted, None
                try:
                    await self._converge(self._working)
                except HotloopError as error:
                    self._fail(self._working, error)
                except Exception as error:  # a bug of ours must not end the task that keeps the replica current
                    wrapped = ServiceError("engine_error", f"{type(error).__name__}: {error}", retryable=True)
                    self._fail(self._working, wrapped)
                finally:
                    self._working = None

    async def _converge(self, target: Target) -> None:
        served = self.served
        identity = target.request.identity
        if served.engine is not None and served.identity == identity:
            self._report(target, "done")
            return
        self._report(target, "downloading")
        staged = await self._stage(target)
        self._check_fits(staged, target)
        self.status.loading.chain, self.status.loading.step = staged.chain, len(staged.chain)
        self._report(target, "staged")
        await target.may_activate.wait()
        if target.is_canceled:
            raise ServiceError("canceled", f"the load of {identity} was canceled")
        version = self._version_of(staged)
        if served.engine is not None and version < served.policy_version and not target.request.allow_rewind:
            raise ServiceError(  # the gateway could not tell: the bucket was slow, or a newer wish was still loading
                "rewind_rejected",
                f"snapshot {identity} has policy version {version}, below the {served.policy_version} that is served",
                do='Send "allow_rewind": true to go back.',
                details={"identity": identity, "served_policy_version": served.policy_version},
            )
        if served.engine is None:
            await self._open(target, staged, version)
        else:
            await self._swap(target, staged, version)

    async def _stage(self, target: Target) -> StagedSnapshot:
        """Fetch and verify in a thread; wait for an upload without a marker to become complete."""
        wiring = self._wiring
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wiring.incomplete_wait_s
        last_report = 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal last_report
            now = time.monotonic()
            is_end = progress.bytes_done >= progress.bytes_total
            if progress.stage in ("downloading", "verifying") and (is_end or now - last_report >= PROGRESS_EVERY_S):
                last_report = now
                loop.call_soon_threadsafe(self._show_progress, target, progress)

        # Without an engine the small files of an earlier run are needed too; where they are lost, all is fetched again.
        can_reuse = self.served.engine is not None or (wiring.state_dir / "policy" / "config.json").exists()
        held = wiring.mirror if can_reuse and not wiring.mirror.is_empty else None
        is_serving = self.served.engine is not None
        workers = choose_workers(count_cores(), wiring.engine.threads) if is_serving else count_cores()
        while True:
            if target.is_canceled:
                raise ServiceError("canceled", f"the load of {target.request.identity} was canceled")
            try:
                work = partial(
                    stage,
                    target.request.identity,
                    wiring.reader,
                    wiring.cache,
                    held=held,
                    hints=self._hints(target),
                    hints_for=lambda name: self._old_hints(target, name),
                    on_progress=on_progress,
                    workers=workers,
                )
                return await (self._background.run(work) if is_serving else asyncio.to_thread(work))
            except SnapshotError as error:
                if error.code == "checksum_mismatch" and held is not None:
                    held = None  # the host copy may be what is damaged: build everything from the bucket, beside it
                    continue
                if error.code != "missing_object" or loop.time() >= deadline or self._has_manifest(target):
                    raise
                await asyncio.sleep(INCOMPLETE_POLL_S)

    def _has_manifest(self, target: Target) -> bool:
        return self._wiring.reader.find_manifest(target.request.identity) is not None

    def _hints(self, target: Target) -> Hints:
        parent_if_unnamed = None if self._has_manifest(target) else self.served.identity or None
        version = self.served.policy_version if self.served.engine is not None else None
        return target.request.hints(parent_if_unnamed, version)

    def _old_hints(self, target: Target, identity: str) -> Hints:
        return LoadRequest.from_json({"identity": identity, **target.hints.get(identity, {})}).hints(None, None)

    def _check_fits(self, staged: StagedSnapshot, target: Target) -> None:
        """Refuse a snapshot of another model than the one that is served.

        Raises:
            ServiceError: `incompatible_config`.
        """
        if self.served.engine is None:
            return
        ignored = set(target.request.extra_fields_ignore)
        if staged.config and self.served.config:
            try:
                new = orjson.loads(staged.config)
            except orjson.JSONDecodeError:
                new = None
            if not isinstance(new, dict):
                raise ServiceError("incompatible_config", f"the config.json of {staged.identity} is not a JSON object")
            old = self.served.config
            differing = sorted(k for k in old.keys() | new.keys() if k not in ignored and old.get(k) != new.get(k))
            if differing:
                raise ServiceError(
                    "incompatible_config",
                    f"the config.json of {staged.identity} differs in {', '.join(differing[:5])}",
                    do="Start a new deployment for another model, or name the keys in validation.extra_fields_ignore.",
                    details={"identity": staged.identity, "fields": differing[:20]},
                )
        if staged.base is None and not self._wiring.mirror.is_empty:
            held = {name: (t.dtype, t.shape) for name, t in self._wiring.mirror.tensors.items()}
            found = {name: (t.dtype, t.shape) for name, t in staged.tensors.items()}
            if held != found:
                names = sorted(n for n in held.keys() | found.keys() if held.get(n) != found.get(n))
                raise ServiceError(
                    "incompatible_config",
                    f"{staged.identity} has other tensors than the served model: {names[0]} first",
                    do="Start a new deployment for another model.",
                    details={"identity": staged.identity, "tensors": names[:20]},
                )

    def _version_of(self, staged: StagedSnapshot) -> int:
        if staged.policy_version is not None:
            return staged.policy_version
        mirror = self._wiring.mirror
        if not staged.chain and not mirror.is_empty and mirror.policy_version is not None:
            return mirror.policy_version  # the host copy holds the target itself
        return self.served.policy_version + 1 if self.served.engine is not None else 0

    # ---- installing ---------------------------------------------------------------------------------------------

    async def _open(self, target: Target, staged: StagedSnapshot, version: int) -> None:
        """Install into no engine: take the content over, then open the engine on it."""
        wiring = self._wiring
        self._report(target, "loading")
        small_files = await asyncio.to_thread(fetch_small_files, staged, wiring.cache)
        await asyncio.to_thread(wiring.mirror.promote, staged)
        if staged.base is not None:
            await asyncio.to_thread(_check_kept, wiring.mirror)
        folder = await asyncio.to_thread(write_policy_dir, wiring.state_dir, small_files, wiring.mirror.tensors)
        settings = replace(wiring.engine, policy_dir=str(folder))
        opened = await open_served(folder, settings, wiring.tokenizer_dir, staged.identity, version)
        assert opened.engine is not None
        try:
            await opened.engine.pause()
            await opened.engine.write_weights(WeightUpdate(version, staged.identity))
            await opened.engine.resume()
        except BaseException:
            await opened.engine.close()
            raise
        self.served = opened
        wiring.cache.protect(staged.files)
        await self._gate.set_phase(Phase.OPEN)
        self._finish(target, pause_ms=None)

    async def _swap(self, target: Target, staged: StagedSnapshot, version: int) -> None:
        """Install into a serving engine."""
        wiring, served, request = self._wiring, self.served, target.request
        assert served.engine is not None
        swap = await prepare(served.engine, staged, version)
        await self._background.run(wiring.mirror.begin, staged)
        try:
            await self._drain(request)
        except BaseException:
            await self._gate.set_phase(Phase.OPEN)  # nothing was written: the old weights go on serving
            raise
        self._report(target, "loading")
        await self._gate.set_phase(Phase.SWAPPING)
        try:
            held_s = await swap.run()
        except ServiceError as error:
            if error.code == "engine_error":  # refused: the old weights are whole and serve again
                await self._gate.set_phase(Phase.OPEN)
                raise
            await self._lose_engine()
            raise _install_failed(staged.identity, error) from error
        except Exception as error:
            await self._lose_engine()
            raise _install_failed(staged.identity, error) from error
        served.namespaces.on_swap(request.reset_prompt_cache, is_rewind=version < served.policy_version)
        served.identity, served.policy_version = staged.identity, version
        await self._gate.set_phase(Phase.OPEN)
        self._finish(target, pause_ms=held_s * 1000)
        wiring.cache.protect(staged.files)
        try:
            await self._background.run(wiring.mirror.promote, staged)
        except SnapshotError:
            # The new weights serve; without a host copy the next load starts from an anchor.
            await asyncio.to_thread(wiring.mirror.forget)

    async def _drain(self, request: LoadRequest) -> None:
        """Wait for the requests that must not see the swap; end those that take too long."""
        late = await self._gate.drain(request.transition or "ASYNC", request.drain_timeout_s or 0.0)
        engine = self.served.engine
        assert engine is not None
        for request_id in late:
            for engine_id in self._engine_ids(request_id):
                await engine.abort(engine_id)
        await self._gate.wait_until_gone(late)

    async def _lose_engine(self) -> None:
        """The engine's weights cannot be trusted: nothing is served until all of them were loaded again."""
        await self._gate.set_phase(Phase.CLOSED)
        engine, self.served = self.served.engine, Served(namespaces=self.served.namespaces)
        await asyncio.to_thread(self._wiring.mirror.forget)
        if engine is not None:
            await engine.close()

    # ---- reporting ----------------------------------------------------------------------------------------------

    def _report(self, target: Target, stage_name: Any) -> None:
        now = self._wiring.clock()
        old = self.status.loading
        is_same = self.status.load_id == target.load_id and stage_name != "pending"
        self.status.load_id = target.load_id
        self.status.loading = LoadingState(
            stage=stage_name,
            target=target.request.identity,
            bytes_done=old.bytes_done if is_same else 0,
            bytes_total=old.bytes_total if is_same else 0,
            chain=old.chain if is_same else (),
            step=old.step if is_same else 0,
            started_at=old.started_at if is_same else now,
            updated_at=now,
        )
        self._show()

    def _show_progress(self, target: Target, progress: Progress) -> None:
        if self._working is not target or self.status.loading.stage not in ("downloading", "verifying"):
            return
        loading = self.status.loading
        loading.stage = "verifying" if progress.stage == "verifying" else "downloading"
        loading.bytes_done, loading.bytes_total = progress.bytes_done, progress.bytes_total
        loading.updated_at = self._wiring.clock()
        self._show()

    def _finish(self, target: Target, pause_ms: float | None) -> None:
        self.status.pause_ms = pause_ms
        self._report(target, "done")

    def _fail(self, target: Target, error: HotloopError) -> None:
        self._wiring.mirror.abandon() if self.served.engine is not None else None
        self._report(target, "error")
        loading = self.status.loading
        loading.reason, loading.message = error.code, str(error)
        loading.details, loading.retryable = dict(error.details), error.retryable
        self._show()

    def _show(self) -> None:
        status, served = self.status, self.served
        status.readiness = served.engine is not None and self._gate.phase is not Phase.CLOSED
        status.current_snapshot_identity = served.identity or None
        status.policy_version = served.policy_version if served.engine is not None else None
        self._on_status()


def _install_failed(identity: str, error: Exception) -> ServiceError:
    return ServiceError(
        "install_failed",
        f"the weights of {identity} could not be written: {error}",
        do="The replica reloads everything from the nearest anchor.",
        details={"identity": identity},
        retryable=True,
    )


def _check_kept(mirror: Mirror) -> None:
    """Check a host copy that was kept over a restart once more, now that an engine is opened on it.

    Raises:
        SnapshotError: `checksum_mismatch`; the copy is dropped, so that the next attempt starts from an anchor.
    """
    known = mirror.adler32
    for name, tensor in mirror.tensors.items():
        if compute_adler32(tensor) != known[name]:
            mirror.forget()
            raise SnapshotError(
                "checksum_mismatch", "the host copy was damaged on disk", where=f"tensor {name}", retryable=True
            )
