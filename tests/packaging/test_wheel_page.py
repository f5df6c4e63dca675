"""The wheel carries the page: it installs without Node, serves what its index names, and fails to build with advice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "hotloop" / "lab" / "static"
BUILD = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="building a wheel needs hatchling")


def without_node(folder: Path) -> dict[str, str]:
    """An environment whose PATH has no npm and no node."""
    folder.mkdir()
    for name in ("git", "bash", "sh"):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return {**os.environ, "PATH": str(folder)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (STATIC / "index.html").is_file() and shutil.which("npm") is None:
        pytest.skip("the page is not built and npm is not here")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([*BUILD, "-w", str(out), str(ROOT)], check=True, timeout=300)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder of their own; what it depends on comes from this environment."""
    target = tmp_path_factory.mktemp("site")
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target))
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def served(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a lab that runs from the installed wheel, with Node hidden."""
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = without_node(folder / "bin") | {"PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import hotloop; print(hotloop.__file__)"],
        env=environment, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(installed)
    child = subprocess.Popen(
        [sys.executable, "-m", "hotloop.cli.main", "lab", "--port", "0", "--no-open"],
        env=environment, cwd=folder, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.terminate()
    child.wait(timeout=30)
    child.stdout.close()


def fetch(address: str, token: str = "") -> bytes:
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        body: bytes = answer.read()
    return body


def test_every_file_that_the_index_names_is_served_without_node(served: str) -> None:
    origin = served.partition("/?")[0]
    index = fetch(origin + "/").decode()
    named = re.findall(r'(?:src|href)="\./([^"]+)"', index)
    assert [Path(name).suffix for name in named].count(".js") >= 1
    assert [Path(name).suffix for name in named].count(".css") >= 1
    for name in named:
        assert fetch(f"{origin}/{name}")


def test_the_installed_lab_plans(served: str) -> None:
    origin, _, token = served.partition("/?token=")
    assert b'"defaults"' in fetch(f"{origin}/api/schema", token)
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(f"{origin}/api/schema")
    assert caught.value.code == 401
    caught.value.close()


def test_the_wheel_names_the_commit_it_was_built_from(wheel: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a repository")
    with zipfile.ZipFile(wheel) as archive:
        facts = archive.read("hotloop/build_info.json").decode()
    assert re.search(r'"commit": "[0-9a-f]{40}"', facts)


def test_without_npm_and_without_built_files_the_build_names_the_two_commands(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "hatch_build.py", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    (source / "src" / "hotloop").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "hotloop" / "__init__.py", source / "src" / "hotloop" / "__init__.py")
    (source / "web").mkdir()
    built = subprocess.run(
        [*BUILD, "-w", str(tmp_path / "out"), str(source)],
        env=without_node(tmp_path / "bin"), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert built.returncode != 0
    assert "npm ci && npm run build" in built.stdout + built.stderr
