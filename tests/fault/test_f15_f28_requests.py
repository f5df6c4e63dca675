"""F15 to F28 of the hot-load contract: identities, concurrency, restarts, storage, replicas that differ."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployment_harness import HOT_LOAD, Deployment, Trainer, make_tensors, served_version, write_checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
from bucket_servers import BUCKET, READER, WRITER, Fault, FaultProxy, run_fault_proxy, run_localbucket

from hotloop.errors import SnapshotError
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.publisher import Publisher

Deploy = Callable[..., Deployment]


def serve_one(trainer: Trainer, deploy: Deploy, **options: object) -> Deployment:
    identity = trainer.anchor()
    deployment = deploy(**options)
    deployment.wait_ready(identity)
    return deployment


def assert_serves(deployment: Deployment, version: int) -> None:
    answer = deployment.complete()
    assert answer.status == 200, answer.body
    assert served_version(answer) == version


def start_upload(trainer: Trainer, identity: str) -> Callable[[], None]:
    """Put a foreign anchor into the bucket without its weights; the returned call completes it."""
    source = write_checkpoint(trainer.root / "foreign" / identity, make_tensors(99))
    target = trainer.bucket_dir / identity
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    names = list(make_tensors(99))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))

    def complete() -> None:
        partial = target / "partial"
        shutil.copyfile(source / "model.safetensors", partial)
        os.replace(partial, target / "model-00001-of-00001.safetensors")

    return complete


@pytest.mark.parametrize("identity", ["../x", "a/b", "_x", "", "latest", "Current", "a..b", "x" * 129, "a\u0000b", 3])
def test_f15_a_bad_identity_is_refused(trainer: Trainer, deploy: Deploy, identity: object) -> None:
    deployment = deploy()
    answer = deployment.call("POST", HOT_LOAD, {"identity": identity})
    assert (answer.status, answer.code) == (400, "missing_identity" if identity == "" else "invalid_identity")


def test_f16_an_identity_with_other_bytes_is_refused_by_publisher_and_service(
    trainer: Trainer, deploy: Deploy, tmp_path: Path
) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    other = write_checkpoint(tmp_path / "other", make_tensors(77))
    with pytest.raises(SnapshotError) as error:
        Publisher(open_bucket(trainer.url)).publish(other, two, 2, kind="anchor")
    assert (error.value.code, error.value.exit_code) == ("identity_conflict", 2)
    three = trainer.publish()
    deployment.load(three)
    deployment.wait_ready(three)
    shutil.rmtree(trainer.bucket_dir / two)
    Publisher(open_bucket(trainer.url)).publish(other, two, 2, kind="anchor")
    answer = deployment.load(two, allow_rewind=True)
    assert (answer.status, answer.code) == (409, "identity_conflict")
    assert_serves(deployment, 3)


def test_f17_the_same_identity_again_is_current_or_joined(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    assert deployment.load("step000001").body["already_current"] is True
    complete = start_upload(trainer, "foreign2")
    assert deployment.load("foreign2").body["joined"] is False
    assert deployment.load("foreign2").body["joined"] is True
    complete()
    deployment.wait_ready("foreign2")


def test_f17_a_failed_target_is_restarted_by_the_next_post(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    shard = trainer.path(two, "model.safetensors")
    data = shard.read_bytes()
    shard.unlink()
    deployment.load(two)
    deployment.wait_error(two)
    shard.write_bytes(data)
    assert deployment.load(two).body["accepted"] is True
    deployment.wait_ready(two)
    states = [entry["state"] for entry in deployment.call("GET", HOT_LOAD + "/ledger").body["entries"]]
    assert states == ["done", "error", "done"]


def test_f18_the_latest_waits_and_displaces_the_one_before_it(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two, three = trainer.publish(), trainer.publish()
    complete = start_upload(trainer, "foreign9")
    assert deployment.load("foreign9", policy_version=1).body["queued"] is False
    first = deployment.load(two).body
    assert (first["queued"], first["superseded"]) == (True, None)
    second = deployment.load(three).body
    assert (second["queued"], second["superseded"]) == (True, two)
    assert deployment.status()["queued_snapshot_identity"] == three
    complete()
    deployment.wait_ready(three)
    entries = {
        entry["identity"]: entry["state"] for entry in deployment.call("GET", HOT_LOAD + "/ledger").body["entries"]
    }
    assert entries == {"step000001": "done", "foreign9": "done", two: "superseded", three: "done"}


def test_a_waiting_load_can_be_canceled_and_an_installed_one_not(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    answer = deployment.call("DELETE", HOT_LOAD)
    assert (answer.status, answer.code) == (409, "not_cancellable")
    complete = start_upload(trainer, "foreign9")
    deployment.load("foreign9")
    deployment.load(trainer.publish())
    assert deployment.call("DELETE", HOT_LOAD).body == {"canceled": "step000002"}
    assert deployment.call("DELETE", HOT_LOAD).body == {"canceled": "foreign9"}
    assert deployment.wait_error("foreign9")["reason"] == "canceled"
    complete()
    assert_serves(deployment, 1)


def test_f19_an_older_identity_needs_allow_rewind(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    answer = deployment.load("step000001")
    assert (answer.status, answer.code) == (409, "rewind_rejected")
    assert_serves(deployment, 2)
    assert deployment.load("step000001", allow_rewind=True).status == 200
    deployment.wait_ready("step000001")
    assert_serves(deployment, 1)


def replica_pids(deployment: Deployment) -> list[int]:
    """Child processes of the gateway."""
    assert deployment.process is not None
    path = Path(f"/proc/{deployment.process.pid}/task/{deployment.process.pid}/children")
    return [int(text) for text in path.read_text().split()]


def test_f20_a_killed_replica_comes_back_to_the_current_target(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    for _ in range(2):
        identity = trainer.publish()
        deployment.load(identity)
        deployment.wait_ready(identity)
    os.kill(replica_pids(deployment)[0], signal.SIGKILL)
    deployment.wait(lambda status: not status["replicas"][0]["readiness"], "noticing the death")
    assert deployment.complete().code in ("no_replicas", "replica_lost")
    deployment.wait_ready("step000003")
    assert_serves(deployment, 3)


def test_f20_a_restarted_deployment_returns_to_its_newest_load(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    deployment.load(two)
    deployment.wait_ready(two)
    deployment.stop(signal.SIGKILL)
    deployment.start()
    deployment.wait_ready(two)  # STARTUP_SNAPSHOT still names step000001
    assert_serves(deployment, 2)


@pytest.mark.parametrize("text", [None, b"", b"two words", b"../x"])
def test_f21_without_a_startup_snapshot_nothing_is_served(trainer: Trainer, deploy: Deploy, text: bytes | None) -> None:
    trainer.publish(kind="anchor")
    if text is not None:
        (trainer.bucket_dir / "STARTUP_SNAPSHOT").write_bytes(text)
    deployment = deploy()
    status = deployment.wait(
        lambda s: s["replicas"][0]["loading_state"]["stage"] == "error", "missing the start-up object"
    )
    assert status["replicas"][0]["loading_state"]["reason"] == "startup_missing"
    assert not status["ready"] and not status["replicas"][0]["readiness"]
    assert deployment.complete().code == "no_replicas"
    assert deployment.call("GET", "/ready").status == 503 and deployment.call("GET", "/health").status == 200


def test_f21_a_padded_name_of_a_delta_is_loaded_through_its_chain(trainer: Trainer, deploy: Deploy) -> None:
    trainer.anchor()
    two = trainer.publish()
    (trainer.bucket_dir / "STARTUP_SNAPSHOT").write_text(f"  {two}\n")
    deployment = deploy()
    deployment.wait_ready(two)
    assert_serves(deployment, 2)


def test_f22_a_pruned_link_breaks_the_chain_and_an_anchor_heals_it(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two, three, four = trainer.publish(), trainer.publish(), trainer.publish()
    shutil.rmtree(trainer.bucket_dir / two)
    assert deployment.load(four).status == 200
    state = deployment.wait_error(four)
    assert state["reason"] == "chain_broken" and state["details"]["missing"] == two
    assert_serves(deployment, 1)
    assert three in state["message"]
    five = trainer.publish(kind="anchor")
    deployment.load(five)
    deployment.wait_ready(five)


# ---- storage over S3 ------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    with run_localbucket(tmp_path / "s3") as endpoint, run_fault_proxy(endpoint) as running:
        yield running


def deploy_s3(
    deploy: Deploy, proxy: FaultProxy, bucket: str = BUCKET, replicas: int = 1, **limits: float
) -> Deployment:
    """A deployment that reads through the proxy with static keys."""
    secret = {
        "aws_access_key_id": READER[0],
        "aws_secret_access_key": READER[1],
        "aws_region": "us-east-1",
        "endpoint_url": proxy.endpoint,
    }
    return deploy(
        bucket=f"s3://{bucket}/run",
        replicas=replicas,
        config={"storage": "rl_checkpoint_reader", "limits": {"storage_budget_s": 3.0, **limits}},
        environ={"RL_CHECKPOINT_READER": json.dumps(secret)},
    )


def publish_s3(proxy: FaultProxy, source: Path, identity: str, version: int, *, startup: bool) -> None:
    environ = {"AWS_ACCESS_KEY_ID": WRITER[0], "AWS_SECRET_ACCESS_KEY": WRITER[1], "AWS_ENDPOINT_URL": proxy.endpoint}
    publisher = Publisher(open_bucket(f"s3://{BUCKET}/run", environ={**environ, "AWS_DEFAULT_REGION": "us-east-1"}))
    publisher.publish(source, identity, version)
    if startup:
        publisher.set_startup(identity)


def is_weights(method: str, path: str) -> bool:
    return method == "GET" and path.endswith(".safetensors")


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [(403, "InvalidAccessKeyId", "denied"), (403, "ExpiredToken", "expired"), (404, "NoSuchBucket", "no_bucket")],
)
def test_f23_refused_storage_names_its_cause(
    trainer: Trainer, deploy: Deploy, proxy: FaultProxy, status: int, code: str, cause: str
) -> None:
    fault = Fault(lambda method, path: True, times=10_000, status=status, code=code)
    proxy.faults.append(fault)
    deployment = deploy_s3(deploy, proxy)
    found = deployment.wait(lambda s: s["replicas"][0]["loading_state"]["stage"] == "error", "storage refusing")[
        "replicas"
    ][0]["loading_state"]
    assert (found["reason"], found["details"]["cause"]) == ("storage_access", cause)
    assert READER[1] not in json.dumps(found)
    answer = deployment.load("step000001")
    assert (answer.status, answer.code) == (503, "storage_access")
    fault.times = 0  # the credentials work again: the deployment heals by itself
    source = write_checkpoint(trainer.root / "one", make_tensors(1))
    publish_s3(proxy, source, "step000001", 1, startup=True)
    deployment.wait_ready("step000001")


def test_f24_a_transfer_that_is_cut_resumes_where_it_broke(trainer: Trainer, deploy: Deploy, proxy: FaultProxy) -> None:
    big = {"embed.weight": make_tensors(1)["embed.weight"], "wide.weight": make_tensors(2, share=1.0)["embed.weight"]}
    big["wide.weight"] = big["wide.weight"].repeat(256, axis=0)
    publish_s3(proxy, write_checkpoint(trainer.root / "one", big), "step000001", 1, startup=True)
    proxy.faults.append(Fault(is_weights, times=1, cut_after=256 * 1024))
    proxy.faults.append(Fault(is_weights, times=2, status=503))
    deployment = deploy_s3(deploy, proxy, storage_budget_s=30.0)
    deployment.wait_ready("step000001")
    # The transfer went on behind what had arrived, in place of starting again.
    assert any(int(text.removeprefix("bytes=").split("-")[0]) >= 256 * 1024 for text in proxy.ranges), proxy.ranges


def test_f24_after_the_budget_the_load_fails_and_the_old_weights_serve(
    trainer: Trainer, deploy: Deploy, proxy: FaultProxy
) -> None:
    one = write_checkpoint(trainer.root / "one", make_tensors(1))
    two = write_checkpoint(trainer.root / "two", make_tensors(2, share=0.1, base=make_tensors(1)))
    publish_s3(proxy, one, "step000001", 1, startup=True)
    deployment = deploy_s3(deploy, proxy, storage_budget_s=0.5)
    deployment.wait_ready("step000001")
    publish_s3(proxy, two, "step000002", 2, startup=False)
    fault = Fault(is_weights, times=10_000, status=503)
    proxy.faults.append(fault)
    deployment.load("step000002")
    assert deployment.wait_error("step000002")["reason"] == "storage_unavailable"
    assert_serves(deployment, 1)


def test_f25_a_leftover_session_token_is_ignored_by_readers(
    trainer: Trainer, deploy: Deploy, proxy: FaultProxy
) -> None:
    publish_s3(proxy, write_checkpoint(trainer.root / "one", make_tensors(1)), "step000001", 1, startup=True)
    secret = {"aws_access_key_id": "K", "aws_secret_access_key": "S", "aws_region": "us-east-1"}
    deployment = deploy(
        bucket=f"gs://{BUCKET}/run",
        config={"storage": "rl_checkpoint_reader"},
        environ={
            "RL_CHECKPOINT_READER": json.dumps({**secret, "endpoint_url": proxy.endpoint}),
            "AWS_SESSION_TOKEN": "left-over-token",
        },
    )
    deployment.wait_ready("step000001")
    assert "left-over-token" not in deployment.log_text()


# ---- replicas that differ -------------------------------------------------------------------------------------------


def test_f26_each_replica_has_its_own_state_and_the_failed_one_heals(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy, replicas=2)
    two = trainer.publish()
    # The journal of r1's host copy cannot be written, so its install does not begin.
    obstacle = deployment.root / "state" / "r1" / "mirror" / "journal.tmp"
    obstacle.mkdir()
    deployment.load(two)

    def is_mixed(status: dict) -> bool:  # type: ignore[type-arg]  # plain JSON
        stages = [replica["loading_state"]["stage"] for replica in status["replicas"]]
        return stages[0] == "done" and stages[1] == "error" and not status["ready"]

    deployment.wait(is_mixed, "one replica failing")
    versions = {served_version(deployment.complete(user=f"session{i}")) for i in range(24)}
    assert versions == {1, 2}, "each response tells the version of the replica that made it"
    obstacle.rmdir()
    deployment.load(two)
    deployment.wait_ready(two)
    assert {served_version(deployment.complete(user=f"session{i}")) for i in range(24)} == {2}


def test_f27_an_upload_without_its_marker_does_not_exist(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    for name in ("snapshot.json", "config.json", "model.safetensors.index.json"):
        trainer.path(two, name).unlink(missing_ok=True)
    answer = deployment.load(two)
    assert (answer.status, answer.code) == (409, "snapshot_incomplete")
    assert_serves(deployment, 1)


def test_f28_versions_rise_along_a_chain(trainer: Trainer, deploy: Deploy, tmp_path: Path) -> None:
    deployment = serve_one(trainer, deploy)
    source = write_checkpoint(tmp_path / "two", make_tensors(5, share=0.1, base=trainer.tensors))
    with pytest.raises(SnapshotError) as error:
        trainer.publisher.publish(source, "step000002", 1, kind="delta")
    assert error.value.exit_code == 2
    trainer.publish()
    manifest = trainer.path("step000002", "snapshot.json")
    body = json.loads(manifest.read_text())
    body["policy_version"] = 1
    manifest.write_text(json.dumps(body))
    answer = deployment.load("step000002")
    assert (answer.status, answer.code) == (409, "metadata_conflict")


def test_f28_a_request_that_contradicts_the_manifest_is_refused(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    answer = deployment.load(two, policy_version=7)
    assert (answer.status, answer.code) == (409, "metadata_conflict")
    metadata = {"previous_snapshot_identity": "step000009", "compression_format": "arc_v2"}
    answer = deployment.load(two, incremental_snapshot_metadata=metadata)
    assert (answer.status, answer.code) == (409, "metadata_conflict")
