"""Deltas on plain directories: what comes out, and that nothing half-made ever stands under its name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from hotloop.errors import InputError, SnapshotError
from hotloop.snapshots import offline
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, SLIME_FORMATS, DeltaFormats
from hotloop.snapshots.inspection import inspect_directory
from hotloop.snapshots.offline import apply_directory, encode_directory
from hotloop.snapshots.shard import ShardWriter, open_shard

FIXTURES = Path(__file__).parents[2] / "data" / "arc_v2"
BASE, DELTA, FULL = FIXTURES / "step000001", FIXTURES / "step000002", FIXTURES / "step000002_full"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["step000002", "step000002_cwtrain_xor_zstd"])
def test_both_recorded_forms_lead_to_the_recorded_checkpoint(name: str, tmp_path: Path) -> None:
    report = apply_directory(BASE, FIXTURES / name, tmp_path / "out")
    assert read_all(tmp_path / "out") == read_all(FULL)
    assert (report.tensors, report.changed_tensors, report.full_bytes) == (15, 13, 308_717)


@pytest.mark.parametrize("formats", [ARC_V2_FORMATS, SLIME_FORMATS, DeltaFormats("zstd", "adler32", "overwrite")])
def test_what_is_encoded_is_applied(formats: DeltaFormats, tmp_path: Path) -> None:
    encoded = encode_directory(BASE, FULL, tmp_path / "delta", formats=formats)
    assert encoded.full_bytes == 308_717
    assert encoded.changed_bytes == inspect_directory(tmp_path / "delta").changed_bytes
    assert encoded.stored_bytes == sum(path.stat().st_size for path in (tmp_path / "delta").glob("*.safetensors"))
    apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    assert read_all(tmp_path / "out") == read_all(FULL)


def test_an_arc_v2_delta_carries_index_and_config_but_no_other_file(tmp_path: Path) -> None:
    shutil.copytree(FULL, tmp_path / "new")
    (tmp_path / "new" / "notes.txt").write_text("x")
    encode_directory(BASE, tmp_path / "new", tmp_path / "delta")
    assert sorted(read_all(tmp_path / "delta")) == ["config.json", *FILES, "model.safetensors.index.json"]


def test_the_new_checkpoint_may_be_sharded_otherwise(tmp_path: Path) -> None:
    shards = [open_shard(FULL / file) for file in FILES]
    (tmp_path / "new").mkdir()
    entries = {name: (entry.dtype, entry.shape) for shard in shards for name, entry in shard.tensors.items()}
    with ShardWriter(tmp_path / "new" / "model.safetensors", entries) as writer:
        for shard in shards:
            for name in shard.tensors:
                writer.begin(name)
                writer.write(shard.read(name))
                writer.end()
        writer.finish()
    encode_directory(BASE, tmp_path / "new", tmp_path / "delta")
    apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    for file in FILES:
        assert (tmp_path / "out" / file).read_bytes() == (FULL / file).read_bytes()


@pytest.mark.parametrize("formats", [ARC_V2_FORMATS, SLIME_FORMATS])
def test_an_empty_delta_gives_the_base_back(formats: DeltaFormats, tmp_path: Path) -> None:
    encoded = encode_directory(BASE, BASE, tmp_path / "delta", formats=formats)
    assert encoded.changed_bytes == 0
    report = apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    assert report.changed_bytes == 0
    assert read_all(tmp_path / "out") == read_all(BASE)
    assert inspect_directory(tmp_path / "delta").changed_tensors == 0


@pytest.mark.parametrize("bad", sorted(path.stem for path in (FIXTURES / "bad").iterdir()))
def test_a_broken_delta_leaves_no_output_and_the_base_untouched(bad: str, tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "base")
    shutil.copytree(DELTA, tmp_path / "delta")
    shutil.copy(FIXTURES / "bad" / f"{bad}.safetensors", tmp_path / "delta" / FILES[0])
    with pytest.raises(SnapshotError):
        apply_directory(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta"]
    assert read_all(tmp_path / "base") == read_all(BASE)


def test_an_existing_output_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InputError) as caught:
        apply_directory(BASE, DELTA, tmp_path / "out")
    assert caught.value.code == "output_exists"
    assert read_all(tmp_path / "out") == {"mine": b"x"}


def test_an_input_cannot_be_the_output(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((InputError, SnapshotError)):
        apply_directory(tmp_path / "empty", DELTA, tmp_path / "empty")


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("../secret.safetensors", "invalid_index"),
        ("weights.bin", "invalid_index"),
        ("a\\b.safetensors", "invalid_index"),
        ("..safetensors", "invalid_index"),
        ("a\0.safetensors", "invalid_index"),
        (7, "invalid_index"),
        ("absent.safetensors", "missing_object"),
    ],
)
def test_an_index_can_only_name_files_beside_it(file: object, code: str, tmp_path: Path) -> None:
    shutil.copytree(DELTA, tmp_path / "delta")
    path = tmp_path / "delta" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(SnapshotError) as caught:
        apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    assert caught.value.code == code


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"x"'])
def test_an_index_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    shutil.copytree(DELTA, tmp_path / "delta")
    (tmp_path / "delta" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SnapshotError) as caught:
        apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    assert caught.value.code == "invalid_index"


def test_a_delta_without_one_of_the_base_s_files_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DELTA, tmp_path / "delta")
    (tmp_path / "delta" / "model.safetensors.index.json").unlink()
    (tmp_path / "delta" / FILES[1]).unlink()
    with pytest.raises(SnapshotError) as caught:
        apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    assert caught.value.code == "tensor_set_mismatch"
    assert caught.value.details["missing"] == [FILES[1]]


def test_the_manifest_says_how_a_delta_is_stored(tmp_path: Path) -> None:
    shutil.copytree(DELTA, tmp_path / "delta")
    formats = {"compression_format": "arc_v3", "checksum_format": "alder32", "delta_encoding": "xor"}
    (tmp_path / "delta" / "snapshot.json").write_text(json.dumps({"kind": "delta", "formats": formats}))
    with pytest.raises(SnapshotError) as caught:
        apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    assert caught.value.code == "unsupported_format"


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        encode_directory(tmp_path, FULL, tmp_path / "out")
    assert caught.value.code == "missing_object"
    with pytest.raises(InputError) as missing:
        encode_directory(tmp_path / "absent", FULL, tmp_path / "out")
    assert missing.value.code == "not_a_directory"


def test_inspection_says_what_a_directory_is() -> None:
    full = inspect_directory(FULL)
    assert (full.kind, full.tensors, full.full_bytes, full.changed_tensors) == ("full", 15, 308_717, None)
    assert full.dtypes["BF16"] == 5
    delta = inspect_directory(DELTA)
    assert (delta.kind, delta.formats, delta.changed_tensors) == ("delta", ARC_V2_FORMATS, 13)
    assert delta.full_bytes == 308_717
    assert inspect_directory(FIXTURES / "step000002_cwtrain_xor_zstd").changed_bytes == delta.changed_bytes


_KILLED = """
import os, sys, time
from pathlib import Path
from hotloop.snapshots import offline
original = offline._NewFiles.write
def stop(self, name, position, data):
    original(self, name, position, data)
    os.write(1, b"written\\n")  # in one piece, from whichever thread
    time.sleep(600)
offline._NewFiles.write = stop
offline.apply_directory(*(Path(name) for name in sys.argv[1:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs kill -9")
def test_a_kill_while_writing_leaves_no_output_and_the_next_call_clears_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", _KILLED, str(BASE), str(DELTA), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "written\n"
            assert not out.exists()
            assert [path.name.startswith(".out.partial-") for path in tmp_path.iterdir()] == [True]
        finally:
            child.send_signal(signal.SIGKILL)
    apply_directory(BASE, DELTA, out)
    assert read_all(out) == read_all(FULL)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_no_space_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_full_disk(path: Path) -> IO[bytes]:
        return Path("/dev/full").open("wb", buffering=0)

    monkeypatch.setattr(offline, "_create_file", open_full_disk)
    with pytest.raises(SnapshotError) as caught:
        apply_directory(BASE, DELTA, tmp_path / "out")
    assert caught.value.code == "no_space"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lacking", ["base", "new"])
@pytest.mark.parametrize("formats", [ARC_V2_FORMATS, SLIME_FORMATS])
def test_a_checkpoint_that_lacks_a_shard_its_index_names_is_not_encoded(
    lacking: str, formats: DeltaFormats, tmp_path: Path
) -> None:
    """Both sides without the same file would agree with each other, and the delta would lose its tensors."""
    folders = {"base": tmp_path / "base", "new": tmp_path / "new"}
    for name, source in (("base", BASE), ("new", BASE)):
        shutil.copytree(source, folders[name])
        (folders[name] / FILES[1]).unlink()
    whole = "new" if lacking == "base" else "base"
    (folders[whole] / "model.safetensors.index.json").unlink()
    with pytest.raises(SnapshotError, match=FILES[1]) as caught:
        encode_directory(folders["base"], folders["new"], tmp_path / "out", formats=formats)
    assert caught.value.code == "missing_object"
    assert caught.value.where == str(folders[lacking] / "model.safetensors.index.json")
    assert not (tmp_path / "out").exists()


def test_a_delta_is_not_applied_to_a_base_that_lacks_a_shard(tmp_path: Path) -> None:
    encode_directory(BASE, BASE, tmp_path / "delta", formats=SLIME_FORMATS)
    shutil.copytree(BASE, tmp_path / "base")
    (tmp_path / "base" / FILES[1]).unlink()
    with pytest.raises(SnapshotError) as caught:
        apply_directory(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    assert (caught.value.code, caught.value.details["key"]) == ("missing_object", FILES[1])


@pytest.mark.parametrize("formats", [ARC_V2_FORMATS, SLIME_FORMATS])
def test_a_refused_encode_names_the_new_checkpoint_and_not_the_hidden_folder(
    formats: DeltaFormats, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    with ShardWriter(tmp_path / "new" / "model.safetensors", {"other": ("F32", (1,))}) as writer:
        writer.begin("other")
        writer.write(b"\0\0\0\0")
        writer.end()
        writer.finish({})
    with pytest.raises(SnapshotError) as caught:
        encode_directory(BASE, tmp_path / "new", tmp_path / "out", formats=formats)
    assert (caught.value.code, caught.value.where) == ("tensor_set_mismatch", str(tmp_path / "new"))


def test_a_folder_without_weights_is_not_described_as_an_empty_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SnapshotError) as caught:
        inspect_directory(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("missing_object", 2)


def test_a_slime_delta_that_changes_nothing_can_be_inspected(tmp_path: Path) -> None:
    encode_directory(BASE, BASE, tmp_path / "delta", formats=SLIME_FORMATS)
    found = inspect_directory(tmp_path / "delta")
    assert (found.kind, found.files, found.changed_bytes) == ("delta", 0, 0)
