"""Replicas that come back, or cannot load yet: they are tried again until they serve."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

from deployment_harness import HOT_LOAD, Deployment, Trainer, served_version
from test_f15_f28_requests import replica_pids, serve_one

Deploy = Callable[..., Deployment]


def test_a_killed_replica_of_a_rolling_deployment_is_let_through_again(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy, replicas=2, config={"transition": {"max_concurrent_swaps": 1}})
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    os.kill(replica_pids(deployment)[0], signal.SIGKILL)
    deployment.wait(lambda s: not all(each["readiness"] for each in s["replicas"]), "noticing the death")
    deployment.wait_ready(two)
    assert {each["policy_version"] for each in deployment.status()["replicas"]} == {2}


def test_a_restarted_replica_that_cannot_load_is_tried_again_after_the_load_is_over(
    trainer: Trainer, deploy: Deploy
) -> None:
    deployment = serve_one(trainer, deploy, config={"limits": {"storage_budget_s": 0.2}})
    weights = trainer.path("step000001", "model.safetensors")
    data = weights.read_bytes()
    weights.unlink()
    weights.mkdir()  # what reads as a broken store, not as a missing object
    shutil.rmtree(deployment.root / "cache")
    shutil.rmtree(deployment.root / "state" / "r0" / "mirror")
    os.kill(replica_pids(deployment)[0], signal.SIGKILL)
    deployment.wait(lambda s: not s["replicas"][0]["readiness"], "noticing the death")

    def has_failed_once(status: dict[str, Any]) -> bool:
        """A failure that will be tried again shows as pending, later than its start."""
        state = status["replicas"][0]["loading_state"]
        is_new = state["stage"] == "pending" and state["updated_at"] == state["started_at"]
        return state["stage"] in ("pending", "error") and state["target_snapshot_identity"] is not None and not is_new

    deployment.wait(has_failed_once, "failing once")
    weights.rmdir()
    weights.write_bytes(data)
    deployment.wait_ready("step000001")
    assert served_version(deployment.complete()) == 1


def test_a_load_that_was_running_when_the_gateway_died_is_not_shown_as_running(
    trainer: Trainer, deploy: Deploy
) -> None:
    deployment = serve_one(trainer, deploy)
    deployment.stop(signal.SIGKILL)
    path = deployment.root / "state" / "ledger.json"
    body = json.loads(path.read_text())
    body["entries"].append({**body["entries"][0], "identity": "step000002", "state": "loading", "finished_at": None})
    path.write_text(json.dumps(body))
    deployment.start()
    deployment.wait_ready("step000001")
    newest = next(
        e for e in deployment.call("GET", HOT_LOAD + "/ledger").body["entries"] if e["identity"] != "step000001"
    )
    assert (newest["identity"], newest["state"], newest["reason"]) == ("step000002", "canceled", "canceled")
