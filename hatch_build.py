"""Build hook: put the lab's page into the wheel and the sdist.

Owns: `CustomBuildHook`. When src/hotloop/lab/static is absent and web/ is there, it runs `npm ci` and `npm run build`.
Without npm a wheel or sdist fails with those two commands; an editable install only warns, and `hotloop lab` then
answers with a page that names them. It also writes build_info.json, the commit that the package was built from.

Promises: nothing is built when the files are there already, so an install from an sdist or a wheel needs no Node.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMANDS = (("npm", "ci"), ("npm", "run", "build"))


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling finds this class by its name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page if it is not there, and note the commit."""
        root = Path(self.root)
        static = root / "src" / "hotloop" / "lab" / "static"
        is_editable = version == "editable"
        if not (static / "index.html").is_file():
            self._build_page(root / "web", is_editable)
        if not is_editable:
            self._write_build_info(root, build_data)

    def _build_page(self, web: Path, is_editable: bool) -> None:
        commands = " && ".join(["cd web", *(" ".join(command) for command in COMMANDS)])
        npm = shutil.which("npm")
        if npm is None or not web.is_dir():
            message = f"the lab's page is not built and npm is not here; with Node 20 or newer run: {commands}"
            if is_editable:
                self.app.display_warning(message)
                return
            raise RuntimeError(message)
        if is_editable:
            self.app.display_warning(f"the lab's page is not built; to see it run: {commands}")
            return
        for command in COMMANDS:
            subprocess.run([npm, *command[1:]], cwd=web, check=True)

    def _write_build_info(self, root: Path, build_data: dict[str, Any]) -> None:
        """Write the commit into the package; an sdist carries its own and has no repository."""
        packed = root / "build_info.json"
        commit = _run_git(root, "rev-parse", "HEAD")
        if commit:
            dirty = bool(_run_git(root, "status", "--porcelain", "--", "src/hotloop"))
            packed = root / "build" / "build_info.json"
            packed.parent.mkdir(exist_ok=True)
            packed.write_text(json.dumps({"commit": commit, "dirty": dirty}) + "\n", encoding="utf-8")
        if packed.is_file():
            name = "hotloop/build_info.json" if self.target_name == "wheel" else "build_info.json"
            build_data["force_include"][str(packed)] = name


def _run_git(root: Path, *arguments: str) -> str:
    """Ask git about this folder; empty when it is no repository of its own."""
    if not (root / ".git").exists():
        return ""
    found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""
