"""The wheel carries the C kernel where a compiler works; else it is pure Python, and its deltas are equal."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "data" / "arc_v2"
LIBRARY = "hotloop/snapshots/codecs/_kernel.so"
BUILD = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
INSTALL = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
compiler = shlex.split(os.environ.get("CC", "")) or [name for name in ("cc", "gcc", "clang") if shutil.which(name)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without anything that was built, but with a page, so that no build needs Node."""
    return copy_source(tmp_path_factory.mktemp("source"))


def copy_source(folder: Path) -> Path:
    for name in ("pyproject.toml", "README.md", "hatch_build.py", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "static")
    shutil.copytree(ROOT / "src", folder / "src", ignore=skipped)
    static = folder / "src" / "hotloop" / "lab" / "static"
    static.mkdir()
    (static / "index.html").write_text("<!doctype html>\n")
    return folder


def build(source: Path, out: Path, **environment: str) -> Path:
    subprocess.run([*BUILD, "-w", str(out), str(source)], check=True, timeout=300, env=os.environ | environment)
    (found,) = out.glob("*.whl")
    return found


def use(wheel: Path, folder: Path) -> list[str]:
    """Install a wheel, encode and apply with it; return its kernel's name and digests of all that was written."""
    site = folder / "site"
    subprocess.run([*INSTALL, str(site), str(wheel)], check=True, timeout=120)
    program = (
        "import sys; from pathlib import Path; from hotloop.snapshots.codecs.kernel import name_kernel; "
        "from hotloop.snapshots.offline import apply_directory, encode_directory; "
        "base, new, out = map(Path, sys.argv[1:]); encode_directory(base, new, out / 'delta'); "
        "apply_directory(base, out / 'delta', out / 'applied'); print(name_kernel())"
    )
    arguments = [FIXTURES / "step000001", FIXTURES / "step000002_full", folder]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(site)}, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    written = sorted((folder / "delta").iterdir()) + sorted((folder / "applied").iterdir())
    return [done.stdout.strip(), *(hashlib.sha256(path.read_bytes()).hexdigest() for path in written)]


@pytest.mark.skipif(not compiler or sys.platform == "win32", reason="no C compiler is here")
def test_with_and_without_a_compiler_the_wheel_works_alike(source: Path, tmp_path: Path) -> None:
    native, pure = build(source, tmp_path / "with"), build(source, tmp_path / "without", CC="no-such-compiler")
    assert native.name.startswith("hotloop-")
    assert not native.name.endswith("-any.whl")
    assert "-py3-none-" in native.name
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(native) as with_kernel, zipfile.ZipFile(pure) as without:
        assert LIBRARY in with_kernel.namelist()
        assert set(with_kernel.namelist()) - set(without.namelist()) == {LIBRARY}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = use(native, tmp_path / "a"), use(pure, tmp_path / "b")
    assert (one[0], other[0]) == ("native", "numpy")
    assert one[1:] == other[1:]
    assert len(one) > 6


@pytest.mark.skipif(shutil.which("false") is None, reason="needs a program that fails")
def test_a_compiler_that_fails_leaves_a_pure_wheel(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path, CC="false").name.endswith("-py3-none-any.whl")


@pytest.mark.skipif(not compiler or sys.platform == "win32", reason="no C compiler is here")
def test_an_editable_install_builds_the_kernel_beside_its_source(tmp_path: Path) -> None:
    folder = copy_source(tmp_path)
    program = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], cwd=folder, check=True, timeout=120)
    program = "from hotloop.snapshots.codecs import kernel; print(kernel.LIBRARY, kernel.name_kernel())"
    asked = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(folder / "src")}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked.stdout.split() == [str(folder / "src" / LIBRARY), "native"]
