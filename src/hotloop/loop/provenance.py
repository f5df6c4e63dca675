"""What a run was made of: versions of what it ran with, and the state of the source it ran from.

Owns: `describe_environment`, which goes into a run's experiment.json. Promises: no address, no user name, no path.
"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hotloop

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "zstandard", "pydantic")
_GIT_TIMEOUT_S = 5.0


def describe_environment() -> dict[str, Any]:
    """Return versions and git state as plain JSON values."""
    return {
        "versions": {
            "hotloop": hotloop.__version__,
            "python": platform.python_version(),
            **{name: found for name in _PACKAGES if (found := _version_of(name))},
        },
        "platform": f"{platform.system()} {platform.machine()}",
        "git": read_git_state(Path(__file__).parent),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_git_state(directory: Path) -> dict[str, Any]:
    """Return commit and dirty flag of the repository that holds a directory; empty outside a repository."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        changes = _git(directory, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "dirty": bool(changes)}


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S).stdout.strip()
