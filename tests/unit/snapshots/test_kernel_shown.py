"""`hotloop snapshots encode` and `apply` say which inner loops did the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotloop.cli.snapshots import command
from hotloop.snapshots.codecs import kernel

FIXTURES = Path(__file__).parents[2] / "data" / "arc_v2"
BASE, FULL = str(FIXTURES / "step000001"), str(FIXTURES / "step000002_full")


@pytest.mark.parametrize("name", kernel.list_kernels())
def test_json_names_the_kernel_in_use(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_chosen", kernel.name_kernel())  # put back afterwards
    kernel.use_kernel(name)
    delta, out = str(tmp_path / "delta"), str(tmp_path / "out")
    for arguments in (
        ["encode", "--base", BASE, "--new", FULL, "--out", delta, "--json"],
        ["apply", "--base", BASE, "--delta", delta, "--out", out, "--json"],
    ):
        done = CliRunner().invoke(command, arguments, catch_exceptions=False)
        facts = json.loads(done.stdout)
        assert facts["kernel"] == name
        assert facts["changed_bytes"] > 0
