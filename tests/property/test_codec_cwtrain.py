"""Both directions with cwtrain's `write_delta` and `WeightMirror`, run by a second interpreter.

cwtrain needs Python 3.12 or newer. The interpreter is the one that HOTLOOP_CWTRAIN_PYTHON names, else this one, else
the first of `python3.14` down to `python3.12` on the PATH or among pyenv's versions that can import cwtrain. Without
one, the recorded step in tests/data/arc_v2 stands for it (tests/unit/snapshots/test_xor_zstd.py).
"""

from __future__ import annotations

import functools
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


def list_candidates() -> list[str]:
    """Interpreters that may have cwtrain, the best first."""
    found = [sys.executable] if sys.version_info >= (3, 12) else []
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (14, 13, 12):
        on_path = shutil.which(f"python3.{minor}")
        found += [on_path] if on_path else []
        found += [str(path) for path in sorted(versions.glob(f"3.{minor}.*/bin/python"), reverse=True)]
    return found


@functools.cache
def find_interpreter() -> str | None:
    named = os.environ.get("HOTLOOP_CWTRAIN_PYTHON")
    if named:  # taken at its word: when it lacks cwtrain, the tests fail
        return named
    for candidate in list_candidates():
        outcome = subprocess.run([candidate, "-c", "import cwtrain.hotload"], capture_output=True, check=False)
        if outcome.returncode == 0:
            return candidate
    return None


needs_cwtrain = pytest.mark.skipif(find_interpreter() is None, reason="no interpreter has cwtrain")


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
