"""The rollouts of a finished round, page by page, with tokens as text.

Owns: `read_round` (one group at a time), `list_rounds`, `measure_round` (the uncertainty that a curve is drawn with),
and `TokenText`, which turns token ids into text with nothing but the run's own tokenizer.json.

Promises: what a model wrote is data: it leaves here as JSON strings and is never interpreted. Files are written whole
by the run, so what can be opened is complete.

Does not do: metrics (live.py).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import zstandard

from hotloop.errors import InputError

MAX_FILE_BYTES = 256 << 20
"""A round's file is not read beyond this when unpacked."""
WILSON_Z = 1.959964
_ROUND_FILE = re.compile(r"rollout_([0-9]+)\.jsonl\.zst")


class TokenText:
    """Token id -> text, from a tokenizer.json; ids that it does not know are shown in angle brackets."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    @classmethod
    def read(cls, folder: Path) -> TokenText:
        """Read `tokenizer.json` of a policy directory; without one, ids are shown as numbers."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls({})
        return _read_tokenizer(path, path.stat().st_mtime_ns)

    def of(self, token_id: int) -> str:
        """Give the text of one token."""
        return self._texts.get(token_id, f"<{token_id}>")


@lru_cache(maxsize=4)
def _read_tokenizer(path: Path, _written_ns: int) -> TokenText:
    document = orjson.loads(path.read_bytes())
    vocabulary = document.get("model", {}).get("vocab", {})
    pairs = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], i) for i, entry in enumerate(vocabulary))
    )
    is_byte_level = "ByteLevel" in orjson.dumps(document.get("decoder") or {}).decode()
    decode = _byte_level_text if is_byte_level else _plain_text
    texts = {int(index): decode(str(text)) for text, index in pairs}
    texts.update({int(entry["id"]): str(entry["content"]) for entry in document.get("added_tokens", [])})
    return TokenText(texts)


def _plain_text(text: str) -> str:
    return text.replace("\u2581", " ")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level vocabulary, back to bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in kept}
    rest = [byte for byte in range(256) if byte not in set(kept)]
    table.update({chr(256 + place): byte for place, byte in enumerate(rest)})
    return table


def _byte_level_text(text: str) -> str:
    table = _byte_table()
    if any(char not in table for char in text):
        return text
    return bytes(table[char] for char in text).decode("utf-8", "replace")


def list_rounds(run: Path) -> list[int]:
    """List the rounds whose rollouts are on disk, rising."""
    folder = run / "rollouts"
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _ROUND_FILE.fullmatch(path.name)))


def read_records(run: Path, round_: int) -> list[dict[str, Any]]:
    """Read every record of one round.

    Raises: InputError `round_unknown` when the round has no file.
    """
    path = run / "rollouts" / f"rollout_{round_}.jsonl.zst"
    try:
        packed = path.read_bytes()
    except FileNotFoundError:
        raise InputError("round_unknown", "the run has no rollouts of this round", where=f"round {round_}") from None
    return [orjson.loads(line) for line in _unpack(packed).splitlines()]


def _unpack(packed: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        return stream.read(MAX_FILE_BYTES)


def read_round(run: Path, round_: int, group: int) -> dict[str, Any]:
    """Give one group of a round: its rollouts with their tokens, and how many groups there are.

    Args:
        group: place of the group in the round, from 0.
    """
    records = read_records(run, round_)
    by_group: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_group.setdefault(int(record["group_index"]), []).append(record)
    order = list(by_group)
    if not 0 <= group < len(order):
        raise InputError("group_unknown", f"the round has {len(order)} groups", where=f"group {group}")
    text = TokenText.read(run / "policy")
    members = by_group[order[group]]
    rewards = [record["reward"] for record in members if record["reward"] is not None]
    return {
        "round": round_,
        "rounds": list_rounds(run),
        "group": group,
        "num_groups": len(order),
        "prompt": _prompt_text(members[0]["prompt"]),
        "label": members[0].get("label"),
        "mean_reward": statistics.fmean(rewards) if rewards else None,
        "std_reward": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "dropped": members[0].get("dropped", ""),
        "rollouts": [_describe(record, text) for record in members],
    }


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def _describe(record: Mapping[str, Any], text: TokenText) -> dict[str, Any]:
    length = int(record["response_length"])
    ids = record["tokens"][len(record["tokens"]) - length :]
    versions = [0] * length
    for start, end, version in record["version_spans"]:
        versions[start:end] = [version] * (end - start)
    return {
        "rollout_id": record["rollout_id"],
        "index": record["index"],
        "response": record["response"],
        "status": record["status"],
        "reward": record["reward"],
        "reason": record["reason"],
        "advantage": record["advantage"],
        "tokens": [text.of(token) for token in ids],
        "logprobs": list(record["rollout_log_probs"]),
        "gaps": _compute_gaps(record),
        "versions": versions,
    }


def _compute_gaps(record: Mapping[str, Any]) -> list[float] | None:
    """Trainer minus engine, per token; None where the run kept no trainer logprobs for this rollout."""
    trainer: Sequence[float] | None = record.get("train_log_probs")
    if trainer is None:
        return None
    return [ours - theirs for ours, theirs in zip(trainer, record["rollout_log_probs"], strict=True)]


def measure_round(run: Path, round_: int) -> float | None:
    """Standard error of a round's mean reward over its groups; None where it has fewer than two.

    Formula: sd(group means) / sqrt(groups); groups are independent, the rollouts inside one are not.
    """
    path = run / "rollouts" / f"rollout_{round_}.jsonl.zst"
    if not path.is_file():
        return None
    sums: dict[int, list[float]] = {}
    for line in _unpack(path.read_bytes()).splitlines():
        record = orjson.loads(line)
        if record["reward"] is not None and not record.get("dropped"):
            sums.setdefault(record["group_index"], []).append(record["reward"])
    if len(sums) < 2:
        return None
    return statistics.stdev([statistics.fmean(rewards) for rewards in sums.values()]) / math.sqrt(len(sums))


def compute_wilson(share: float, count: int) -> tuple[float, float]:
    """Bound a share of `count` independent trials, 95 %.

    Formula: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    Source: Wilson 1927, Journal of the American Statistical Association 22(158).
    """
    spread = WILSON_Z**2 / count
    middle = share + spread / 2
    half = WILSON_Z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
