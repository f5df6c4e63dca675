"""`hotloop snapshots`: what it prints, what it exits with, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotloop.cli.snapshots import command

FIXTURES = Path(__file__).parents[2] / "data" / "arc_v2"
BASE, DELTA, FULL = FIXTURES / "step000001", FIXTURES / "step000002", FIXTURES / "step000002_full"


def call(*arguments: object) -> dict[str, object]:
    outcome = CliRunner().invoke(command, [str(each) for each in arguments] + ["--json"], catch_exceptions=False)
    assert outcome.exit_code == 0
    parsed: dict[str, object] = json.loads(outcome.stdout)
    return parsed


@pytest.mark.parametrize("form", ["arc_v2", "slime"])
def test_encode_and_apply_lead_from_base_to_new(form: str, tmp_path: Path) -> None:
    encoded = call("encode", "--base", BASE, "--new", FULL, "--out", tmp_path / "d", "--format", form)
    assert encoded["changed_bytes"] == 59_899
    assert encoded["changed_frac"] == pytest.approx(59_899 / 308_717)
    assert encoded["stored_bytes"] == sum(path.stat().st_size for path in (tmp_path / "d").glob("*.safetensors"))
    assert encoded["checksum_format"] == ("alder32" if form == "arc_v2" else "xxh3-128")
    applied = call("apply", "--base", BASE, "--delta", tmp_path / "d", "--out", tmp_path / "n")
    assert (applied["tensors"], applied["changed_tensors"]) == (15, 13)
    for path in FULL.iterdir():
        assert (tmp_path / "n" / path.name).read_bytes() == path.read_bytes()


def test_encode_passes_on_encoding_checksum_level_and_versions(tmp_path: Path) -> None:
    out = tmp_path / "d"
    flags = ["--format", "slime", "--encoding", "overwrite", "--checksum", "adler32", "--level", "9"]
    call(
        "encode", "--base", BASE, "--new", FULL, "--out", out, *flags, "--version", "000007", "--base-version", "000006"
    )
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"] == {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }


def test_inspect_says_bytes_and_changed_share() -> None:
    found = call("inspect", DELTA)
    assert (found["kind"], found["full_bytes"], found["stored_bytes"]) == ("delta", 308_717, 3440 + 55_130)
    assert found["changed_frac"] == pytest.approx(59_899 / 308_717)
    outcome = CliRunner().invoke(command, ["inspect", str(FULL)], catch_exceptions=False)
    assert "301 KiB (308717 bytes)" in outcome.stdout
    assert "MB/s" in outcome.stdout


def test_a_refusal_is_one_line_with_its_code_and_no_traceback(tmp_path: Path) -> None:
    bad = FIXTURES / "bad" / "checksum_wrong.safetensors"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "model.safetensors").write_bytes(bad.read_bytes())
    (tmp_path / "b").mkdir()
    source = BASE / "model-00001-of-00002.safetensors"
    (tmp_path / "b" / "model.safetensors").write_bytes(source.read_bytes())
    arguments = ["snapshots", "apply", "--base", tmp_path / "b", "--delta", tmp_path / "d", "--out", tmp_path / "n"]
    outcome = subprocess.run(
        [sys.executable, "-m", "hotloop.cli.main", *map(str, arguments)], capture_output=True, text=True
    )
    assert outcome.returncode == 1
    assert "[checksum_mismatch]" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "n").exists()


def test_the_commands_import_neither_torch_nor_a_bucket(tmp_path: Path) -> None:
    program = (
        "import sys; from hotloop.cli.main import root; "
        "root.main(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'torch', 'obstore', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    arguments = ["snapshots", "encode", "--base", BASE, "--new", FULL, "--out", tmp_path / "d"]
    outcome = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1] == "[]"
