"""How a deployment behaves beside its failures: rolling swaps, watching, ledger, cache, limits, ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from deployment_harness import HOT_LOAD, Answer, Deployment, Trainer, make_tensors, served_version, write_checkpoint
from prometheus_client.parser import text_string_to_metric_families
from service_storm import Policy
from test_f15_f28_requests import deploy_s3, proxy, publish_s3, replica_pids, serve_one, start_upload

from hotloop.errors import ServiceError
from hotloop.service import supervisor as supervisor_module
from hotloop.service.launchers.base import ReplicaSpec, RunningReplica
from hotloop.service.membership import Member
from hotloop.service.supervisor import Supervisor

Deploy = Callable[..., Deployment]
MANUAL = {"kind": "fake", "options": {"manual": True}}
"""An engine that never takes a step: its requests are in flight until somebody ends them."""
ENDLESS = {"kind": "fake", "max_context": 10_000_000}
METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
__all__ = ["proxy"]  # a fixture


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Answer]]]:
    """Sends requests without waiting for their answers."""
    with ThreadPoolExecutor(16) as pool:
        yield lambda deployment, **fields: pool.submit(deployment.complete, **fields)


def metric(deployment: Deployment, name: str, **labels: str) -> float:
    """One sample of the exposition; 0 where it is not there yet."""
    for family in text_string_to_metric_families(deployment.call("GET", "/metrics").body):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


def wait_metric(deployment: Deployment, value: float, name: str, **labels: str) -> None:
    deadline = time.monotonic() + 60
    while metric(deployment, name, **labels) != value:
        assert time.monotonic() < deadline, f"{name}{labels} did not become {value}"
        time.sleep(0.02)


def open_stream(deployment: Deployment, **fields: Any) -> socket.socket:
    """Send a streamed request and return its connection, unread."""
    body = json.dumps({"prompt": [1], "stream": True, "seed": 3, **fields}).encode()
    place = urlsplit(deployment.url)
    connection = socket.create_connection((place.hostname, place.port), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def entries(deployment: Deployment) -> list[dict[str, Any]]:
    found = deployment.call("GET", HOT_LOAD + "/ledger").body["entries"]
    assert isinstance(found, list)
    return found


# ---- swaps ----------------------------------------------------------------------------------------------------------


def test_rolling_replicas_swap_one_after_the_other(
    trainer: Trainer, deploy: Deploy, background: Callable[..., Future[Answer]]
) -> None:
    rolling = {"engine": MANUAL, "transition": {"max_concurrent_swaps": 1, "mode": "SYNC"}}
    deployment = serve_one(trainer, deploy, replicas=2, config=rolling)
    held = [background(deployment) for _ in range(2)]  # the shortest queue gives each replica one
    for name in ("r0", "r1"):
        wait_metric(deployment, 1, "hotloop_in_flight", replica=name)
    drain_s = 2.0
    two = trainer.publish()
    deployment.load(two, {"x-hot-load-drain-timeout": str(drain_s)})
    deployment.wait_ready(two)
    assert [answer.result().body["choices"][0]["finish_reason"] for answer in held] == ["abort", "abort"]
    ready = sorted(datetime.fromisoformat(each["ready_at"]) for each in entries(deployment)[0]["replicas"].values())
    # Each waits for its own request to the end of the limit, and the second began after the first had ended.
    assert (ready[1] - ready[0]).total_seconds() >= 0.95 * drain_s


def test_a_client_that_does_not_read_holds_no_swap_up(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy, config={"engine": ENDLESS})
    # 30 MB of events, more than the sockets between engine and client hold.
    asked = {"max_tokens": 40_000, "weight_version": {"exact_version": 1}, "nvext": {"extra_fields": ["engine_data"]}}
    with closing(open_stream(deployment, **asked)):
        wait_metric(deployment, 1, "hotloop_in_flight", replica="r0")
        two = trainer.publish()
        deployment.load(two, {"x-hot-load-drain-timeout": "100000"})
        deployment.wait_ready(two)
        assert metric(deployment, "hotloop_in_flight", replica="r0") == 1, "it is still being sent to"


def test_a_host_copy_that_is_damaged_while_it_serves_is_rebuilt(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    weights = next((deployment.root / "state" / "r0" / "mirror").glob("weights-*.bin"))
    with weights.open("r+b") as file:
        file.write(bytes(64))
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    answer = deployment.complete(prompt=[5], max_tokens=1, seed=7)
    assert answer.body["nvext"]["engine_data"]["completion_token_ids"] == [
        Policy.of(two, trainer.content[two]).draw(5, 7, 0)
    ]
    assert deployment.load(trainer.publish()).status == 200
    deployment.wait_ready("step000003")


def test_watching_loads_what_is_newer_and_asks_for_it_once(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy, config={"watch": True, "watch_interval_s": 0.1})
    two = trainer.publish()
    deployment.wait_ready(two)
    three = trainer.publish()
    shard = trainer.path(three, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-8] + bytes(8))
    deployment.wait_error(three)
    time.sleep(1.0)  # ten looks: a second wish would be in the ledger by now
    four = trainer.publish(kind="anchor")
    deployment.wait_ready(four)
    assert [(each["identity"], each["state"]) for each in entries(deployment)] == [
        (four, "done"),
        (three, "error"),
        (two, "done"),
        ("step000001", "done"),
    ]


# ---- the ledger -----------------------------------------------------------------------------------------------------


def test_after_the_ledger_was_deleted_the_next_load_must_be_an_anchor(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    assert deployment.call("DELETE", HOT_LOAD + "/ledger").status == 200
    assert entries(deployment) == []
    assert served_version(deployment.complete()) == 1
    answer = deployment.load(trainer.publish())
    assert (answer.status, answer.code) == (409, "anchor_required")
    three = trainer.publish(kind="anchor")
    assert deployment.load(three).status == 200
    deployment.wait_ready(three)
    assert deployment.load(trainer.publish()).status == 200
    deployment.wait_ready("step000004")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": 2, "base": null, "entries": []}', '{"schema": 1}', "\x00" * 64]
)
def test_a_ledger_that_cannot_be_read_is_moved_aside(trainer: Trainer, deploy: Deploy, content: str) -> None:
    trainer.anchor()
    two = trainer.publish()
    trainer.publisher.set_startup(two)  # a delta, so that starting does not count as the anchor that is needed
    deployment = deploy()
    deployment.wait_ready(two)
    deployment.stop()
    ledger = deployment.root / "state" / "ledger.json"
    ledger.write_text(content)
    deployment.start()
    deployment.wait_ready(two)
    (aside,) = ledger.parent.glob("ledger.json.unreadable-*")
    assert aside.read_text() == content
    answer = deployment.load(trainer.publish())
    assert (answer.status, answer.code) == (409, "anchor_required")


def test_a_ledger_that_cannot_be_written_refuses_loads_and_harms_nothing_that_serves(
    trainer: Trainer, deploy: Deploy
) -> None:
    deployment = serve_one(trainer, deploy)
    complete = start_upload(trainer, "foreign1")
    assert deployment.load("foreign1").status == 200
    obstacle = deployment.root / "state" / "ledger.json.new"
    obstacle.mkdir()
    complete()
    deployment.wait_ready("foreign1")  # the end of the load could not be written down; it serves all the same
    assert deployment.complete().status == 200
    three = trainer.publish(kind="anchor")
    answer = deployment.load(three, allow_rewind=True)
    assert (answer.status, answer.code) == (503, "ledger_uncertain")
    obstacle.rmdir()
    assert deployment.load(three, allow_rewind=True).status == 200
    deployment.wait_ready(three)


def test_a_load_that_was_accepted_is_taken_up_by_the_next_gateway(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    complete = start_upload(trainer, "foreign2")
    assert deployment.load("foreign2", policy_version=2).status == 200
    deployment.stop(signal.SIGKILL)
    deployment.start()
    deployment.wait(lambda status: status["target_snapshot_identity"] == "foreign2", "taking the load up")
    complete()
    deployment.wait_ready("foreign2")
    assert [each["state"] for each in entries(deployment)] == ["done", "done", "canceled", "done"]


def test_a_load_under_which_every_replica_dies_again_and_again_is_given_up(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    start_upload(trainer, "foreign2")  # never completed: the load is active all the while
    assert deployment.load("foreign2").status == 200
    for _ in range(3):
        deployment.wait(lambda s: s["replicas"][0]["loading_state"]["stage"] == "downloading", "loading")
        os.kill(replica_pids(deployment)[0], signal.SIGKILL)
        deployment.wait(lambda s: s["replicas"][0]["loading_state"]["stage"] != "downloading", "noticing the death")
    deployment.wait_ready("step000001")
    newest = entries(deployment)[0]
    assert (newest["identity"], newest["state"], newest["reason"]) == ("foreign2", "error", "replica_lost")
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)


# ---- the bucket -----------------------------------------------------------------------------------------------------


def test_a_hint_fetches_each_object_once_for_the_whole_node(trainer: Trainer, deploy: Deploy, proxy: Any) -> None:
    one = write_checkpoint(trainer.root / "one", make_tensors(1))
    two = write_checkpoint(trainer.root / "two", make_tensors(2, share=0.1, base=make_tensors(1)))
    publish_s3(proxy, one, "step000001", 1, startup=True)
    publish_s3(proxy, two, "step000002", 2, startup=False)
    proxy.requests.clear()
    deployment = deploy_s3(deploy, proxy, replicas=2)
    deployment.wait_ready("step000001")
    answer = deployment.call("POST", HOT_LOAD + "/hint", {"identity": "step000002"})
    assert (answer.status, answer.body) == (202, {"accepted": True})
    deadline = time.monotonic() + 60
    while proxy.count_gets("step000002/model.safetensors") == 0:
        assert time.monotonic() < deadline, "the hint fetched nothing"
        time.sleep(0.02)
    assert deployment.status()["target_snapshot_identity"] == "step000001", "a hint loads nothing"
    deployment.load("step000002")
    deployment.wait_ready("step000002")
    for identity in ("step000001", "step000002"):
        for name in ("model.safetensors", "config.json"):
            assert proxy.count_gets(f"{identity}/{name}") == 1, (identity, name)


def test_a_hint_of_what_is_not_there_harms_nothing(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    assert deployment.call("POST", HOT_LOAD + "/hint", {"identity": "step000009"}).status == 202
    assert deployment.call("POST", HOT_LOAD + "/hint", {"identity": "step000001", "files": ["no.such"]}).status == 202
    assert served_version(deployment.complete()) == 1
    assert "Traceback" not in deployment.log_text()


# ---- addresses and metrics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/sync", "/deployment/abc123/sync"])
def test_a_prefix_changes_nothing(trainer: Trainer, deploy: Deploy, prefix: str) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    assert deployment.call("POST", prefix + HOT_LOAD, {"identity": two}).body["accepted"] is True
    deployment.wait_ready(two)
    for path in (HOT_LOAD, HOT_LOAD + "/ledger", "/v1/models", "/health", "/ready"):
        assert deployment.call("GET", prefix + path).body == deployment.call("GET", path).body
    answer = deployment.call("POST", prefix + "/v1/completions", {"prompt": [1], "max_tokens": 1, "seed": 1})
    plain = deployment.call("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1, "seed": 1})
    assert answer.status == 200 and answer.body["choices"] == plain.body["choices"]
    assert deployment.call("GET", f"{prefix}{prefix}/health").status == 404


def test_the_metrics_are_those_of_the_page_and_count_what_happened(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    for _ in range(3):
        assert deployment.complete().status == 200
    assert deployment.complete(temperature=-1).status == 400
    assert deployment.complete(model="other").status == 404
    families = list(text_string_to_metric_families(deployment.call("GET", "/metrics").body))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    names = {name for name in names if not name.endswith("_created")}
    assert names == set(re.findall(r"^\| `(hotloop_\w+)`", METRICS_PAGE.read_text(), flags=re.M))
    assert metric(deployment, "hotloop_requests_total", status="200") == 3
    assert metric(deployment, "hotloop_requests_total", status="400") == 1
    assert metric(deployment, "hotloop_gateway_errors_total", code="model_not_found") == 1
    assert metric(deployment, "hotloop_policy_version", replica="r0") == 2
    assert metric(deployment, "hotloop_replica_ready", replica="r0") == 1
    assert metric(deployment, "hotloop_in_flight", replica="r0") == 0
    assert metric(deployment, "hotloop_swap_pause_ms", replica="r0") > 0
    os.kill(replica_pids(deployment)[0], signal.SIGKILL)
    wait_metric(deployment, 1, "hotloop_replica_restarts_total", replica="r0")


# ---- limits and ends ------------------------------------------------------------------------------------------------


def test_a_full_queue_a_long_wait_and_a_slow_answer_each_have_their_error(
    trainer: Trainer, deploy: Deploy, background: Callable[..., Future[Answer]]
) -> None:
    limits = {"concurrency_per_replica": 1, "max_queue": 1, "queue_timeout_s": 3.0, "request_timeout_s": 6.0}
    deployment = serve_one(trainer, deploy, config={"engine": MANUAL, "limits": limits})
    running = background(deployment)
    wait_metric(deployment, 1, "hotloop_in_flight", replica="r0")
    waiting = background(deployment)
    wait_metric(deployment, 1, "hotloop_queue_length")
    refused = deployment.complete()
    assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "queue_full", "1")
    assert not waiting.done() and not running.done()
    late = waiting.result()
    assert (late.status, late.code, late.headers["retry-after"]) == (429, "queue_full", "1")
    slow = running.result()
    assert (slow.status, slow.code) == (408, "request_timeout")
    assert (metric(deployment, "hotloop_in_flight", replica="r0"), metric(deployment, "hotloop_queue_length")) == (0, 0)


def test_a_client_that_goes_away_ends_its_work(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy, config={"engine": MANUAL})
    for stream in (True, False):
        with closing(open_stream(deployment, stream=stream)):
            wait_metric(deployment, 1, "hotloop_in_flight", replica="r0")
        wait_metric(deployment, 0, "hotloop_in_flight", replica="r0")
    # The engine's work has ended as well: a swap that lets requests finish finds none.
    two = trainer.publish()
    deployment.load(two, {"x-hot-load-drain-timeout": "100000"}, transition="SYNC")
    deployment.wait_ready(two)


def test_requests_that_wait_are_served_by_a_replica_that_comes_back(
    trainer: Trainer, deploy: Deploy, background: Callable[..., Future[Answer]]
) -> None:
    limits = {"concurrency_per_replica": 1, "request_timeout_s": 60.0}
    deployment = serve_one(trainer, deploy, config={"engine": MANUAL, "limits": limits})
    running = background(deployment)
    wait_metric(deployment, 1, "hotloop_in_flight", replica="r0")
    waiting = [background(deployment) for _ in range(3)]
    wait_metric(deployment, 3, "hotloop_queue_length")
    os.kill(replica_pids(deployment)[0], signal.SIGKILL)
    answers = [each.result() for each in (running, *waiting)]
    assert {answer.status for answer in answers} <= {502, 503}, "each is told, none waits for nobody"
    assert all(answer.body["error"]["retryable"] for answer in answers)


def test_a_hung_replica_is_replaced_and_its_requests_are_answered_by_another(
    trainer: Trainer, deploy: Deploy, background: Callable[..., Future[Answer]]
) -> None:
    deployment = serve_one(trainer, deploy, replicas=2)
    hung = replica_pids(deployment)[0]
    os.kill(hung, signal.SIGSTOP)
    asked = [background(deployment, user=f"session{number}") for number in range(8)]
    assert [each.result().status for each in asked] == [200] * 8
    deployment.wait(lambda s: s["ready"] and hung not in replica_pids(deployment), "replacing the hung replica")


def test_the_end_of_a_deployment_ends_streams_with_an_error(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy, config={"engine": ENDLESS})
    received: list[bytes] = []
    begun = threading.Event()

    def read() -> None:
        with closing(open_stream(deployment, max_tokens=5_000_000)) as connection:
            while part := connection.recv(1 << 20):
                received.append(part)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    process = deployment.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)
    reader.join(60)
    text = b"".join(received[-50:]).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {") and line.endswith("}")]
    assert events[-1]["error"]["code"] == "shutting_down"
    assert events[-1]["error"]["retryable"] is True


def test_the_wait_before_a_restart_doubles_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Enough(Exception):
        pass

    async def note(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 9:
            raise Enough

    class Broken:
        async def start(self, spec: ReplicaSpec) -> RunningReplica:
            raise ServiceError("replica_start_failed", "no")

    monkeypatch.setattr(supervisor_module.asyncio, "sleep", note)
    member = Member("r0")

    def ignore(member: Member) -> None:
        pass

    supervisor = Supervisor(
        member,
        ReplicaSpec("r0", {}, "token", {}, ""),
        Broken(),
        lambda member: pytest.fail("nothing runs"),
        on_join=ignore,
        on_status=ignore,
        on_lost=ignore,
        on_restart=ignore,
    )
    with pytest.raises(Enough):
        asyncio.run(supervisor.run())
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert member.restarts == 8
