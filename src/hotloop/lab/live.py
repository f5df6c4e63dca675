"""Follow a growing run folder: lines of JSONL files as events with ids that survive a reload.

Owns: `Cursor` (where a reader stands in each file), `read_new_lines` (pure over bytes on disk), `follow` (the event
stream of one run).

Promises: an event's id is the cursor after it, so a reader that comes back with the last id it saw gets exactly what
it missed. A file that became shorter (a resumed run cuts its last rounds) gives one `reset` event and is read again
from its start. A line without its newline is not read yet. Memory does not grow with the run: nothing read is kept.

Does not do: starting or stopping runs (runs.py).

    metrics.jsonl --+
                    +--> follow --> events --> server-sent events --> page
    events.jsonl ---+       ^
                            +-- polls every POLL_S until the run has ended and both files are read
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

POLL_S = 0.2
HEARTBEAT_S = 10.0
MAX_READ_BYTES = 1 << 20
"""Bytes read of one file at a time, so that a late reader of a long run does not stall the others."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Byte offsets already read of metrics.jsonl and events.jsonl."""

    metrics: int = 0
    events: int = 0

    def __str__(self) -> str:
        return f"{self.metrics}-{self.events}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read an id back; anything that is not one means the start."""
        head, _, tail = text.partition("-")
        return (
            cls(int(head), int(tail))
            if head.isascii() and head.isdigit() and tail.isascii() and tail.isdigit()
            else cls()
        )


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """One event for the page: its kind, its JSON text, and the cursor after it."""

    kind: str
    data: str
    cursor: Cursor | None = None
    """None: the event moves nobody forward, such as a change of state."""

    def render(self) -> str:
        """Write it in the server-sent events format."""
        identity = f"id: {self.cursor}\n" if self.cursor else ""
        return f"{identity}event: {self.kind}\ndata: {self.data}\n\n"


def read_new_lines(path: Path, offset: int) -> tuple[list[tuple[str, int]], bool]:
    """Read the complete lines after a byte offset.

    Returns: pairs of line and the offset after it, and whether the file is shorter than the offset, in which case
    nothing is read and the caller starts again at 0.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [], offset > 0
    if size < offset:
        return [], True
    if size == offset:
        return [], False
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read(MAX_READ_BYTES)
        while b"\n" not in chunk:
            more = file.read(MAX_READ_BYTES)
            if not more:
                return [], False
            chunk += more
    lines: list[tuple[str, int]] = []
    for line in chunk.split(b"\n")[:-1]:
        offset += len(line) + 1
        if line.strip():
            lines.append((line.decode("utf-8", "replace"), offset))
    return lines, False


def read_new_events(folder: Path, cursor: Cursor) -> tuple[list[LiveEvent], Cursor]:
    """Read what both files gained since a cursor, metrics first."""
    events: list[LiveEvent] = []
    for name, kind in (("metrics", "metrics"), ("events", "span")):
        lines, was_cut = read_new_lines(folder / f"{name}.jsonl", getattr(cursor, name))
        if was_cut:
            cursor = Cursor()
            return [LiveEvent("reset", "{}", cursor)], cursor
        for line, offset in lines:
            cursor = replace(cursor, **{name: offset})
            events.append(LiveEvent(kind, line, cursor))
    return events, cursor


async def follow(
    folder: Path,
    cursor: Cursor,
    describe: Callable[[], tuple[str, bool]],
    *,
    is_closing: Callable[[], bool] = lambda: False,
    poll_s: float = POLL_S,
    enrich: Callable[[Path, str], str] | None = None,
) -> AsyncIterator[str]:
    """Yield server-sent events of a run until it has ended and everything is read.

    Args:
        folder: the run folder; it may not exist yet.
        describe: gives the run's state as JSON text and whether it has ended; sent as `state` whenever it changes.
        is_closing: the server ends; the stream then breaks off without an `end`, and the page tries to come back.
        enrich: adds to a metrics line what the page draws beside it; gets the folder and the line.
    """
    last_state = ""
    idle_s = 0.0
    while not is_closing():
        state, has_ended = describe()
        events, cursor = await asyncio.to_thread(_read_enriched, folder, cursor, enrich)
        has_read = bool(events)
        if state != last_state:
            last_state = state
            events.insert(0, LiveEvent("state", state))
        if events:
            idle_s = 0.0
            yield "".join(event.render() for event in events)
            if has_read:
                continue
        if has_ended:
            yield LiveEvent("end", state).render()
            return
        await asyncio.sleep(poll_s)
        idle_s += poll_s
        if idle_s >= HEARTBEAT_S:
            idle_s = 0.0
            yield ": still here\n\n"


def _read_enriched(
    folder: Path, cursor: Cursor, enrich: Callable[[Path, str], str] | None
) -> tuple[list[LiveEvent], Cursor]:
    events, cursor = read_new_events(folder, cursor)
    if enrich is None:
        return events, cursor
    told = [replace(event, data=enrich(folder, event.data)) if event.kind == "metrics" else event for event in events]
    return told, cursor
