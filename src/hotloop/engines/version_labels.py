"""Whose tokens are these? A server's version labels, and what may be said of a request that crossed a write.

Owns: `Labels`. Pure bookkeeping: no I/O.
Promises: a token is never given a version that the server did not state or that is not certain: where weights changed
during a request and the server sends no spans, the request fails; a label that nobody here wrote is an error, except
the one that the server started with.
Source: SGLang 0.5.23 `weight_versions` and `weight_version` (the latter is the version at the end of a request only);
vLLM 0.33.0 `weight_versions` (final chunk only). docs/concepts/engine_adapters.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.errors import ServiceError
from hotloop.types import VersionSpan


@dataclass(frozen=True, slots=True)
class Started:
    """What was served when a request was sent."""

    version: int
    identity: str
    num_writes: int
    is_labelled: bool


class Labels:
    """The labels of one server."""

    def __init__(self, server_name: str) -> None:
        self._server_name = server_name
        self._known: dict[str, tuple[int, str]] = {}
        self._num_writes = 0
        self.version = 0
        self.identity = ""

    def start(self) -> Started:
        """Note what a request starts on."""
        return Started(self.version, self.identity, self._num_writes, bool(self._known))

    def begin_write(self) -> None:
        """From here on, tokens of running requests may be of either version."""
        self._num_writes += 1

    def cancel_write(self) -> None:
        """The server refused: nothing changed."""
        self._num_writes -= 1

    def finish_write(self, label: str, version: int, identity: str) -> None:
        """The server holds new weights under a label."""
        self._known[label] = (version, identity)
        self.version, self.identity = version, identity

    def is_certain(self, started: Started) -> bool:
        """Say whether every token that a request has so far is of the version it started on."""
        return started.num_writes == self._num_writes

    def spans(self, raw: Sequence[Any] | None, end_label: Any, num_tokens: int, started: Started) -> list[VersionSpan]:
        """Say who made each token.

        Args:
            raw: the server's list of {version, start, end}; None or empty where it sends none.
            end_label: its label at the end of the request; None where it sends none.

        Raises:
            ServiceError: `engine_error`.
        """
        if num_tokens == 0:
            return []
        if not raw:
            if not self.is_certain(started):
                raise self._error(
                    "weights changed during a request and the server sends no weight_versions, so nobody can say which"
                    " token is whose",
                    do="Use a newer server, or the transition SYNC.",
                )
            if end_label is not None and self._meaning(str(end_label), started)[0] != started.version:
                raise self._error(f"the server says version {end_label!r} where {started.version} was installed")
            return [VersionSpan(0, num_tokens, started.version, started.identity)]
        spans = [
            VersionSpan(int(row["start"]), int(row["end"]), *self._meaning(str(row["version"]), started)) for row in raw
        ]
        ends = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != ends[:-1] or ends[-1] != num_tokens:
            raise self._error(f"its version spans {list(raw)} do not cover {num_tokens} tokens")
        return spans

    def _meaning(self, label: str, started: Started) -> tuple[int, str]:
        if label in self._known:
            return self._known[label]
        if not started.is_labelled:
            return 0, ""  # the label that the server started with, such as `default`
        raise self._error(f"the server says version {label!r}, which was not installed from here: was it restarted?")

    def _error(self, why: str, do: str = "") -> ServiceError:
        return ServiceError("engine_error", f"{self._server_name}: {why}", do=do, retryable=True)


def clip_spans(spans: Sequence[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """Cut spans to tokens [start, end); positions stay absolute."""
    return [
        VersionSpan(max(span.start, start), min(span.end, end), span.policy_version, span.snapshot_identity)
        for span in spans
        if span.start < end and span.end > start
    ]
