"""What a person sees of a run: one live view on a terminal, plain lines elsewhere.

Owns: the Progress port; `LiveProgress` (rich), `PlainProgress` (lines for logs and pipes), `SilentProgress`;
`UnbreakableProgress`, which keeps a failing output from ending a run; and `WarmupProgress` for what comes before the
first round.

Promises: plain lines hold no control characters and no more than about `MAX_PLAIN_LINES` of a long run; a live view
redraws at most a few times a second, so that it costs a run nothing.
Does not do: numbers (they are the records of metrics.jsonl).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hotloop.units import format_seconds

MAX_PLAIN_LINES = 25
REDRAWS_PER_SECOND = 4
_SPARKS = "▁▂▃▄▅▆▇█"
_CURVE_POINTS = 40


class Progress(Protocol):
    """Told of everything a run does, in order."""

    def started(self, first_round: int, num_rounds: int) -> None: ...

    def evaluated(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None: ...

    def saved(self, round_: int, path: Path) -> None: ...

    def closed(self) -> None: ...


class SilentProgress:
    """Shows nothing."""

    def started(self, first_round: int, num_rounds: int) -> None: ...

    def evaluated(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None: ...

    def saved(self, round_: int, path: Path) -> None: ...

    def closed(self) -> None: ...


class UnbreakableProgress:
    """Passes everything on until writing fails (a closed pipe, a terminal that is gone), then shows nothing more.

    A run is worth more than its progress: whoever stops watching does not end it.
    """

    def __init__(self, inner: Progress) -> None:
        self._inner = inner

    def started(self, first_round: int, num_rounds: int) -> None:
        self._show(lambda inner: inner.started(first_round, num_rounds))

    def evaluated(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._show(lambda inner: inner.evaluated(round_, metrics))

    def round_done(self, record: Mapping[str, Any]) -> None:
        self._show(lambda inner: inner.round_done(record))

    def saved(self, round_: int, path: Path) -> None:
        self._show(lambda inner: inner.saved(round_, path))

    def closed(self) -> None:
        self._show(lambda inner: inner.closed())

    def _show(self, tell: Callable[[Progress], None]) -> None:
        try:
            tell(self._inner)
        except OSError:
            self._inner = SilentProgress()


class Eta:
    """Time left, from the mean time of the rounds so far; the evaluation before the first round does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first = 0
        self._num_rounds = 0

    def start(self, first_round: int, num_rounds: int) -> None:
        """Count from now: called at the start of a run and again when its first round begins."""
        self._first, self._num_rounds = first_round, num_rounds
        self._began = self._clock()

    def left_s(self, round_: int) -> float:
        """Estimate the seconds after a finished round until the end."""
        done = round_ + 1 - self._first
        return (self._clock() - self._began) / max(1, done) * (self._num_rounds - round_ - 1)


class PlainProgress:
    """Lines: every evaluation and save, and a thinned-out selection of rounds."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._eta = Eta(clock)
        self._every = 1
        self._num_rounds = 0

    def started(self, first_round: int, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._every = max(1, -(-(num_rounds - first_round) // MAX_PLAIN_LINES))
        self._eta.start(first_round, num_rounds)

    def evaluated(self, round_: int, metrics: Mapping[str, float]) -> None:
        if round_ < 0:
            self._eta.start(0, self._num_rounds)
        when = "before training" if round_ < 0 else f"after round {round_}"
        self._write(f"held-out {when}: greedy {metrics['eval/greedy']:.3f}, sampled {metrics['eval/sampled']:.3f}")

    def round_done(self, record: Mapping[str, Any]) -> None:
        round_ = int(record["round"])
        if (round_ + 1) % self._every and round_ + 1 != self._num_rounds:
            return
        self._write(
            f"round {round_ + 1}/{self._num_rounds}  reward {record['rollout/raw_reward']:.3f}"
            f"{render_entropy(record)}"
            f"  length {record['rollout/response_len/mean']:.1f}"
            f"  {1 / max(1e-9, record['perf/step_time']):.1f} rounds/s"
            f"  about {format_seconds(self._eta.left_s(round_))} left"
        )

    def saved(self, round_: int, path: Path) -> None:
        self._write(f"saved {path.name}")

    def closed(self) -> None: ...


class WarmupProgress:
    """Shows the supervised warm-up of a built-in policy: a line that changes on a terminal, nothing elsewhere."""

    def __init__(self, console: Console | None) -> None:
        self._status = None if console is None else console.status("")
        self._accuracy = ""

    def __enter__(self) -> WarmupProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, step: int, most: int, accuracy: float | None) -> None:
        """Take a step; `accuracy` when it was just measured."""
        if accuracy is not None:
            self._accuracy = f", sampled accuracy {accuracy:.2f}"
        if self._status is not None:
            self._status.update(f"warm-up: step {step} of at most {most}{self._accuracy}")


class LiveProgress:
    """One table that redraws in place: reward, held-out accuracy, speed, time left, and the curve so far."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=REDRAWS_PER_SECOND, transient=False)
        self._eta = Eta()
        self._num_rounds = 0
        self._record: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._drawn = 0.0

    def started(self, first_round: int, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._eta.start(first_round, num_rounds)
        self._live.start()

    def evaluated(self, round_: int, metrics: Mapping[str, float]) -> None:
        if round_ < 0:
            self._eta.start(0, self._num_rounds)
        self._evaluation = metrics
        self._draw()

    def round_done(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._rewards.append(float(record["rollout/raw_reward"]))
        now = time.monotonic()
        if now - self._drawn >= 1 / REDRAWS_PER_SECOND or record["round"] + 1 == self._num_rounds:
            self._drawn = now
            self._draw()

    def saved(self, round_: int, path: Path) -> None: ...

    def closed(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        table = Table.grid(padding=(0, 2))
        record = self._record
        if record:
            done = int(record["round"]) + 1
            table.add_row("round", f"{done} / {self._num_rounds}", ProgressBar(self._num_rounds, done, width=40))
            table.add_row("reward", f"{record['rollout/raw_reward']:.3f}", Text(render_curve(self._rewards)))
        if self._evaluation:
            greedy, sampled = self._evaluation["eval/greedy"], self._evaluation["eval/sampled"]
            table.add_row("held-out", f"{greedy:.3f} greedy", f"{sampled:.3f} sampled")
        if record:
            if "train/entropy_loss" in record:
                norm = f"gradient norm {record['train/grad_norm']:.3f}"
                table.add_row("entropy", f"{record['train/entropy_loss']:.3f}", norm)
            rate = f"{record['perf/tokens_per_gpu_per_sec']:,.0f} sampled tokens/s"
            table.add_row("speed", f"{1 / max(1e-9, record['perf/step_time']):.1f} rounds/s", rate)
            table.add_row("left", format_seconds(self._eta.left_s(int(record["round"]))), "")
        self._live.update(table)


def render_entropy(record: Mapping[str, Any]) -> str:
    """Write the entropy if the round has one: a round without any advantage computes none."""
    return f"  entropy {record['train/entropy_loss']:.3f}" if "train/entropy_loss" in record else ""


def render_curve(values: list[float], points: int = _CURVE_POINTS) -> str:
    """Draw values in 0..1 as a row of block characters, each the mean of its share of the values."""
    if not values:
        return ""
    width = min(points, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(_SPARKS[min(len(_SPARKS) - 1, max(0, int(mean * len(_SPARKS))))] for mean in means)
