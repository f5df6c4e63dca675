"""Both directions with cwtrain's `write_delta` and `WeightMirror`, run by a second interpreter.

cwtrain needs Python 3.12 or newer. Name an interpreter that has it in HOTLOOP_CWTRAIN_PYTHON; without one, the
recorded step in tests/data/arc_v2 stands for it (tests/unit/snapshots/test_xor_zstd.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.snapshots.codecs.base import DeltaFormats
from hotloop.snapshots.offline import apply_directory, encode_directory

FIXTURES = Path(__file__).parents[1] / "data" / "arc_v2"
BASE, FULL = FIXTURES / "step000001", FIXTURES / "step000002_full"
FORMATS = DeltaFormats("zstd", "adler32", "xor")


def find_interpreter() -> str | None:
    named = os.environ.get("HOTLOOP_CWTRAIN_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("cwtrain") else None)


needs_cwtrain = pytest.mark.skipif(find_interpreter() is None, reason="no interpreter with cwtrain is named")


def run(program: str, *arguments: Path) -> None:
    interpreter = find_interpreter()
    assert interpreter is not None
    outcome = subprocess.run(
        [interpreter, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert outcome.returncode == 0, outcome.stderr


@needs_cwtrain
def test_we_apply_what_cwtrain_writes(tmp_path: Path) -> None:
    program = (
        "import sys; from cwtrain.hotload.delta import write_delta; "
        "write_delta(*sys.argv[1:], version='000002', base_version='000001', shard_bytes=40000)"
    )
    run(program, BASE, FULL, tmp_path / "delta")
    assert len(list((tmp_path / "delta").glob("*.safetensors"))) > 1
    apply_directory(BASE, tmp_path / "delta", tmp_path / "out")
    for path in FULL.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@needs_cwtrain
def test_cwtrain_applies_what_we_write(tmp_path: Path) -> None:
    encode_directory(BASE, FULL, tmp_path / "delta", formats=FORMATS, version="000002", base_version="000001")
    shutil.copytree(BASE, tmp_path / "base")
    program = (
        "import sys; from cwtrain.hotload import WeightMirror; "
        "WeightMirror.create(sys.argv[1], sys.argv[2], version='000001').apply_delta(sys.argv[3])"
    )
    run(program, tmp_path / "base", tmp_path / "mirror", tmp_path / "delta")
    for path in FULL.glob("*.safetensors"):
        assert (tmp_path / "mirror" / path.name).read_bytes() == path.read_bytes()
