"""The page's own tests and type check, run by their own tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"


@pytest.mark.parametrize("command", ["test", "check"])
def test_the_pages_own_checks_pass(command: str) -> None:
    npm = shutil.which("npm")
    if npm is None or not (WEB / "node_modules").is_dir():
        pytest.skip("the page's tools are not installed: cd web && npm ci")
    done = subprocess.run([npm, "run", "--silent", command], cwd=WEB, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
