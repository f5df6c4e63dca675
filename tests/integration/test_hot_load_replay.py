"""The oracle of a hot load: a token's recorded logprob is that of its version over the KV of the versions before it.

    prompt + tokens of span 1 under weights 1 --KV kept--> tokens of span 2 under weights 2 --KV kept--> ...

Versions differ by enough to tell: a neighbouring version, or a boundary moved by one token, disagrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_policy import PolicyTrainer, start_policy
from test_f29_f40_swaps import Stream

from hotloop.models.decoder import compute_logits, forward
from hotloop.models.weights import read_policy

TOLERANCE = 1e-3
NUM_SWAPS = 5
Span = tuple[int, int, int]


def shake(rng: np.random.Generator, values: Any) -> Any:
    """Change a fifth of a tensor by a tenth."""
    moved = values + rng.normal(0, 0.1, values.shape).astype(np.float32)
    return np.where(rng.random(values.shape) < 0.2, moved, values)


class Oracle:
    """Replays token ids under weights that change at given tokens."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._policies = {
            version: read_policy(trainer.directory(version), torch.float32) for version in range(1, trainer.version + 1)
        }

    @torch.inference_mode()
    def replay(self, prompt: Sequence[int], ids: Sequence[int], spans: Sequence[Span]) -> np.ndarray[Any, Any]:
        """Return the raw logprob of each token.

        Token t is drawn from the logits at position P + t - 1, which is computed by the weights of token t's version:
        the prompt by those of token 0, the token before t by those of t.
        """
        whole = [*prompt, *ids]
        kv: Any = None
        logits = []
        for start, end, version in spans:
            config, arena = self._policies[version]
            begin = 0 if start == 0 else len(prompt) + start - 1
            stop = len(prompt) + end - 1
            new = torch.tensor([whole[begin:stop]])
            positions = torch.arange(begin, stop)[None]
            out = forward(config, arena.params, new, positions, past=kv)
            kv = (
                out.kv
                if kv is None
                else [
                    (torch.cat((k, new_k), 1), torch.cat((v, new_v), 1))
                    for (k, v), (new_k, new_v) in zip(kv, out.kv, strict=True)
                ]
            )
            rows = compute_logits(config, arena.params, out.hidden_BTD)[0]
            logits.append(rows[-(end - start) :])
        logprobs = torch.log_softmax(torch.cat(logits), -1)
        return logprobs.gather(1, torch.tensor(list(ids))[:, None])[:, 0].numpy()


def gap(recorded: np.ndarray[Any, Any], replayed: np.ndarray[Any, Any]) -> float:
    return float(np.abs(recorded - replayed).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_recorded_logprob_is_that_of_the_replay_of_its_spans_and_of_no_other(tmp_path: Path, kind: str) -> None:
    trainer = PolicyTrainer(tmp_path, tmp_path / "bucket", kind=kind, change=shake)
    deployment = start_policy(trainer, tmp_path / "deployment")
    try:
        streams = []
        for _ in range(NUM_SWAPS):
            identity = trainer.publish_policy()
            streams += [Stream(deployment, prompt=[1, 13, 8 + seed, 5], seed=seed, max_tokens=400) for seed in range(2)]
            deployment.load(identity)
            deployment.wait_ready(identity)
        records = [read_stream(stream) for stream in streams]
    finally:
        deployment.stop()
    oracle = Oracle(trainer)
    num_crossed = 0
    for prompt, ids, recorded, spans in records:
        assert gap(recorded, oracle.replay(prompt, ids, spans)) < TOLERANCE
        for wrong in neighbours(spans, trainer.version):
            assert gap(recorded, oracle.replay(prompt, ids, wrong)) > 10 * TOLERANCE, (spans, wrong)
        num_crossed += len(spans) > 1
    assert num_crossed >= NUM_SWAPS, "the swaps came while requests were running"


def read_stream(stream: Stream) -> tuple[list[int], list[int], np.ndarray[Any, Any], list[Span]]:
    blocks = [event["nvext"]["engine_data"] for event in stream.finish()]
    ids = [token for block in blocks for token in block["completion_token_ids"]]
    logprobs = np.array([value for block in blocks for value in block["logprobs"]])
    return blocks[0]["prompt_token_ids"], ids, logprobs, stream.spans()


def neighbours(spans: list[Span], newest: int) -> list[list[Span]]:
    """Every single mistake: a span under the version before or after it, a boundary one token off."""
    found = []
    for at, (start, end, version) in enumerate(spans):
        for other in (version - 1, version + 1):
            if 1 <= other <= newest:
                found.append([*spans[:at], (start, end, other), *spans[at + 1 :]])
        if at:
            before = spans[at - 1]
            for moved in (start - 1, start + 1):
                if before[0] < moved < end:
                    found.append(
                        [*spans[: at - 1], (before[0], moved, before[2]), (moved, end, version), *spans[at + 1 :]]
                    )
    return found
