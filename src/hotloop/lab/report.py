"""The report of one run: a page without scripts that can be read, saved and printed.

Owns: `read_report` and `render_report`. Everything in it comes from the run folder: what ran, how it ended, the numbers
that were drawn, and the last rollouts.

Promises: all text is escaped, so what a model wrote stays text. No script, no other host, no inline style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import orjson

from hotloop.lab.rollouts import list_rounds, read_round
from hotloop.telemetry.jsonl import read_lines
from hotloop.units import format_seconds

COLUMNS = (
    ("rollout/raw_reward", "reward"),
    ("eval/sampled", "held-out"),
    ("train/ppo_kl", "KL"),
    ("train/pg_clipfrac", "clipped"),
    ("train/tis_clipfrac", "correction"),
    ("train/train_rollout_logprob_abs_diff", "mismatch"),
    ("staleness/max", "staleness"),
    ("rollout/response_len/mean", "tokens"),
    ("perf/step_time", "seconds"),
)
MAX_ROWS = 60
_WIDTH, _HEIGHT = 720, 160


def read_report(run: Path) -> dict[str, Any]:
    """Collect a run's own files: what ran, every round, what happened, how it ended."""

    def read(name: str) -> Any:
        path = run / name
        return orjson.loads(path.read_bytes()) if path.is_file() else None

    return {
        "experiment": read("experiment.json"),
        "metrics": list(read_lines(run / "metrics.jsonl")),
        "events": list(read_lines(run / "events.jsonl")),
        "summary": read("summary.json"),
    }


def render_report(run: Path, info: Mapping[str, Any], static: Path) -> str:
    """Write the report as HTML.

    Args:
        info: what the run shelf tells about the run.
        static: the built page, whose style sheet the report uses.
    """
    report = read_report(run)
    metrics: Sequence[Mapping[str, Any]] = report["metrics"]
    parts = [
        f"<h1>Run {escape(str(info['run_id']))}</h1>",
        f'<p class="q">{escape(str(info["title"]))}, {escape(str(info["state"]))}, {len(metrics)} rounds. '
        "A toy policy on a CPU: it says nothing about GPU speed or memory.</p>",
        _render_outcome(report["summary"]),
        _render_curve(metrics),
        _render_account((report["experiment"] or {}).get("rehearsal") or {}),
        _render_metrics(metrics),
        _render_rollouts(run),
    ]
    style = _find_style(static)
    link = f'<link rel="stylesheet" href="/{escape(style, quote=True)}">' if style else ""
    head = f'<meta charset="utf-8"><title>Run {escape(str(info["run_id"]))}</title>{link}'
    body = f'<main class="report">{"".join(parts)}</main>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _find_style(static: Path) -> str:
    index = static / "index.html"
    found = re.search(r'href="\./(assets/[^"]+\.css)"', index.read_text(encoding="utf-8")) if index.is_file() else None
    return found[1] if found else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _render_outcome(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "<p>It has not come to its end, so it has no summary.</p>"
    rows = [
        [
            f"held-out accuracy, {name}",
            _number(summary.get(f"eval_{name}_before")),
            _number(summary.get(f"eval_{name}_after")),
        ]
        for name in ("greedy", "sampled")
    ]
    wall = summary.get("wall_s")
    took = f"<p>{format_seconds(wall)} in all.</p>" if isinstance(wall, float) else ""
    return f"<h2>Outcome</h2>{_table(['', 'before', 'after'], rows)}{took}"


def _render_curve(metrics: Sequence[Mapping[str, Any]]) -> str:
    rewards = [record["rollout/raw_reward"] for record in metrics if "rollout/raw_reward" in record]
    if len(rewards) < 2:
        return ""
    step = _WIDTH / (len(rewards) - 1)
    points = " ".join(f"{i * step:.1f},{_HEIGHT - 1 - value * (_HEIGHT - 2):.1f}" for i, value in enumerate(rewards))
    label = f"Reward from {rewards[0]:.2f} to {rewards[-1]:.2f} in {len(rewards)} rounds"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    return (
        f'<h2>Reward, 0 to 1</h2><svg {size} role="img" aria-label="{label}">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--sunken)"/>'
        f'<polyline points="{points}" fill="none" stroke="var(--train)" stroke-width="2"/></svg>'
    )


def _render_account(account: Mapping[str, Any]) -> str:
    parts = []
    for key, title in (("kept", "Kept"), ("replaced", "Replaced"), ("not_rehearsed", "Not rehearsed")):
        entries = account.get(key) or []
        if entries:
            names = [name for name in ("name", "value", "before", "after", "why") if any(name in e for e in entries)]
            rows = [[_plain(entry.get(name)) for name in names] for entry in entries]
            parts.append(f"<h2>{title}</h2>{_table(names, rows)}")
    return "".join(parts)


def _plain(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()


def _render_metrics(metrics: Sequence[Mapping[str, Any]]) -> str:
    if not metrics:
        return ""
    shown = [pair for pair in COLUMNS if any(pair[0] in record for record in metrics)]
    every = -(-len(metrics) // MAX_ROWS)
    chosen = [record for i, record in enumerate(metrics) if i % every == 0 or i == len(metrics) - 1]
    rows = [[str(record["round"]), *(_number(record.get(name)) for name, _ in shown)] for record in chosen]
    note = f"<p>Every {every}. round.</p>" if every > 1 else ""
    return f"<h2>Rounds</h2>{note}{_table(['round', *(title for _, title in shown)], rows)}"


def _render_rollouts(run: Path) -> str:
    rounds = list_rounds(run)
    if not rounds:
        return ""
    page = read_round(run, rounds[-1], 0)
    rows = [
        [str(r["index"]), r["response"], _number(r["reward"]), r["reason"], _number(r["advantage"])]
        for r in page["rollouts"]
    ]
    head = ["#", "response", "reward", "reason", "advantage"]
    return f"<h2>A group of round {rounds[-1]}</h2><pre>{escape(page['prompt'])}</pre>{_table(head, rows)}"
