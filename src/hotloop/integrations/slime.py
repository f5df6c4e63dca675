"""Functions that slime loads by their dotted path: an experiment's own reward, and the publisher of written policies.

Owns: `score` (for `--custom-rm-path`) and `publish_written` (for `--custom-update-weight-post-write-path`). The export
writes both names, and their settings as environment of the job: `HOTLOOP_REWARD` (the `[reward]` section as JSON) and
`ROLLOUT_BUCKET`.

Promises: the reward on the cluster is the same verifier as in the rehearsal. A written directory goes up file by file
with its index last, so that a reader sees all of it or nothing; only rank 0 uploads, after slime's barrier.

Does not do: import slime, torch or ray: slime's objects are read by attribute.

Source: slime 624b824a, slime/rollout/rm_hub and update_weight_from_disk_delta.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hotloop.errors import InputError
from hotloop.snapshots.bucket import Chunk
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.layout import INDEX_NAME
from hotloop.snapshots.retry import RetryPolicy
from hotloop.snapshots.upload import Payload, put_once
from hotloop.types import Completion, Rollout, Task
from hotloop.verifiers.base import Verifier, score_rollouts
from hotloop.verifiers.registry import build_verifier

REWARD_VARIABLE = "HOTLOOP_REWARD"
BUCKET_VARIABLE = "ROLLOUT_BUCKET"
_VERSION_DIRECTORY = re.compile(r"weight_v\d+")
_READ_BYTES = 8 * 1024**2


async def score(args: Any, sample: Any, **kwargs: Any) -> float | list[float]:
    """Score one slime sample, or a list of them under `--group-rm`, with the experiment's `[reward]`.

    Raises: InputError `reward_unset` when the job's environment lacks the reward; RunError of verifiers.base.
    """
    verifier = _open_reward(os.environ.get(REWARD_VARIABLE, ""))
    samples: Sequence[Any] = sample if isinstance(sample, list) else [sample]
    scores = await score_rollouts(verifier, [_as_rollout(each, place) for place, each in enumerate(samples)])
    rewards = [judged.reward for judged in scores]
    return rewards if isinstance(sample, list) else rewards[0]


@lru_cache(maxsize=4)
def _open_reward(text: str) -> Verifier:
    if not text:
        raise InputError(
            "reward_unset",
            "is not set in the job's environment, so the reward is unknown",
            where=REWARD_VARIABLE,
            do="Launch with the exported experiment.sh, which sets it.",
        )
    settings = json.loads(text)
    return build_verifier(settings.pop("kind"), **settings)


def _as_rollout(sample: Any, place: int) -> Rollout:
    """Read a slime sample as a rollout: prompt, response and label are all that a verifier looks at."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    prompt = sample.prompt if isinstance(sample.prompt, str) else tuple(sample.prompt)
    task = Task(str(sample.index), prompt, None if sample.label is None else str(sample.label), metadata)
    return Rollout(
        rollout_id=sample.index if isinstance(sample.index, int) else place,
        group_id=0,
        index=place,
        task=task,
        prompt_ids=[],
        completion=Completion([], [], [], [], "stop"),
        response=sample.response,
        status="completed",
    )


def publish_written(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Upload one written policy version to the bucket, under the name of its directory.

    slime calls this on every rank, and once with the base directory, which holds no version and is left alone: the base
    is published by hand before the run (`hotloop publish full`).

    Raises: InputError `bucket_unset`; SnapshotError `identity_conflict` when the bucket holds another run's version.
    """
    folder = Path(version_dir)
    if os.environ.get("RANK", "0") != "0" or not _VERSION_DIRECTORY.fullmatch(folder.name):
        return
    address = os.environ.get(BUCKET_VARIABLE, "")
    if not address:
        raise InputError(
            "bucket_unset",
            "is not set in the job's environment, so there is nowhere to publish",
            where=BUCKET_VARIABLE,
            do="Set export.publish and export again.",
        )
    bucket = open_bucket(address)
    files = sorted(
        (path for path in folder.iterdir() if path.is_file()), key=lambda path: (path.name == INDEX_NAME, path)
    )
    for path in files:
        payload = Payload.of_pieces(partial(_read, path))
        put_once(bucket, f"{folder.name}/{path.name}", payload, retry=RetryPolicy(), on_bytes=lambda count: None)


def _read(path: Path) -> Iterator[Chunk]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece
