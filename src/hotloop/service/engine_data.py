"""`nvext.engine_data`, schema 1: which policy made each token, and with what probability.

Owns: the block of one completion or of one slice of it, and its base64 form.
Promises: absent data is an absent field, never null; slices of one completion concatenate to the block of the whole;
`policy_version` is that of the oldest token, so a staleness test on it is safe.
Does not do: text (responses.py).
Source: hot_load.md section 8.1.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hotloop.types import Completion

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """How a client wants the block written."""

    encoding: Literal["list", "base64"] = "list"
    routed_experts_layers: Literal["all", "moe"] = "all"
    moe_layers: tuple[int, ...] = ()
    """Indices of the layers that have experts."""
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """What a replica serves at this moment; used where a completion has no token to tell."""

    replica_id: str
    policy_version: int
    snapshot_identity: str


def completion_block(
    completion: Completion,
    serving: Serving,
    options: BlockOptions,
    *,
    prompt_ids: Sequence[int] | None,
    start_version: int | None = None,
) -> dict[str, Any]:
    """Describe one completion, or the slice of it that a stream's chunk carries.

    Args:
        prompt_ids: the prompt; None in every chunk of a stream but the first.
        start_version: version of the completion's first token, when `completion` is a later slice.
    """
    spans = completion.version_spans
    first = spans[0].policy_version if spans else serving.policy_version
    last_version = spans[-1].policy_version if spans else serving.policy_version
    oldest = first if start_version is None else start_version
    block: dict[str, Any] = {
        "policy_version": oldest,
        "policy_version_start": oldest,
        "policy_version_end": last_version,
        "snapshot_identity": spans[-1].snapshot_identity if spans else serving.snapshot_identity,
        "version_spans": [
            {
                "start": span.start,
                "end": span.end,
                "policy_version": span.policy_version,
                "snapshot_identity": span.snapshot_identity,
            }
            for span in spans
        ],
        "completion_token_ids": _integers(completion.token_ids, options),
        "sampling_logprobs": _floats(completion.sampling_logprobs, options),
        "logprobs": _floats(completion.logprobs, options),
    }
    if prompt_ids is not None:
        block["prompt_token_ids"] = _integers(prompt_ids, options)
    top = completion.top_logprobs
    if top is not None:
        block["top_logprobs"] = {"k": top.k, "kind": top.kind, "token_ids": top.token_ids, "logprobs": top.logprobs}
    support = completion.support
    if support is not None:
        block["top_p_mask"] = {
            "offsets": _integers(support.offsets, options),
            "token_ids": _integers(support.token_ids, options),
        }
    routes = routed_experts_field(completion, options)
    if routes is not None:
        block["routed_experts"] = routes
    return block


def routed_experts_field(completion: Completion, options: BlockOptions) -> dict[str, Any] | None:
    """Write the expert routes as base64 of little-endian C-order integers, or None for a dense policy."""
    routes = completion.routed_experts
    if routes is None or options.num_experts == 0:
        return None
    dtype = np.dtype("uint8" if options.num_experts <= 256 else "<u2")
    array = np.ascontiguousarray(routes, dtype=dtype)
    if options.routed_experts_layers == "moe":
        array = np.ascontiguousarray(array[:, list(options.moe_layers), :])
    return {
        "data": base64.b64encode(array.tobytes()).decode(),
        "dtype": "uint8" if dtype.itemsize == 1 else "uint16",
        "shape": list(array.shape),
        "start": completion.routed_experts_start,
        "layers": options.routed_experts_layers,
    }


def routing_matrices(completion: Completion, options: BlockOptions, prompt_len: int) -> list[str | None]:
    """Return per completion token the base64 uint8 [moe_layers, top_k] row that produced it; None where it has none.

    The row that produced a token is that of the position before it. More than 256 experts do not fit this form.
    """
    routes = completion.routed_experts
    if routes is None or not 0 < options.num_experts <= 256:
        return [None] * len(completion.token_ids)
    rows: list[str | None] = []
    for position in range(len(completion.token_ids)):
        row = prompt_len - 1 + position - completion.routed_experts_start
        if not 0 <= row < len(routes):
            rows.append(None)
            continue
        matrix = np.ascontiguousarray(routes[row][list(options.moe_layers)], dtype=np.uint8)
        rows.append(base64.b64encode(matrix.tobytes()).decode())
    return rows


def _integers(values: Sequence[int], options: BlockOptions) -> Any:
    return _array(np.asarray(values, "<i4"), "int32") if options.encoding == "base64" else list(values)


def _floats(values: Sequence[float], options: BlockOptions) -> Any:
    return _array(np.asarray(values, "<f4"), "float32") if options.encoding == "base64" else list(values)


def _array(values: np.ndarray[Any, Any], dtype: str) -> dict[str, Any]:
    return {"data": base64.b64encode(values.tobytes()).decode(), "dtype": dtype, "shape": list(values.shape)}
