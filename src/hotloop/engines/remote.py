"""What the adapters of remote engine servers share: calls, a local checkpoint that is kept current, version labels.

Owns: `RemoteServer` (calls with the errors of the Engine port) and `LocalCheckpoint`, the directory that a server
reloads.
Promises: a server's refusal, also one that comes with HTTP 200, is `engine_error` and changes no version here; new
bytes are written at absolute positions, so that writing them twice does no harm.
Does not do: one server's routes (sglang.py, vllm.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from hotloop.engines.base import TensorRange
from hotloop.errors import HotloopError, InputError, ServiceError
from hotloop.types import VersionSpan

CALL_TIMEOUT_S = 600.0
_DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1}


class RemoteServer:
    """One engine server's HTTP routes."""

    def __init__(self, url: str, *, name: str) -> None:
        """Prepare.

        Raises:
            InputError: `engine_address` when there is none.
        """
        if not url.startswith(("http://", "https://")):
            raise InputError(
                "engine_address",
                f"{url!r} is not the address of a {name} server",
                where="engine.url",
                do="Set engine.url.",
            )
        self._url = url.rstrip("/")
        self._name = name
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=CALL_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, str] | None = None
    ) -> Any:
        """Call a route and return its JSON, or its text where it answers none.

        Raises:
            ServiceError: `engine_error`, for any status but 2xx and for a body that says `success: false`.
        """
        try:
            async with self._open().request(method, self._url + path, json=body, params=query) as answer:
                text = await answer.text()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.failure(path, f"does not answer ({type(error).__name__})") from None
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = text
        if status >= 400:
            raise self.failure(path, f"answered {status}: {text[:300]}")
        if isinstance(parsed, dict) and (parsed.get("success") is False or "error" in parsed):
            raise self.failure(path, f"answered {status} with an error: {text[:300]}")
        return parsed

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event, up to `[DONE]`.

        Raises:
            ServiceError: `engine_error`, also for an error inside the stream.
        """
        try:
            async with self._open().post(self._url + path, json=body) as answer:
                if answer.status >= 400:
                    raise self.failure(path, f"answered {answer.status}: {(await answer.text())[:300]}")
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise self.failure(path, f"broke off: {event['error']}")
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.failure(path, f"broke off ({type(error).__name__})") from None

    def failure(self, path: str, why: str) -> ServiceError:
        """Make the error of one call."""
        return ServiceError("engine_error", f"{self._name}{path} {why}", where=self._url, retryable=True)


class LocalCheckpoint:
    """A directory with one `model.safetensors` that a server reloads its weights from."""

    def __init__(self, directory: Path) -> None:
        """Read the header.

        Raises:
            InputError: `checkpoint_unreadable`.
        """
        self.directory = directory
        self._path = directory / "model.safetensors"
        try:
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise InputError("checkpoint_unreadable", f"cannot be read ({error})", where=str(self._path)) from None
        self._start = 8 + length
        self._offsets: dict[str, tuple[int, int]] = {
            name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"
        }

    def write(self, ranges: Sequence[TensorRange], tensors: Mapping[str, Any]) -> None:
        """Write new bytes in place.

        Raises:
            ServiceError: `install_failed` for a tensor or a range that the checkpoint does not have.
        """
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            for each in ranges:
                begin, end = self._find(each.name)
                data, at = memoryview(each.data).cast("B"), 0
                for offset, length in zip(each.offsets.tolist(), each.lengths.tolist(), strict=True):
                    if begin + offset + length > end:
                        raise _not_there(each.name, f"has no bytes at {offset} + {length}")
                    _write_at(descriptor, data[at : at + length], self._start + begin + offset)
                    at += length
            for name, values in tensors.items():
                begin, end = self._find(name)
                data = memoryview(np.ascontiguousarray(values).tobytes())
                if data.nbytes != end - begin:
                    raise _not_there(name, f"has {end - begin} bytes, the new one {data.nbytes}")
                _write_at(descriptor, data, self._start + begin)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _find(self, name: str) -> tuple[int, int]:
        if name not in self._offsets:
            raise _not_there(name, "is not in the checkpoint")
        return self._offsets[name]


def _not_there(name: str, why: str) -> ServiceError:
    return ServiceError("install_failed", f"tensor {name!r} {why}", retryable=True)


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def parse_spans(
    raw: Any, scalar: Any, num_tokens: int, identities: Mapping[int, str], current: int
) -> list[VersionSpan]:
    """Read a server's version spans; a server without spans gives the version at the end, for the whole answer.

    Args:
        raw: list of {version, start, end}, or None.
        scalar: the label at the end, or None.
        current: used for a label that is not a number (servers start with `default`).

    Raises:
        ServiceError: `engine_error` when the spans do not cover the tokens.
    """
    if num_tokens == 0:
        return []
    rows = raw or [{"version": scalar, "start": 0, "end": num_tokens}]
    spans = []
    for row in rows:
        version = int(row["version"]) if str(row["version"]).isdigit() else current
        spans.append(VersionSpan(int(row["start"]), int(row["end"]), version, identities.get(version, "")))
    covered = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != covered[:-1] or covered[-1] != num_tokens:
        raise ServiceError("engine_error", f"version spans {rows} do not cover {num_tokens} tokens")
    return spans


def check_served_sampling(temperature: float, top_p: float, top_k: int, min_p: float, name: str) -> None:
    """Refuse sampling for which the server cannot give both logprobs.

    Raises:
        InputError: `not_offered_by_engine`.
    """
    is_truncated = top_p < 1 or top_k > 0 or min_p > 0
    if temperature not in (0.0, 1.0) or is_truncated:
        raise InputError(
            "not_offered_by_engine",
            f"{name} records one logprob a token, which is exact for the sampler and the raw policy only at temperature"
            " 1 (or 0) without top-p, top-k and min-p",
            where="sampling",
            do="Set temperature 1, top_p 1 and top_k -1, or use the torch engine.",
        )


def refuse_unoffered(name: str, **wanted: Any) -> HotloopError | None:
    """Return the error of the first wanted thing that a server does not offer, or None."""
    for what, value in wanted.items():
        if value:
            return InputError("not_offered_by_engine", f"{name} does not give {what}", where=what, do="Leave it out.")
    return None
