"""One compressed file per round with everything about every rollout: dump, the page's table and the report's source.

Owns: the record of a rollout (field names of slime's Sample, so that hooks and dumps move between the two), writing and
reading `rollout_<round>.jsonl.zst`, and the batch that a file replays to.

Promises: a file is there whole or not at all, and equal runs write equal bytes (no times in it). Replaying a file gives
the trainer the samples it had, so the same loss to 1e-6.
Does not do: metrics (batching.py), what slime writes itself.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from hotloop.loop.run_folder import write_bytes
from hotloop.trainers.base import Batch
from hotloop.types import Group, Rollout, Sample, Support

ZSTD_LEVEL = 1
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def write_rollouts(
    path: Path,
    groups: Sequence[Group],
    advantages: Mapping[int, float],
    dropped: Mapping[int, str],
    trainer_logprobs: Mapping[int, Sequence[float]] | None = None,
) -> int:
    """Write the rollouts of a round, one JSON object a line, and return the file's size in bytes.

    Args:
        groups: everything sampled for the round, groups that were dropped included.
        advantages: rollout id -> advantage, of the rollouts in the batch.
        dropped: group id -> why it is not in the batch.
        trainer_logprobs: rollout id -> what the trainer gave its tokens, of the rollouts that went through a pass.

    Raises:
        RunError: code `disk_full` or `write_failed`; no file is left.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    logprobs = _float_rows([rollout.completion.sampling_logprobs for rollout in rollouts])
    lines: list[bytes] = []
    for group in groups:
        # What siblings have in common is written once and pasted in front of each: most of a short answer's record.
        shared = orjson.dumps(_describe_group(group, dropped.get(group.group_id, "")))[:-1] + b","
        for rollout in group.rollouts:
            own = make_record(rollout, logprobs[len(lines)], advantages.get(rollout.rollout_id))
            given = (trainer_logprobs or {}).get(rollout.rollout_id)
            if given is not None:
                own["train_log_probs"] = np.array(given, np.float32)
            lines.append(shared + orjson.dumps(own, option=_OPTIONS)[1:])
    content = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(b"".join(lines))
    write_bytes(path, content, is_synced=False)
    return len(content)


def _describe_group(group: Group, dropped: str) -> dict[str, Any]:
    task = group.task
    record: dict[str, Any] = {
        "group_index": group.group_id,
        "task_id": task.task_id,
        "prompt": task.prompt,
        "label": task.label,
    }
    if dropped:
        record["dropped"] = dropped
    return record


def make_record(rollout: Rollout, logprobs: Any, advantage: float | None) -> dict[str, Any]:
    """Describe what is a rollout's own. The loss mask is all ones and left out.

    Args:
        logprobs: sampling logprobs as float32, [T].
        advantage: None for a rollout that was not trained on.
    """
    completion = rollout.completion
    spans = completion.version_spans
    score = rollout.score
    record: dict[str, Any] = {
        "index": rollout.index,
        "rollout_id": rollout.rollout_id,
        "response": rollout.response,
        "response_length": len(completion.token_ids),
        "tokens": rollout.prompt_ids + completion.token_ids,
        "rollout_log_probs": logprobs,
        "weight_versions": [str(span.policy_version) for span in spans],
        "version_spans": [[span.start, span.end, span.policy_version] for span in spans],
        "status": rollout.status,
        "reward": None if score is None else score.reward,
        "reason": rollout.failure if score is None else score.reason,
        "advantage": advantage,
    }
    if completion.logprobs != completion.sampling_logprobs:
        record["raw_log_probs"] = np.array(completion.logprobs, np.float32)
    if score is not None and score.parts:
        record["reward_parts"] = dict(score.parts)
    if completion.support is not None:
        record["rollout_top_p_token_ids"] = completion.support.token_ids
        record["rollout_top_p_token_offsets"] = completion.support.offsets
    if completion.routed_experts is not None:
        routes = np.ascontiguousarray(completion.routed_experts)
        record["rollout_routed_experts"] = {
            "shape": list(routes.shape),
            "dtype": str(routes.dtype),
            "start": completion.routed_experts_start,
            "base64": base64.b64encode(routes.tobytes()).decode(),
        }
    return record


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Read the records of one file in the order of their rollout ids."""
    with path.open("rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file).read()
    return [orjson.loads(line) for line in content.splitlines()]


def replay_batch(round_: int, records: Sequence[Mapping[str, Any]]) -> Batch:
    """Rebuild the batch that a round trained on from its rollout file."""
    samples: list[Sample] = []
    for record in records:
        if record["advantage"] is None:
            continue
        response_tokens = int(record["response_length"])
        prompt_tokens = len(record["tokens"]) - response_tokens
        samples.append(
            Sample(
                ids=list(record["tokens"]),
                mask=[0] * prompt_tokens + [1] * response_tokens,
                behaviour_logprobs=[0.0] * prompt_tokens + list(record["rollout_log_probs"]),
                advantages=[0.0] * prompt_tokens + [float(record["advantage"])] * response_tokens,
                rollout_id=int(record["rollout_id"]),
                group_id=int(record["group_index"]),
                oldest_policy_version=min((span[2] for span in record["version_spans"]), default=0),
                routed_experts=read_routes(record),
                support=read_support(record),
            )
        )
    return Batch(round_, samples, len(samples))


def read_support(record: Mapping[str, Any]) -> Support | None:
    """Return the tokens that survived top-p or top-k at each place, None when nothing was removed."""
    offsets = record.get("rollout_top_p_token_offsets")
    return None if offsets is None else Support(list(offsets), list(record["rollout_top_p_token_ids"]))


def read_routes(record: Mapping[str, Any]) -> Any:
    """Decode the expert routes of a record: [tokens - 1, layers, top_k], or None for a dense policy."""
    packed = record.get("rollout_routed_experts")
    if packed is None:
        return None
    flat = np.frombuffer(base64.b64decode(packed["base64"]), dtype=np.dtype(packed["dtype"]))
    return flat.reshape(packed["shape"])


def _float_rows(rows: Sequence[Sequence[float]]) -> list[Any]:
    """Cut one float32 array into rows: written with the digits of a float32, which is what the engine recorded."""
    flat = np.fromiter((value for row in rows for value in row), dtype=np.float32)
    ends = list(accumulate(len(row) for row in rows))
    return [flat[end - len(row) : end] for row, end in zip(rows, ends, strict=True)]
