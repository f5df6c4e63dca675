"""Cutting a whole completion into the slice that one chunk of a stream carries.

Promises: slices of one completion, concatenated, are the completion; version spans keep their absolute positions.
"""

from __future__ import annotations

from hotloop.types import Completion, Support, TopLogprobs, VersionSpan


def slice_completion(whole: Completion, start: int, end: int) -> Completion:
    """Return tokens [start, end) with everything recorded about them; routes stay with the last slice."""
    spans = [
        VersionSpan(max(span.start, start), min(span.end, end), span.policy_version, span.snapshot_identity)
        for span in whole.version_spans
        if span.start < end and span.end > start
    ]
    top, support = whole.top_logprobs, whole.support
    is_last = end == len(whole.token_ids)
    cut_support = None
    if support is not None:
        first = support.offsets[start]
        cut_support = Support(
            [offset - first for offset in support.offsets[start : end + 1]],
            support.token_ids[first : support.offsets[end]],
        )
    return Completion(
        token_ids=whole.token_ids[start:end],
        sampling_logprobs=whole.sampling_logprobs[start:end],
        logprobs=whole.logprobs[start:end],
        version_spans=spans,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason if is_last else None,
        top_logprobs=None
        if top is None
        else TopLogprobs(top.k, top.kind, top.token_ids[start:end], top.logprobs[start:end]),
        support=cut_support,
        routed_experts=whole.routed_experts if is_last else None,
        routed_experts_start=whole.routed_experts_start,
        cached_tokens=whole.cached_tokens if start == 0 else 0,
    )
