"""The file of `hotloop serve`: one deployment, written by a person in YAML.

Owns: `DeploymentConfig`, its defaults, and reading it with the line of every error. `bucket` and `served_model_name`
suffice. Secrets are named here and never written here.
Does not do: reading secrets (secrets.py), starting anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hotloop.errors import InputError, Problem

_PLAIN = "Write plain YAML in UTF-8."


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Record):
    """Which engine a replica runs and how."""

    kind: Literal["torch", "fake", "sglang", "vllm"] = "torch"
    device: str = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    threads: int = Field(1, ge=1)
    max_slots: int = Field(64, ge=1)
    """Sequences decoded at a time; further requests wait in the replica's queue."""
    max_context: int = Field(0, ge=0)
    """Tokens of prompt and answer per sequence; 0 means the policy's own limit."""
    prefix_cache_tokens: int = Field(16384, ge=0)
    url: str = ""
    """Address of a running SGLang or vLLM server."""
    options: dict[str, Any] = Field(default_factory=dict)


class TransitionConfig(_Record):
    """How replicas move to new weights."""

    mode: Literal["ASYNC", "SYNC"] = "ASYNC"
    drain_timeout_s: float = Field(90.0, ge=0)
    max_concurrent_swaps: int = Field(0, ge=0)
    """Replicas that swap at a time; 0 means all."""


class LimitsConfig(_Record):
    """What a client may ask for and how long anything may take."""

    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    request_timeout_s: float = Field(600.0, gt=0)
    concurrency_per_replica: int = Field(256, ge=1)
    max_queue: int = Field(1024, ge=0)
    """Requests that may wait at the gateway for a replica with room."""
    queue_timeout_s: float = Field(60.0, gt=0)
    receive_timeout_s: float = Field(30.0, gt=0)
    """How long a client may take to send its headers, and again its body."""
    incomplete_wait_s: float = Field(60.0, ge=0)
    storage_budget_s: float = Field(600.0, gt=0)
    post_budget_s: float = Field(2.0, gt=0)
    """How long a POST may look at the bucket before it answers."""


class PeersConfig(_Record):
    """Nodes that read each object from the bucket once between them; they need one `partition`."""

    listen: str = ""
    """This node's own address, `http://host:port`, where it serves its delivery cache to the others."""
    nodes: tuple[str, ...] = ()
    """Addresses of all nodes, the same on each."""


class DeploymentConfig(_Record):
    """One deployment: replicas of one policy behind one address."""

    bucket: str
    served_model_name: str
    replicas: int = Field(1, ge=0, le=256)
    host: str = "127.0.0.1"
    port: int = Field(8800, ge=0, le=65535)
    state_dir: str = ""
    """Ledger and logs; empty: a folder under XDG_STATE_HOME named by bucket and model."""
    cache_dir: str = ""
    """Delivery cache shared by the node's replicas; empty: under XDG_CACHE_HOME."""
    partition: str = ""
    """Name of the secret that separates deployments in the delivery cache; empty: a random one in the state folder."""
    tokenizer: str = ""
    """Directory of the tokenizer, for snapshots that hold none; without either, only token ids are served."""
    keys: str = ""
    """Name of the secret with the API keys; empty: no keys, loopback only."""
    storage: str = ""
    """Name of the secret with static storage credentials; empty: the environment's own chain."""
    secrets_dir: str = ""
    """Folder of 0600 files, one per secret, read when the environment does not hold it."""
    watch: bool = False
    """Poll the bucket for newer snapshots and load them."""
    watch_interval_s: float = Field(5.0, gt=0)
    engine: EngineConfig = EngineConfig()
    transition: TransitionConfig = TransitionConfig()
    limits: LimitsConfig = LimitsConfig()
    peers: PeersConfig = PeersConfig()


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> DeploymentConfig:
    """Read a deployment's file.

    Raises:
        InputError: every problem of the file at once, each with its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError("config_unreadable", f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise InputError(
            "config_syntax", f"is not UTF-8 text ({error.reason} at byte {error.start})", where=str(path), do=_PLAIN
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (RecursionError, ValueError) as error:  # too deep; or a date or number that is none
        why = "is nested too deeply" if isinstance(error, RecursionError) else f"holds a value that is none ({error})"
        raise InputError("config_syntax", why, where=str(path), do=_PLAIN) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise InputError("config_syntax", f"{problem}", where=f"{path}{line}", do=_PLAIN) from None
    if not isinstance(content, dict):
        raise InputError(
            "config_syntax",
            "the file is not a mapping",
            where=str(path),
            do="Start with bucket: and served_model_name:.",
        )
    flaws = list(_find_flaws(path, node))
    if flaws:
        raise InputError.of(flaws)
    try:
        return DeploymentConfig.model_validate({**content, **(overrides or {})})
    except ValidationError as error:
        raise InputError.of([_problem(path, node, item) for item in error.errors()]) from None


def _find_flaws(path: Path, root: yaml.Node | None) -> Iterator[Problem]:
    """Find what YAML lets through and nobody means: a key given twice, of which the last would win, and NUL in text."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:  # an alias leads to the same node again
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            yield Problem(
                "invalid_value", "holds a NUL character", f"{path}:{node.start_mark.line + 1}", "Take it out."
            )
        elif isinstance(node, yaml.SequenceNode):
            waiting.extend(reversed(node.value))
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value in lines:
                    why = f"{key.value} is given twice, first in line {lines[key.value]}"
                    yield Problem("config_syntax", why, f"{path}:{line}", "Leave one of them out.")
                elif isinstance(key, yaml.ScalarNode):
                    lines[key.value] = line
            waiting.extend(part for pair in reversed(node.value) for part in reversed(pair))


def _problem(path: Path, node: yaml.Node | None, item: Any) -> Problem:
    location = [str(part) for part in item["loc"]]
    where = f"{path}:{_line_of(node, location)}: {'.'.join(location)}"
    if item["type"] == "extra_forbidden":
        record: type[BaseModel] = DeploymentConfig
        for part in location[:-1]:
            inner = record.model_fields[part].annotation
            record = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else record
        close = get_close_matches(location[-1], record.model_fields, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        return Problem(
            "unknown_key", "is not a setting", where, f"{hint}Settings here: {', '.join(record.model_fields)}."
        )
    if item["type"] == "missing":
        return Problem("missing_key", "is required", where, f"Add {location[-1]}: to the file.")
    return Problem("invalid_value", f"{item['input']!r}: {item['msg']}", where)


def _line_of(node: yaml.Node | None, location: list[str]) -> int:
    line = 1
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            return line
        for key, value in node.value:
            if key.value == part:
                line, node = key.start_mark.line + 1, value
                break
        else:
            return line
    return line
