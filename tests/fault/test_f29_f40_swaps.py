"""F29 to F40 of the hot-load contract: requests across a swap, caches, broken installs, copies after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployment_harness import HOT_LOAD, Deployment, Trainer, make_tensors, served_version, write_checkpoint
from test_f15_f28_requests import replica_pids

from hotloop.errors import SnapshotError
from hotloop.models.builtin import make_policy

Deploy = Callable[..., Deployment]
PROMPT = [1, 13, 8, 5, 11, 4, 6, 14]
LONG = {"max_tokens": 480, "logit_bias": {"2": -100}, "stream": True}
"""Never ends by itself: the end token is out of reach."""


def serve_one(trainer: Trainer, deploy: Deploy, **options: Any) -> Deployment:
    identity = trainer.anchor()
    deployment = deploy(**options)
    deployment.wait_ready(identity)
    return deployment


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small policy with random weights, for the torch engine."""
    root = tmp_path_factory.mktemp("policy")
    make_policy(root / "one", warmup_max_steps=0, max_positions=512, cache=root / "cache")
    return root / "one"


def publish_policy(trainer: Trainer, policy: Path, *, share: float = 0.05) -> str:
    """Publish the policy, then slightly changed ones."""
    from safetensors.numpy import load_file, save_file

    trainer.version += 1
    name = f"step{trainer.version:06d}"
    target = trainer.root / "policies" / name
    shutil.copytree(policy, target)
    if trainer.version > 1:
        rng = np.random.default_rng(trainer.version)
        tensors = load_file(trainer.root / "policies" / f"step{trainer.version - 1:06d}" / "model.safetensors")
        for key, values in tensors.items():
            noise = rng.normal(0, 0.05, values.shape).astype(np.float32)
            tensors[key] = np.where(rng.random(values.shape) < share, values + noise, values)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    trainer.publisher.publish(target, name, trainer.version)
    if trainer.version == 1:
        trainer.publisher.set_startup(name)
    return name


def serve_policy(trainer: Trainer, deploy: Deploy, policy: Path, **config: Any) -> Deployment:
    name = publish_policy(trainer, policy)
    deployment = deploy(config={"engine": {"kind": "torch", "prefix_cache_tokens": 4096}, **config})
    deployment.wait_ready(name)
    return deployment


class Stream:
    """One streamed request, read in a thread."""

    def __init__(self, deployment: Deployment, **fields: Any) -> None:
        body = {
            "model": "policy",
            "prompt": PROMPT,
            "seed": 3,
            "nvext": {"extra_fields": ["engine_data"]},
            **LONG,
            **fields,
        }
        self._request = urllib.request.Request(
            deployment.url + "/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        self.events: list[dict[str, Any]] = []
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.started.wait(30)

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    self.events.append(json.loads(line[6:]))
                    self.started.set()

    def finish(self) -> list[dict[str, Any]]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.events

    def spans(self) -> list[tuple[int, int, int]]:
        """(start, end, version) of the whole answer, joined over its chunks."""
        joined: list[tuple[int, int, int]] = []
        for event in self.finish():
            for span in event["nvext"]["engine_data"]["version_spans"]:
                last = joined[-1] if joined else None
                if last is not None and last[2] == span["policy_version"] and last[1] == span["start"]:
                    joined[-1] = (last[0], span["end"], last[2])
                else:
                    joined.append((span["start"], span["end"], span["policy_version"]))
        return joined

    @property
    def finish_reason(self) -> str:
        return str(self.finish()[-1]["choices"][0]["finish_reason"])


def test_f29_an_async_swap_lets_a_request_go_on_and_declares_its_spans(
    trainer: Trainer, deploy: Deploy, policy: Path
) -> None:
    deployment = serve_policy(trainer, deploy, policy)
    two = publish_policy(trainer, policy)
    stream = Stream(deployment)
    deployment.load(two)
    deployment.wait_ready(two)
    spans = stream.spans()
    assert [version for _, _, version in spans] == [1, 2]
    assert spans[0][0] == 0 and spans[0][1] == spans[1][0] and spans[1][1] == 480
    assert stream.finish_reason == "length"


def test_f29_a_sync_swap_lets_requests_finish_on_the_old_weights_and_sends_newcomers_away(
    trainer: Trainer, deploy: Deploy, policy: Path
) -> None:
    deployment = serve_policy(trainer, deploy, policy)
    two = publish_policy(trainer, policy)
    stream = Stream(deployment)
    deployment.load(two, transition="SYNC")
    answers = []
    while deployment.replica()["policy_version"] == 1:
        answers.append(deployment.complete(prompt=PROMPT, max_tokens=1))
    assert stream.spans() == [(0, 480, 1)]
    early = [answer for answer in answers if answer.status == 425]
    assert early and all(answer.headers["retry-after"] == "1" for answer in early)
    assert {answer.status for answer in answers} <= {200, 425}
    deployment.wait_ready(two)


def test_f29_a_sync_drain_that_takes_too_long_ends_requests_with_their_partial_output(
    trainer: Trainer, deploy: Deploy, policy: Path
) -> None:
    deployment = serve_policy(trainer, deploy, policy)
    two = publish_policy(trainer, policy)
    stream = Stream(deployment)
    deployment.load(two, {"x-hot-load-drain-timeout": "0.05"}, transition="SYNC")
    deployment.wait_ready(two)
    assert stream.finish_reason == "abort"
    (span,) = stream.spans()
    assert span[0] == 0 and 0 < span[1] < 480 and span[2] == 1


def test_f29_an_exact_pin_is_drained_even_by_an_async_swap(trainer: Trainer, deploy: Deploy, policy: Path) -> None:
    deployment = serve_policy(trainer, deploy, policy)
    two = publish_policy(trainer, policy)
    stream = Stream(deployment, weight_version={"exact_version": 1})
    deployment.load(two)
    deployment.wait_ready(two)
    assert stream.spans() == [(0, 480, 1)]


def cached_tokens(deployment: Deployment, **fields: Any) -> int:
    answer = deployment.complete(prompt=PROMPT * 4, max_tokens=2, **fields)
    assert answer.status == 200, answer.body
    return int(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(("reset", "is_kept"), [("all", False), (True, False), ("none", True), (False, True)])
def test_f30_the_prefix_cache_of_old_weights_is_not_matched_unless_asked(
    trainer: Trainer, deploy: Deploy, policy: Path, reset: object, is_kept: bool
) -> None:
    deployment = serve_policy(trainer, deploy, policy)
    assert cached_tokens(deployment) == 0
    assert cached_tokens(deployment) > 0
    two = publish_policy(trainer, policy)
    deployment.load(two, reset_prompt_cache=reset)
    deployment.wait_ready(two)
    assert (cached_tokens(deployment) > 0) is is_kept


def test_f31_an_empty_delta_advances_the_version_without_a_pause(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    source = write_checkpoint(trainer.root / "same", trainer.tensors)
    trainer.publisher.publish(source, "step000002", 2, kind="delta")
    deployment.load("step000002")
    deployment.wait_ready("step000002")
    assert served_version(deployment.complete()) == 2
    entry = deployment.call("GET", HOT_LOAD + "/ledger").body["entries"][0]
    assert entry["replicas"]["r0"]["pause_ms"] == 0.0


def test_f32_a_full_disk_fails_the_load_and_leaves_no_scratch(trainer: Trainer, deploy: Deploy, tmp_path: Path) -> None:
    trainer.anchor()
    cache = tmp_path / "small"
    cache.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        deployment = deploy(config={"cache_dir": str(cache)})
        deployment.wait_ready("step000001")
        big = {**trainer.tensors, "embed.weight": trainer.tensors["embed.weight"]}
        noise = np.random.default_rng(0).normal(size=(64 * 1024,)).astype(np.float32)
        source = write_checkpoint(tmp_path / "big", {**big, "big.weight": noise})
        trainer.publisher.publish(source, "step000002", 2, kind="anchor")
        deployment.load("step000002")
        assert deployment.wait_error("step000002")["reason"] == "no_space"
        assert served_version(deployment.complete()) == 1
        assert not list((cache / "partial").iterdir())
    finally:
        for running in (deployment,):
            running.stop()
        subprocess.run(["umount", str(cache)], check=True)


def test_f33_a_write_that_fails_midway_takes_the_replica_out_until_it_has_reloaded(
    trainer: Trainer, deploy: Deploy
) -> None:
    deployment = serve_one(trainer, deploy, config={"engine": {"kind": "fake", "options": {"fails_once_at": 2}}})
    two = trainer.publish()
    seen: list[bool] = []
    deployment.load(two)
    while not deployment.status()["ready"]:
        answer = deployment.complete()
        seen.append(answer.status == 200)
        if answer.status == 200:
            assert served_version(answer) in (1, 2)
        time.sleep(0.01)
    assert False in seen, "it took requests between the broken write and the reload"
    assert served_version(deployment.complete()) == 2
    reference = deploy()
    reference.load(two)
    reference.wait_ready(two)
    # The reloaded weights are whole: both deployments say the same with the same seed.
    assert deployment.complete().body["choices"] == reference.complete().body["choices"]


def test_f35_the_error_of_an_earlier_identity_says_whose_it_is(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    trainer.path(two, "model.safetensors").unlink()
    deployment.load(two)
    assert deployment.wait_error(two)["target_snapshot_identity"] == two
    three = trainer.publish(kind="anchor")
    deployment.load(three)
    deployment.wait_ready(three)
    assert deployment.replica()["loading_state"]["target_snapshot_identity"] == three


def test_f36_a_deployment_without_replicas_says_so(trainer: Trainer, deploy: Deploy) -> None:
    trainer.anchor()
    deployment = deploy(replicas=0)
    status = deployment.status()
    assert status["replicas"] == [] and status["ready"] is False
    assert (deployment.load("step000001").status, deployment.load("step000001").code) == (503, "no_replicas")
    answer = deployment.complete()
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "no_replicas", "1")


@pytest.mark.slow
def test_f37_a_tensor_above_two_gib_is_served(trainer: Trainer, deploy: Deploy, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("four copies of a 2 GiB tensor need 12 GiB of free disk")
    wide = np.zeros(2**31 + 4096, dtype=np.uint8)
    one = write_checkpoint(tmp_path / "one", {**make_tensors(1), "wide.weight": wide})
    trainer.publisher.publish(one, "step000001", 1, kind="anchor")
    trainer.publisher.set_startup("step000001")
    deployment = deploy()
    deployment.wait_ready("step000001")
    wide[-1] = 7
    shutil.rmtree(one)
    two = write_checkpoint(tmp_path / "two", {**make_tensors(1), "wide.weight": wide})
    trainer.publisher.publish(two, "step000002", 2, kind="delta")
    shutil.rmtree(two)
    deployment.load("step000002")
    deployment.wait_ready("step000002")
    assert served_version(deployment.complete()) == 2


def test_f38_a_crash_between_install_and_promotion_is_noticed_at_the_restart(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    before = deployment.complete().body["choices"]
    mirror = deployment.root / "state" / "r0" / "mirror"
    # What a crash at that moment leaves: the journal of an install whose promotion never ended, half the bytes written.
    (mirror / "journal.json").write_text(json.dumps({"from": "step000001", "to": two}))
    weights = next(mirror.glob("weights-*.bin"))
    raw = bytearray(weights.read_bytes())
    raw[:64] = bytes(64)
    weights.write_bytes(raw)
    os.kill(replica_pids(deployment)[0], signal.SIGKILL)
    deployment.wait(lambda status: not status["replicas"][0]["readiness"], "noticing the death")
    deployment.wait_ready(two)
    assert deployment.replica()["loading_state"]["chain"] == ["step000001", two]
    assert deployment.complete().body["choices"] == before
    three = trainer.publish()
    deployment.load(three)
    deployment.wait_ready(three)


def test_f39_loading_a_delta_again_changes_nothing(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    before = deployment.complete().body["choices"]
    assert deployment.load(two).body["already_current"]
    deployment.load("step000001", allow_rewind=True)
    deployment.wait_ready("step000001")
    deployment.load(two)
    deployment.wait_ready(two)
    assert deployment.complete().body["choices"] == before


def test_f40_a_tensor_that_appears_in_one_step_only_is_refused(
    trainer: Trainer, deploy: Deploy, tmp_path: Path
) -> None:
    deployment = serve_one(trainer, deploy)
    fresh = {**make_tensors(2), "lm_head.weight": make_tensors(3)["embed.weight"]}
    source = write_checkpoint(tmp_path / "two", fresh)
    with pytest.raises(SnapshotError, match="tensor_set_mismatch"):
        trainer.publisher.publish(source, "step000002", 2, kind="delta")
    command = [sys.executable, "-m", "hotloop.cli.main", "publish", "delta", "--dir", str(source)]
    command += ["--bucket", trainer.url, "--identity", "step000002", "--policy-version", "2", "--parent", "step000001"]
    assert subprocess.run(command, capture_output=True).returncode == 2
    # A tied copy of a tensor that the base has is pruned to the base's names.
    tied = {**make_tensors(2, share=0.1, base=trainer.tensors)}
    tied["lm_head.weight"] = tied["embed.weight"]
    trainer.publisher.publish(write_checkpoint(tmp_path / "tied", tied), "step000002", 2, kind="delta")
    deployment.load("step000002")
    deployment.wait_ready("step000002")
