"""Real deployments for the service's tests: `hotloop serve` as a child process, a folder bucket, small checkpoints.

    test --HTTP--> gateway --> replica processes (fake engine) --> bucket in a temporary folder

The fake engine keeps the checkpoint's bytes, so an install can be checked, and derives its logits from them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.publisher import Publisher

HOT_LOAD = "/hot_load/v1/models/hot_load"
VOCAB = 32
DEADLINE_S = 240.0
"""When a wait counts as a hang: long, because a busy machine may need a minute for what takes seconds."""
"""Nothing in these tests takes long; the bound only turns a hang into a failure."""


def make_tensors(seed: int, *, share: float = 1.0, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A small checkpoint; with `base`, a copy in which about `share` of the elements changed."""
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (VOCAB, VOCAB), "layer.0.weight": (16, 24), "norm.weight": (24,)}
    fresh = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if base is None:
        return fresh
    return {n: np.where(rng.random(old.shape) < share, fresh[n], old).astype(np.float32) for n, old in base.items()}


def write_checkpoint(directory: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """Write a Hugging Face directory without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"model_type": "fake", "vocab_size": VOCAB, "num_hidden_layers": 1, **config}
    (directory / "config.json").write_text(json.dumps(facts))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass
class Trainer:
    """Publishes a chain into a bucket as a trainer would: step000001 is an anchor, the rest deltas."""

    root: Path
    bucket_dir: Path
    tensors: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    content: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each published identity holds."""

    def __post_init__(self) -> None:
        self.publisher = Publisher(open_bucket(self.url))

    @property
    def url(self) -> str:
        return f"file://{self.bucket_dir}"

    def publish(self, *, kind: str = "auto", share: float = 0.05, identity: str = "", **config: Any) -> str:
        """Publish the next version and return its identity."""
        self.version += 1
        self.tensors = make_tensors(self.version, share=share, base=self.tensors or None)
        name = identity or f"step{self.version:06d}"
        source = write_checkpoint(self.root / "checkpoints" / name, self.tensors, **config)
        self.publisher.publish(source, name, self.version, kind=kind)  # type: ignore[arg-type]  # one of three words
        self.content[name] = self.tensors
        return name

    def anchor(self, **options: Any) -> str:
        """Publish an anchor and name it for start-up."""
        name = self.publish(kind="anchor", **options)
        self.publisher.set_startup(name)
        return name

    def path(self, identity: str, name: str) -> Path:
        """A file of a snapshot, for tests that damage it."""
        return self.bucket_dir / identity / name


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"]) if self.status >= 400 else ""


@dataclass
class Deployment:
    """A running `hotloop serve`."""

    root: Path
    bucket: str
    replicas: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    token: str = ""
    url: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self) -> Deployment:
        """Start it and wait for its first line."""
        self.root.mkdir(parents=True, exist_ok=True)
        settings = {
            "bucket": self.bucket,
            "served_model_name": "policy",
            "replicas": self.replicas,
            "state_dir": str(self.root / "state"),
            "cache_dir": str(self.root / "cache"),
            "engine": {"kind": "fake"},
            **self.config,
        }
        path = self.root / "config.yaml"
        path.write_text(json.dumps(settings))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **self.environ}
        with (self.root / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hotloop.cli.main", "serve", str(path), "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.root / "serve.log").read_text()
        self.url = json.loads(line)["url"]
        return self

    def __enter__(self) -> Deployment:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it; SIGKILL leaves no time for anything."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(DEADLINE_S)
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> Answer:
        """Send one request; an error status is an answer like any other."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        if self.token:
            sent.setdefault("authorization", f"Bearer {self.token}")
        request = urllib.request.Request(self.url + path, data=data, headers=sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return _answer(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            return _answer(error.code, error.read(), dict(error.headers))

    def load(self, identity: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """Ask for an identity."""
        return self.call("POST", HOT_LOAD, {"identity": identity, **fields}, headers)

    def status(self) -> dict[str, Any]:
        """What every replica serves and loads."""
        body = self.call("GET", HOT_LOAD).body
        assert isinstance(body, dict)
        return body

    def replica(self, number: int = 0) -> dict[str, Any]:
        """One replica's status."""
        found = self.status()["replicas"][number]
        assert isinstance(found, dict)
        return found

    def complete(self, **fields: Any) -> Answer:
        """Ask for a rollout of token ids with its record."""
        body = {
            "model": "policy",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "seed": 7,
            "nvext": {"extra_fields": ["engine_data"]},
            **fields,
        }
        return self.call("POST", "/v1/completions", body)

    # ---- waiting ------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait until the status satisfies a condition."""
        deadline = time.monotonic() + DEADLINE_S
        status = self.status()
        while not condition(status):
            assert time.monotonic() < deadline, f"{what} did not happen: {json.dumps(status, indent=1)}"
            time.sleep(0.02)
            status = self.status()
        return status

    def wait_ready(self, identity: str) -> dict[str, Any]:
        """Wait until every replica serves an identity."""
        return self.wait(lambda s: s["ready"] and s["target_snapshot_identity"] == identity, f"serving {identity}")

    def wait_error(self, identity: str, number: int = 0) -> dict[str, Any]:
        """Wait until a replica's load of an identity failed for good; return its loading state."""

        def failed(status: dict[str, Any]) -> bool:
            loading = status["replicas"][number]["loading_state"]
            return loading["stage"] == "error" and loading["target_snapshot_identity"] == identity

        state = self.wait(failed, f"failing {identity}")["replicas"][number]["loading_state"]
        assert isinstance(state, dict)
        return state

    def log_text(self) -> str:
        """Everything that gateway and replicas have written."""
        texts = [path.read_text(errors="replace") for path in sorted(self.root.rglob("*.log"))]
        return "\n".join(texts)


def _answer(status: int, data: bytes, headers: dict[str, str]) -> Answer:
    try:
        body: Any = json.loads(data)
    except ValueError:
        body = data.decode("utf-8", "replace")
    return Answer(status, body, {name.lower(): value for name, value in headers.items()})


def served_version(answer: Answer) -> int:
    """The policy version that made an answer."""
    return int(answer.body["nvext"]["engine_data"]["policy_version"])
