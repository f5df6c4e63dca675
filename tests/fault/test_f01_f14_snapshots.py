"""F01 to F14 of the hot-load contract: what a bad snapshot does to a real deployment. The old one goes on serving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deployment_harness import Deployment, Trainer, served_version, write_checkpoint

from hotloop.snapshots.manifest import parse_manifest

Deploy = Callable[..., Deployment]
FIXTURES = Path(__file__).parent.parent / "data" / "arc_v2"
ARC_V2 = {"compression_format": "arc_v2", "checksum_format": "alder32"}


def serve_one(trainer: Trainer, deploy: Deploy) -> Deployment:
    """A deployment that serves the trainer's first anchor."""
    identity = trainer.anchor()
    deployment = deploy()
    deployment.wait_ready(identity)
    return deployment


def assert_still_serves_one(deployment: Deployment) -> None:
    replica = deployment.replica()
    assert replica["readiness"] and replica["current_snapshot_identity"] == "step000001"
    assert served_version(deployment.complete()) == 1


def edit_manifest(path: Path, edit: Callable[[dict], None]) -> None:  # type: ignore[type-arg]  # plain JSON
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def serve_fixture(trainer: Trainer, deploy: Deploy) -> Deployment:
    """A deployment that serves the reference's base checkpoint, a foreign anchor without a manifest."""
    shutil.copytree(FIXTURES / "step000001", trainer.bucket_dir / "step000001")
    trainer.publisher.set_startup("step000001")
    deployment = deploy()
    deployment.wait_ready("step000001")
    return deployment


def bad_delta(trainer: Trainer, name: str) -> None:
    """Put the reference's delta into the bucket with one shard broken."""
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    shutil.copyfile(FIXTURES / "bad" / name, trainer.path("step000002", "model-00001-of-00002.safetensors"))


def load_bad_delta(trainer: Trainer, deploy: Deploy, name: str) -> dict[str, object]:
    """Serve the fixture, ask for the broken delta, and return how it failed."""
    deployment = serve_fixture(trainer, deploy)
    bad_delta(trainer, name)
    answer = deployment.load("step000002", incremental_snapshot_metadata=ARC_V2)
    assert answer.status == 200, answer.body
    state = deployment.wait_error("step000002")
    assert_still_serves_one(deployment)
    return state


def test_f01_a_delta_of_another_parent_is_built_through_its_chain(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    trainer.publish()
    three = trainer.publish()
    assert deployment.load(three).status == 200
    deployment.wait_ready(three)
    assert deployment.replica()["loading_state"]["chain"] == ["step000002", "step000003"]


def test_f01_a_parent_with_other_content_than_the_one_served_is_a_mismatch(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    shutil.rmtree(trainer.bucket_dir / "step000001")
    other = trainer.bucket_dir / "other"
    shutil.copytree(FIXTURES / "step000002_full", other)
    metadata = {**ARC_V2, "previous_snapshot_identity": "gone"}
    answer = deployment.load("step000002", incremental_snapshot_metadata=metadata)
    assert (answer.status, answer.code) == (409, "parent_unknown")
    assert_still_serves_one(deployment)


def test_f02_an_unknown_parent_is_refused_at_the_post(trainer: Trainer, deploy: Deploy) -> None:
    one, two, three = trainer.anchor(), trainer.publish(), trainer.publish()
    shutil.rmtree(trainer.bucket_dir / two)
    deployment = deploy()
    deployment.wait_ready(one)
    answer = deployment.load(three)
    assert (answer.status, answer.code) == (409, "parent_unknown")
    assert "anchor" in answer.body["error"]["message"]
    assert_still_serves_one(deployment)


def test_f03_a_delta_that_names_no_parent_is_of_the_served_identity(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    assert deployment.load("step000002", incremental_snapshot_metadata=ARC_V2).status == 200
    deployment.wait_ready("step000002")


def test_f03_a_delta_without_parent_where_nothing_is_served_is_refused(trainer: Trainer, deploy: Deploy) -> None:
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    deployment = deploy()
    answer = deployment.load("step000002", incremental_snapshot_metadata=ARC_V2)
    assert (answer.status, answer.code) == (400, "missing_parent")


def test_f04_a_wrong_checksum_fails_the_load_with_the_tensor(trainer: Trainer, deploy: Deploy) -> None:
    state = load_bad_delta(trainer, deploy, "checksum_wrong.safetensors")
    assert state["reason"] == "checksum_mismatch"
    assert {"tensor", "expected", "actual"} <= set(state["details"])  # type: ignore[call-overload]  # a JSON object


@pytest.mark.parametrize("name", ["checksum_missing_for_one_tensor.safetensors", "metadata_absent.safetensors"])
def test_f05_a_missing_checksum_fails_before_anything_is_applied(trainer: Trainer, deploy: Deploy, name: str) -> None:
    assert load_bad_delta(trainer, deploy, name)["reason"] == "checksum_missing"


def test_f05_a_checksum_in_the_wrong_text_form_is_malformed(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    # The file's checksums are decimal text; the name adler32 selects hexadecimal.
    wrong = {"compression_format": "arc_v2", "checksum_format": "adler32"}
    assert deployment.load("step000002", incremental_snapshot_metadata=wrong).status == 200
    assert deployment.wait_error("step000002")["reason"] == "checksum_malformed"
    assert_still_serves_one(deployment)


def test_f06_a_missing_shard_of_a_complete_manifest_is_named(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    trainer.path(two, "model.safetensors").unlink()
    assert deployment.load(two).status == 200
    state = deployment.wait_error(two)
    assert state["reason"] == "missing_object"
    assert "model.safetensors" in state["message"]
    assert_still_serves_one(deployment)


def test_f06_without_a_manifest_a_replica_waits_for_the_missing_shard(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002_full", trainer.bucket_dir / "step000002")
    shard = trainer.path("step000002", "model-00002-of-00002.safetensors")
    data = shard.read_bytes()
    shard.unlink()
    assert deployment.load("step000002").status == 200
    deployment.wait(
        lambda status: status["replicas"][0]["loading_state"]["stage"] == "downloading", "waiting in downloading"
    )
    shard.write_bytes(data)
    deployment.wait_ready("step000002")


def test_f06_without_a_manifest_the_wait_ends(trainer: Trainer, deploy: Deploy) -> None:
    shutil.copytree(FIXTURES / "step000001", trainer.bucket_dir / "step000001")
    trainer.publisher.set_startup("step000001")
    deployment = deploy(config={"limits": {"incomplete_wait_s": 0.2}})
    deployment.wait_ready("step000001")
    shutil.copytree(FIXTURES / "step000002_full", trainer.bucket_dir / "step000002")
    trainer.path("step000002", "model-00002-of-00002.safetensors").unlink()
    assert deployment.load("step000002").status == 200
    assert deployment.wait_error("step000002")["reason"] == "missing_object"


@pytest.mark.parametrize("name", ["../step000001/model.safetensors", "a/b.safetensors", "weights.bin", ""])
def test_f07_an_index_that_names_a_path_is_never_fetched(trainer: Trainer, deploy: Deploy, name: str) -> None:
    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002_full", trainer.bucket_dir / "step000002")
    index = trainer.path("step000002", "model.safetensors.index.json")
    body = json.loads(index.read_text())
    body["weight_map"][next(iter(body["weight_map"]))] = name
    index.write_text(json.dumps(body))
    answer = deployment.load("step000002")
    assert (answer.status, answer.code) == (400, "invalid_index")
    assert_still_serves_one(deployment)


@pytest.mark.parametrize("name", ["tensor_extra.safetensors", "tensor_missing.safetensors"])
def test_f08_another_tensor_set_than_the_base_fails(trainer: Trainer, deploy: Deploy, name: str) -> None:
    assert load_bad_delta(trainer, deploy, name)["reason"] == "tensor_set_mismatch"


def test_f08_stray_files_that_are_not_weights_are_ignored(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    trainer.path(two, "notes.txt").write_text("not weights")
    deployment.load(two)
    deployment.wait_ready(two)


def test_f09_a_truncated_shard_without_a_manifest_is_malformed(trainer: Trainer, deploy: Deploy) -> None:
    assert load_bad_delta(trainer, deploy, "file_truncated.safetensors")["reason"] == "malformed_shard"


def test_f09_a_truncated_shard_with_a_manifest_is_a_corrupt_object(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()
    shard = trainer.path(two, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-8])
    deployment.load(two)
    assert deployment.wait_error(two)["reason"] == "object_corrupt"
    assert_still_serves_one(deployment)


def test_f10_offsets_past_the_end_of_the_file_are_malformed(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    shard = trainer.path("step000002", "model-00001-of-00002.safetensors")
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    last = max((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    header[last]["data_offsets"][1] += 4096
    header[last]["shape"] = [header[last]["shape"][0] + 4096]
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    deployment.load("step000002", incremental_snapshot_metadata=ARC_V2)
    assert deployment.wait_error("step000002")["reason"] == "malformed_shard"
    assert_still_serves_one(deployment)


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("frame_corrupt.safetensors", {"decode_failed", "checksum_mismatch"}),
        ("frame_magic_zeroed.safetensors", {"decode_failed"}),
    ],
)
def test_f11_a_corrupt_frame_leaves_the_base_untouched(
    trainer: Trainer, deploy: Deploy, name: str, reasons: set[str]
) -> None:
    assert load_bad_delta(trainer, deploy, name)["reason"] in reasons


def test_f12_an_expansion_of_another_size_fails(trainer: Trainer, deploy: Deploy) -> None:
    import zstandard

    deployment = serve_fixture(trainer, deploy)
    shutil.copytree(FIXTURES / "step000002", trainer.bucket_dir / "step000002")
    shard = trainer.path("step000002", "model-00001-of-00002.safetensors")
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][0])
    begin, _ = header[names[-1]]["data_offsets"]
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    header[names[-1]] = {"dtype": "U8", "shape": [len(bomb)], "data_offsets": [begin, begin + len(bomb)]}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[:begin] + bomb)
    deployment.load("step000002", incremental_snapshot_metadata=ARC_V2)
    assert deployment.wait_error("step000002")["reason"] == "size_mismatch"
    assert_still_serves_one(deployment)


def test_f13_a_changed_layout_in_a_delta_fails(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish()

    def widen(manifest: dict) -> None:  # type: ignore[type-arg]  # plain JSON
        entry = manifest["tensors"]["norm.weight"]
        entry["shape"] = [12, 2]

    edit_manifest(trainer.path(two, "snapshot.json"), widen)
    parse_manifest(trainer.path(two, "snapshot.json").read_bytes(), identity=two)  # still a well-formed manifest
    deployment.load(two)
    assert deployment.wait_error(two)["reason"] == "layout_changed"
    assert_still_serves_one(deployment)


def test_f13_an_anchor_of_another_model_is_incompatible(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish(kind="anchor", num_hidden_layers=2)
    deployment.load(two)
    state = deployment.wait_error(two)
    assert state["reason"] == "incompatible_config" and state["details"]["fields"] == ["num_hidden_layers"]
    assert_still_serves_one(deployment)


def test_f13_config_keys_can_be_left_out_of_the_comparison(trainer: Trainer, deploy: Deploy) -> None:
    deployment = serve_one(trainer, deploy)
    two = trainer.publish(kind="anchor", note="harmless")
    deployment.load(two, validation={"extra_fields_ignore": ["note"]})
    deployment.wait_ready(two)


def test_f13_an_anchor_with_other_tensors_is_incompatible(trainer: Trainer, deploy: Deploy, tmp_path: Path) -> None:
    deployment = serve_one(trainer, deploy)
    tensors = {name: values for name, values in trainer.tensors.items() if name != "norm.weight"}
    source = write_checkpoint(tmp_path / "smaller", tensors)
    trainer.publisher.publish(source, "step000002", 2, kind="anchor")
    deployment.load("step000002")
    assert deployment.wait_error("step000002")["reason"] == "incompatible_config"
    assert_still_serves_one(deployment)


@pytest.mark.parametrize(
    ("formats", "code"),
    [
        ({"compression_format": "arc_v3"}, "unsupported_format"),
        ({"compression_format": "arc_v1"}, "unsupported_format"),
        ({"compression_format": "lz4"}, "unsupported_format"),
        ({"compression_format": "arc_v2", "checksum_format": "crc32"}, "unsupported_checksum"),
    ],
)
def test_f14_an_unknown_format_is_refused_with_the_supported_ones(
    trainer: Trainer, deploy: Deploy, formats: dict[str, str], code: str
) -> None:
    deployment = serve_one(trainer, deploy)
    answer = deployment.load("step000002", incremental_snapshot_metadata=formats)
    assert (answer.status, answer.code) == (400, code)
    assert answer.body["error"]["details"]["supported"]
