"""The stepwise core: continuous batching over rows, synchronous and single-threaded.

Owns: the queue of requests, which completions are in flight, which row each is drawn from, and the step:

    step():  queue -> admit -> prefill -> draw -> split rows -> decode one token per row -> draw -> split rows -> events

A *row* is a distinct sequence so far; a *completion* is one answer. Completions of a request that have drawn equal
tokens share one row until they differ (`merges_prefixes`): exact, because the next distribution depends on the
sequence alone, and each completion keeps its own random numbers. Rows stay dense (0 .. n-1): when rows end or split,
the survivors' keys and values are copied into the holes.

Promises: see engines/base.py. Nothing here is per token and per row in Python unless a request asks for stop strings,
top logprobs, support or streaming.

Does not do: threads, asyncio (engine.py), the forward pass (runner.py), random numbers (draw.py), records (record.py).

Shapes: n rows, C completions, P prompts, V vocabulary, L layers, E experts per token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotloop.engines.base import Chunk, GenerateRequest
from hotloop.engines.torch.draw import (
    Distribution,
    Drawn,
    Shape,
    compute_distribution,
    compute_keys,
    draw,
    draw_raw_one,
    draw_raw_row,
    to_word,
)
from hotloop.engines.torch.heads import record_heads
from hotloop.engines.torch.prefix import PrefixCache
from hotloop.engines.torch.record import Numbers, RecordBuffer, Wanted
from hotloop.engines.torch.rows import plan_rows
from hotloop.engines.torch.runner import Prefill, Runner
from hotloop.engines.torch.stops import StopTable
from hotloop.engines.torch.trunk import MIN_PROMPT_TOKENS, MIN_ROWS_PER_TRUNK, TrunkStore
from hotloop.models.tokenizer import StopMatcher, Tokenizer
from hotloop.types import Completion, FinishReason

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Live:
    """One request in the engine."""

    request: GenerateRequest
    seed: int
    streams: bool
    wanted: Wanted
    shape: Shape
    limit: int
    """Tokens per completion, cut at the end of the context."""
    prompt: list[int]
    unfinished: int = 0
    cached_tokens: int = 0
    prompt_routes: npt.NDArray[np.generic] | None = None
    prompt_logprobs: list[float | None] | None = None
    matchers: list[StopMatcher] | None = None
    is_plain: bool = False
    """No optional head and no routes: its records need nothing but numbers."""
    sent: list[int] = field(default_factory=list)
    """[n] tokens already sent of each completion (streaming)."""


@dataclass(frozen=True, slots=True)
class Event:
    """Chunks of one request that became ready in a step."""

    live: Live
    chunks: list[Chunk]
    is_last: bool


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    row_tokens: int = 0
    """Tokens that went through the decoder one at a time; less than drawn tokens when prefixes are shared."""
    drawn_tokens: int = 0
    busy_s: float = 0.0


class Core:
    """Requests in, events out, one `step` at a time."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        route_shape: tuple[int, int] | None,
        route_dtype: type[np.generic] = np.uint8,
        prefix_cache_tokens: int = 0,
        merges_prefixes: bool = True,
        open_tokenizer: Callable[[], Tokenizer] | None = None,
    ) -> None:
        self._runner = runner
        self._vocab = vocab_size
        self._merges = merges_prefixes
        self._open_tokenizer = open_tokenizer
        self._route_shape = route_shape
        self._queue: deque[Live] = deque()
        self._record = RecordBuffer(runner.num_slots, route_shape, route_dtype)
        self._prefix = PrefixCache(prefix_cache_tokens) if prefix_cache_tokens > 0 else None
        self.counters = Counters()
        self.policy_version = 0
        self.snapshot_identity = ""
        # Rows 0 .. n-1.
        self._num_rows = 0
        self._row_token = np.zeros(runner.num_slots, dtype=np.int64)
        self._row_length = np.zeros(runner.num_slots, dtype=np.int64)
        # Completions in flight, one entry each.
        self._slot = np.zeros(0, dtype=np.int64)
        self._row = np.zeros(0, dtype=np.int64)
        self._token = np.zeros(0, dtype=np.int64)
        self._count = np.zeros(0, dtype=np.int64)
        self._limit = np.zeros(0, dtype=np.int64)
        self._shape = np.zeros(0, dtype=np.int64)
        self._stops = np.zeros(0, dtype=np.int64)
        self._trunk = np.zeros(0, dtype=np.int64)
        """Id of the shared prompt that each completion began with, -1 for none."""
        self._trunks = TrunkStore()
        self._owner: dict[int, tuple[Live, int]] = {}
        """Slot -> request and index."""
        self._shapes: dict[Shape, int] = {}
        self._known_shapes: list[Shape] = []
        """The same, by number."""
        self._stop_sets = StopTable(vocab_size)
        self._num_watched = 0
        """Requests in flight that need per-token work in Python."""
        self._num_routed = 0
        """Requests in flight that want routes."""

    @property
    def has_work(self) -> bool:
        """True when a step would do something."""
        return bool(self._queue) or len(self._slot) > 0

    @property
    def num_queued(self) -> int:
        """Requests that wait for slots."""
        return len(self._queue)

    @property
    def num_active(self) -> int:
        """Completions in flight."""
        return len(self._slot)

    def submit(self, live: Live) -> None:
        """Queue a request that `engine.check_request` has accepted."""
        live.unfinished = live.request.n
        live.sent = [0] * live.request.n
        live.is_plain = not live.wanted.anything and not live.request.return_routed_experts
        self._queue.append(live)

    def step(self) -> list[Event]:
        """Admit what fits, then advance every row by one token."""
        began = time.perf_counter()
        events: list[Event] = []
        if self._queue:
            self._admit(events)
        n = self._num_rows
        if n:
            logits, routes = self._runner.decode(
                self._row_token[:n], self._row_length[:n], self._trunks.lay_out(self._row, self._trunk, n)
            )
            self._row_length[:n] += 1
            self.counters.row_tokens += n
            if routes is not None and self._num_routed:
                self._record.write_routes(self._slot, self._count - 1, routes[self._row])
            self._draw(logits, self._row, slice(None))
            self._settle(slice(None), events)
        self.counters.steps += 1
        self.counters.busy_s += time.perf_counter() - began
        return events

    def abort(self, request_id: str) -> list[Event]:
        """End the requests of this id with what they have; an unknown id gives no events."""
        found = {id(live): live for live in self._queue if live.request.request_id == request_id}
        for live, _ in self._owner.values():
            if live.request.request_id == request_id:
                found[id(live)] = live
        return [event for live in found.values() for event in self.abort_live(live)]

    def abort_live(self, live: Live) -> list[Event]:
        """End one request with what it has; nothing happens when it has ended already."""
        if live in self._queue:
            self._queue.remove(live)
            chunks = [self._empty_chunk(live, index, "abort") for index in range(live.request.n)]
            live.unfinished = 0
            return [Event(live, chunks, True)]
        events: list[Event] = []
        is_hit = np.array([self._owner[slot][0] is live for slot in self._slot.tolist()], dtype=np.bool_)
        if is_hit.any():
            self._finish(np.flatnonzero(is_hit), events, aborted=True)
            self._split_rows(~is_hit)
        return events

    def drop_everything(self) -> None:
        """Forget every request without events; after a step failed, when rows can no longer be trusted."""
        self._queue.clear()
        for slot in self._slot.tolist():
            self._owner.pop(slot, None)
            self._record.close(slot)
        self._num_watched = self._num_routed = 0
        self._split_rows(np.zeros(len(self._slot), dtype=np.bool_))

    def switch_version(self, version: int, identity: str) -> None:
        """Mark every token drawn from now on."""
        self.policy_version = version
        self.snapshot_identity = identity
        self._record.start_version(self._slot, self._count, version, identity)

    # -- admission ---------------------------------------------------------------------------------------------

    def _admit(self, events: list[Event]) -> None:
        room = self._runner.num_slots - len(self._slot)
        batch: list[Live] = []
        while self._queue and self._queue[0].request.n <= room:
            room -= self._queue[0].request.n
            batch.append(self._queue.popleft())
        if not batch:
            return
        first_row, first_completion = self._num_rows, len(self._slot)
        # Equal prompts of one namespace are one row: a group that arrives as n requests costs one prefill.
        distinct: dict[tuple[object, ...], int] = {}
        row_of = [
            distinct.setdefault(
                (live.request.cache_namespace, live.request.return_prompt_logprobs, *live.prompt), len(distinct)
            )
            for live in batch
        ]
        leaders: list[Live] = []
        for live, row in zip(batch, row_of, strict=True):
            if row == len(leaders):
                leaders.append(live)
        logits, prompt_routes, prompt_logprobs, cached = self._prefill(leaders, first_row)
        for live, row in zip(batch, row_of, strict=True):
            live.cached_tokens = cached[row]
            live.prompt_logprobs = prompt_logprobs.get(row)
            if live.request.return_routed_experts and prompt_routes is not None:
                live.prompt_routes = prompt_routes[row]
        self._row_length[first_row : first_row + len(leaders)] = [len(live.prompt) for live in leaders]
        self._num_rows += len(leaders)
        sizes = np.bincount(row_of, [live.request.n for live in batch])
        trunks = [self._open_trunk(live, first_row + offset, int(sizes[offset])) for offset, live in enumerate(leaders)]
        self._append(batch, [first_row + row for row in row_of], [trunks[row] for row in row_of])
        fresh = slice(first_completion, len(self._slot))
        self._draw(logits, self._row[fresh] - first_row, fresh)
        self._settle(fresh, events)

    def _prefill(
        self, leaders: Sequence[Live], first_row: int
    ) -> tuple[Tensor, list[npt.NDArray[np.generic]] | None, dict[int, list[float | None]], list[int]]:
        """Fill one row per distinct prompt; return last logits, routes, prompt logprobs and reused token counts."""
        prefills: list[Prefill] = []
        cached: list[int] = []
        old_routes: list[npt.NDArray[np.generic] | None] = []
        for offset, live in enumerate(leaders):
            wants_all = live.request.return_prompt_logprobs
            match = None
            if self._prefix is not None and not wants_all:
                match = self._prefix.find(live.request.cache_namespace, live.prompt)
            start = 0 if match is None else match.num_tokens
            if match is not None:
                self._runner.write_columns(first_row + offset, 0, match.columns)
            prefills.append(Prefill(first_row + offset, start, live.prompt[start:], wants_all))
            cached.append(start)
            old_routes.append(None if match is None else match.routes)
            self.counters.prompt_tokens += len(live.prompt) - start
            self.counters.cached_prompt_tokens += start
        result = self._runner.prefill(prefills)
        routes = result.routes
        if routes is not None:
            routes = [
                new if old is None else np.concatenate((old, new)) for old, new in zip(old_routes, routes, strict=True)
            ]
        if self._prefix is not None:
            for offset, live in enumerate(leaders):
                self._keep(live, first_row + offset, live.prompt, None if routes is None else routes[offset])
        logprobs: dict[int, list[float | None]] = {}
        for offset, all_logits in result.all_logits.items():
            prompt = leaders[offset].prompt
            rows = torch.log_softmax(all_logits[:-1], -1)
            following = torch.tensor(prompt[1:], device=rows.device)[:, None]
            logprobs[offset] = [None, *rows.gather(1, following)[:, 0].tolist()]
        return result.last_logits, routes, logprobs, cached

    def _keep(self, live: Live, row: int, ids: Sequence[int], routes: npt.NDArray[np.generic] | None) -> None:
        """Offer a row's tokens to the prefix cache."""
        assert self._prefix is not None
        if self._prefix.count_missing(live.request.cache_namespace, ids):
            columns = self._runner.read_columns(row, 0, len(ids))
            self._prefix.insert(live.request.cache_namespace, ids, columns, routes)

    def _open_trunk(self, live: Live, row: int, size: int) -> int:
        """Keep a long prompt's keys for the completions that start from it; -1 where that gains nothing."""
        if len(live.prompt) < MIN_PROMPT_TOKENS or size < MIN_ROWS_PER_TRUNK or not self._runner.reads_trunks:
            return -1
        return self._trunks.open(self._runner.read_columns(row, 0, len(live.prompt)))

    def _append(self, batch: Sequence[Live], rows: Sequence[int], trunks: Sequence[int]) -> None:
        """Enter the completions of admitted requests into the arrays."""
        counts = [live.request.n for live in batch]
        total = sum(counts)
        seeds: list[int] = []
        indices: list[int] = []
        for live, count in zip(batch, counts, strict=True):
            # A completion's own seed stands alone; one seed for the request is told apart by the index.
            own = live.request.seeds
            seeds.extend([to_word(seed) for seed in own] if own else [to_word(live.seed)] * count)
            indices.extend([0] * count if own else range(count))
            if live.request.params.stop:
                assert self._open_tokenizer is not None
                tokenizer = self._open_tokenizer()
                live.matchers = [StopMatcher(tokenizer, live.request.params.stop) for _ in range(count)]
            self._num_watched += _is_watched(live)
            self._num_routed += live.prompt_routes is not None
        keys = compute_keys(np.array(seeds, dtype=np.uint64), np.array(indices, dtype=np.int64))
        slots = self._record.open(keys, self.policy_version, self.snapshot_identity)
        owners = [(live, index) for live in batch for index in range(live.request.n)]
        self._owner.update(zip(slots.tolist(), owners, strict=True))
        per = [np.repeat(np.array(values, dtype=np.int64), counts) for values in self._per_request(batch, rows, trunks)]
        self._slot = np.concatenate((self._slot, slots))
        self._row = np.concatenate((self._row, per[0]))
        self._limit = np.concatenate((self._limit, per[1]))
        self._shape = np.concatenate((self._shape, per[2]))
        self._stops = np.concatenate((self._stops, per[3]))
        self._trunk = np.concatenate((self._trunk, per[4]))
        zeros = np.zeros(total, dtype=np.int64)
        self._count = np.concatenate((self._count, zeros))
        self._token = np.concatenate((self._token, zeros))

    def _per_request(self, batch: Sequence[Live], rows: Sequence[int], trunks: Sequence[int]) -> list[list[int]]:
        shapes = [self._shapes.setdefault(live.shape, len(self._shapes)) for live in batch]
        self._known_shapes = list(self._shapes)
        stops = [self._stop_sets.intern(live.request.params.stop_token_ids) for live in batch]
        return [list(rows), [live.limit for live in batch], shapes, stops, list(trunks)]

    # -- drawing -----------------------------------------------------------------------------------------------

    def _draw(self, logits: Tensor, rows: Ints, which: slice) -> None:
        """Draw the next token of some completions.

        Args:
            logits: [n, V] of the rows they are drawn from.
            rows: their rows as indices into `logits`.
            which: the completions, as a slice of the arrays.
        """
        shapes, counts = self._shape[which], self._count[which]
        is_one_row = logits.shape[0] == 1 and not self._num_watched and logits.device.type == "cpu"
        if is_one_row and len(shapes) == 1 and self._known_shapes[shapes.item(0)].is_raw:
            self._draw_alone(logits, which)
            return
        uniforms = self._record.uniforms(self._slot[which], counts)
        if shapes[0] == shapes[-1] and (shapes == shapes[0]).all():
            groups: list[tuple[int, Ints | slice]] = [(int(shapes[0]), slice(None))]
        else:
            groups = [(int(shape), np.flatnonzero(shapes == shape)) for shape in np.unique(shapes)]
        if is_one_row and len(groups) == 1 and self._known_shapes[groups[0][0]].is_raw:
            self._store(draw_raw_row(logits[0], uniforms), None, rows, which, slice(None))
            groups = []
        for shape_id, members in groups:
            part_rows = rows[members]
            part_logits = logits
            if not isinstance(members, slice):
                used, part_rows = np.unique(part_rows, return_inverse=True)
                part_logits = logits[torch.from_numpy(used).to(logits.device)]
            with torch.inference_mode():
                distribution = compute_distribution(part_logits, self._known_shapes[shape_id])
                drawn = draw(distribution, part_rows, uniforms[members])
            self._store(drawn, distribution, part_rows, which, members)
        self._count[which] += 1
        self.counters.drawn_tokens += len(shapes)

    def _draw_alone(self, logits: Tensor, which: slice) -> None:
        """Draw for the one completion of a slice from raw logits [1, V]: arrays of one cost more than what they do."""
        slot, count = self._slot[which].item(), self._count[which].item()
        token, logprob = draw_raw_one(logits.numpy()[0], self._record.uniform(slot, count))
        self._record.write_one(slot, count, token, logprob)
        self._token[which] = token
        self._count[which] = count + 1
        self.counters.drawn_tokens += 1

    def _store(
        self, drawn: Drawn, distribution: Distribution | None, rows: Ints, which: slice, members: Ints | slice
    ) -> None:
        slots, counts = self._slot[which][members], self._count[which][members]
        self._record.write(slots, counts, drawn.tokens, drawn.logprobs, drawn.sampling_logprobs)
        if isinstance(members, slice):
            self._token[which] = drawn.tokens
        else:
            view = self._token[which]
            view[members] = drawn.tokens
        if self._num_watched and distribution is not None:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                wanted = self._owner[slot][0].wanted
                if wanted.anything:
                    record_heads(self._record.heads(slot), distribution, row, wanted)

    # -- endings -----------------------------------------------------------------------------------------------

    def _settle(self, which: slice, events: list[Event]) -> None:
        """End the completions that are done, send what streams, and split the rows whose completions differ.

        Args:
            which: the completions that have just drawn a token.
        """
        if len(self._slot) == self._num_rows == 1 and not self._num_watched:
            token = self._token.item()
            if self._count.item() < self._limit.item() and not self._stop_sets.table[self._stops.item(), token]:
                self._row_token[0] = token
                return
        done = (self._count >= self._limit) | self._stop_sets.table[self._stops, self._token]
        if self._num_watched:
            done[which] |= self._match_strings(which)
        if done.any():
            self._finish(np.flatnonzero(done), events)
            self._split_rows(~done)
        elif len(self._slot) != self._num_rows:
            self._split_rows(None)
        else:
            self._row_token[self._row] = self._token
        if self._num_watched:
            self._stream(events)

    def _match_strings(self, which: slice) -> Bools:
        slots, tokens = self._slot[which].tolist(), self._token[which].tolist()
        hits = np.zeros(len(slots), dtype=np.bool_)
        for at, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
            live, index = self._owner[slot]
            if live.matchers is not None:
                hits[at] = live.matchers[index].push(token) is not None
        return hits

    def _finish(self, which: Ints, events: list[Event], *, aborted: bool = False) -> None:
        """Make the records of some completions and give their slots back."""
        ready: dict[int, tuple[Live, list[Chunk]]] = {}
        slots = self._slot[which].tolist()
        # A request for no tokens at all (prompt logprobs only) has drawn one that nobody sees.
        counts = np.minimum(self._count[which], self._limit[which]).tolist()
        tokens = self._token[which].tolist()
        is_stop = self._stop_sets.table[self._stops[which], self._token[which]].tolist()
        rows = self._row[which].tolist()
        lists = self._record.read(self._slot[which], max(counts))
        for at, (slot, count, token, stopped, row) in enumerate(zip(slots, counts, tokens, is_stop, rows, strict=True)):
            live, index = self._owner.pop(slot)
            reason: FinishReason = "length"
            stop_reason: str | int | None = None
            if aborted:
                reason = "abort"
            elif count and stopped:
                reason, stop_reason = "stop", token
            elif live.matchers is not None and live.matchers[index].matched is not None:
                reason, stop_reason = "stop", live.matchers[index].matched
            if live.is_plain and not live.sent[index]:
                chunk = self._cut_plain(live, index, slot, count, reason, stop_reason, lists.pick(at))
            else:
                chunk = self._cut(live, index, slot, live.sent[index], count, reason, stop_reason, lists.pick(at))
            ready.setdefault(id(live), (live, []))[1].append(chunk)
            if self._prefix is not None and count > 1 and not aborted:
                self._keep_answer(live, slot, row, count)
            self._record.close(slot)
            live.unfinished -= 1
        for live, chunks in ready.values():
            if live.unfinished == 0:
                self._num_watched -= _is_watched(live)
                self._num_routed -= live.prompt_routes is not None
            events.append(Event(live, chunks, live.unfinished == 0))

    def _keep_answer(self, live: Live, slot: int, row: int, count: int) -> None:
        """Keep prompt and answer for the next turn; the last token was never fed, so it has no key."""
        ids = live.prompt + self._record.tokens[slot, : count - 1].tolist()
        if self._route_shape is None or live.prompt_routes is None:
            routes = None
        else:
            routes = self._record.all_routes(slot, live.prompt_routes, count)
        if self._route_shape is None or routes is not None:
            self._keep(live, row, ids, routes)

    def _stream(self, events: list[Event]) -> None:
        """Send the new tokens of streaming requests whose completions go on."""
        chunks: dict[int, tuple[Live, list[Chunk]]] = {}
        for slot, count in zip(self._slot.tolist(), self._count.tolist(), strict=True):
            live, index = self._owner[slot]
            if live.streams and count > live.sent[index]:
                lists = self._record.read(np.array([slot]), count).pick(0)
                chunk = self._cut(live, index, slot, live.sent[index], count, None, None, lists)
                live.sent[index] = count
                chunks.setdefault(id(live), (live, []))[1].append(chunk)
        events.extend(Event(live, ready, False) for live, ready in chunks.values())

    def _cut_plain(
        self,
        live: Live,
        index: int,
        slot: int,
        count: int,
        reason: FinishReason,
        stop_reason: str | int | None,
        numbers: Numbers,
    ) -> Chunk:
        """Make what `_cut` makes of a whole completion without optional heads: half the time, for most completions."""
        ids, sampling_logprobs, logprobs = numbers
        completion = Completion(
            ids[:count],
            sampling_logprobs[:count],
            logprobs[:count],
            self._record.spans(slot, 0, count),
            reason,
            stop_reason,
            cached_tokens=live.cached_tokens,
        )
        return Chunk(live.request.request_id, index, completion, True, reason, live.prompt_logprobs)

    def _cut(
        self,
        live: Live,
        index: int,
        slot: int,
        start: int,
        stop: int,
        reason: FinishReason | None,
        stop_reason: str | int | None,
        numbers: Numbers,
    ) -> Chunk:
        completion = self._record.cut(
            slot,
            start,
            stop,
            numbers,
            finish_reason=reason or "length",
            stop_reason=stop_reason,
            wanted=live.wanted,
            cached_tokens=live.cached_tokens,
            prompt_routes=live.prompt_routes,
            prompt_length=len(live.prompt),
        )
        return Chunk(
            request_id=live.request.request_id,
            index=index,
            completion=completion,
            is_last=reason is not None,
            finish_reason=reason,
            prompt_logprobs=live.prompt_logprobs if start == 0 else None,
        )

    def _empty_chunk(self, live: Live, index: int, reason: FinishReason) -> Chunk:
        (slot,) = self._record.open(np.zeros(1, dtype=np.uint64), 0, "").tolist()
        chunk = self._cut(live, index, slot, 0, 0, reason, None, ([], [], []))
        self._record.close(slot)
        return chunk

    # -- rows --------------------------------------------------------------------------------------------------

    def _split_rows(self, keep: Bools | None) -> None:
        """Give every distinct sequence its own row, 0 .. n-1, copying keys and values as needed."""
        self._trunks.rows_changed = True
        if keep is not None:
            for name in ("_slot", "_row", "_token", "_count", "_limit", "_shape", "_stops", "_trunk"):
                setattr(self, name, getattr(self, name)[keep])
        if len(self._slot) == 0:
            self._num_rows = 0
            self._trunks.clear()
            return
        # Completions of different shapes may share a prompt's row but are told apart from here on.
        names = (self._row * len(self._shapes) + self._shape) * self._vocab + self._token if self._merges else None
        plan = plan_rows(self._row, names)
        lengths = self._row_length[plan.parent]
        moved_from, moved_to = plan.parent[plan.moves], plan.target[plan.moves]
        if len(moved_from):
            self._runner.copy_rows(moved_from, moved_to, int(lengths[plan.moves].max()))
        self._row_length[plan.target] = lengths
        self._row_token[plan.target] = self._token[plan.first]
        self._row = plan.row_of
        self._num_rows = len(plan.parent)


def _is_watched(live: Live) -> bool:
    return live.streams or live.wanted.anything or bool(live.request.params.stop)
