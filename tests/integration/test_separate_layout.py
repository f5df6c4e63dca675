"""`layout = separate`: the same run with its rollouts over HTTP from hot-loaded replicas, and `external` beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import RunCommand

from hotloop.loop.rollout_file import read_rollouts
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.reader import SnapshotReader

SHORT = ["--set", "rounds=3", "--set", "eval_mode=off", "--set", "sampling.num_groups=8"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def served_adler32(state: Path) -> dict[str, int]:
    """The checksums of what a replica holds, from its host copy."""
    tensors = json.loads((state / "mirror" / "mirror.json").read_text())["tensors"]
    return {name: entry[5] for name, entry in tensors.items()}


def assert_replicas_hold(folder: Path, identity: str, replicas: int) -> None:
    """Every replica's bytes have the checksums of what the trainer published (X02.5)."""
    manifest = SnapshotReader(open_bucket(str(folder / "bucket"))).find_manifest(identity)
    assert manifest is not None
    expected = {name: entry.adler32 for name, entry in manifest.tensors.items()}
    for number in range(replicas):
        state = folder / "deployment" / "state" / f"r{number}"
        held = json.loads((state / "mirror" / "mirror.json").read_text())
        assert held["identity"] == identity and served_adler32(state) == expected


@pytest.mark.slow
def test_a_separate_run_trains_on_what_two_replicas_serve(tmp_path: Path, hotloop: RunCommand) -> None:
    folder = tmp_path / "run"
    replicas = ["--set", "layout=separate", "--set", "laptop.replicas=2"]
    assert hotloop("run", "--out", str(folder), *replicas, *SHORT).code == 0
    records = metrics(folder)
    assert [record["policy_version"] for record in records] == [1, 2, 3]
    for record in records:
        # The engine's logprobs came over HTTP and are those of the very weights that the trainer holds.
        assert record["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert record["staleness/max"] == 0
        assert record["perf/update_weights_wire_bytes"] > 0
    for round_ in range(3):
        for rollout in read_rollouts(folder / "rollouts" / f"rollout_{round_}.jsonl.zst"):
            assert rollout["weight_versions"] == [str(round_)]
    assert_replicas_hold(folder, "step000003", 2)
    entries = json.loads((folder / "deployment" / "state" / "ledger.json").read_text())["entries"]
    assert [(entry["identity"], entry["state"]) for entry in entries] == [
        (f"step{version:06d}", "done") for version in range(4)
    ]


@pytest.mark.slow
def test_a_killed_separate_run_resumes_under_a_version_the_bucket_has_not_seen(
    tmp_path: Path, hotloop: RunCommand
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "hotloop.cli.main", "run", "--out", str(folder), "--set", "layout=separate"]
    command += ["--set", "rounds=40", "--set", "eval_mode=off", "--set", "sampling.num_groups=8"]
    command += ["--set", "laptop.checkpoint_interval=3"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not (folder / "bucket" / "step000005" / "snapshot.json").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    seen = {name for name in os.listdir(folder / "bucket") if name.startswith("step")}
    newest = max(int(name.removeprefix("step")) for name in seen)
    assert hotloop("run", "--resume", str(folder), "--set", "rounds=8").code == 0
    records = metrics(folder)
    assert [record["round"] for record in records] == list(range(8))
    resumed_from = json.loads((folder / "bucket" / f"step{newest + 1:06d}" / "snapshot.json").read_text())
    assert resumed_from["kind"] == "anchor" and resumed_from["policy_version"] == newest + 1
    assert records[-1]["policy_version"] > newest
    deployment = subprocess.run(["pgrep", "-f", str(folder / "deployment")], capture_output=True, text=True).stdout
    assert not deployment.strip(), "a deployment outlived its run"


@pytest.mark.slow
def test_an_external_run_uses_somebody_elses_deployment(tmp_path: Path, hotloop: RunCommand) -> None:
    bucket = tmp_path / "bucket"
    config = {
        "bucket": f"file://{bucket}",
        "served_model_name": "policy",
        "state_dir": str(tmp_path / "state"),
        "cache_dir": str(tmp_path / "cache"),
    }
    bucket.mkdir()
    (tmp_path / "serve.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "hotloop.cli.main", "serve", str(tmp_path / "serve.yaml"), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        folder = tmp_path / "run"
        settings = ["--set", "layout=external", "--set", f"laptop.service_url={url}", "--set", f"publish={bucket}"]
        assert hotloop("run", "--out", str(folder), *settings, *SHORT).code == 0
        assert [record["policy_version"] for record in metrics(folder)] == [1, 2, 3]
        assert server.poll() is None, "the deployment is not the run's to end"
    finally:
        server.terminate()
        server.wait(30)
        assert server.stdout is not None
        server.stdout.close()
