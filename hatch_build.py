"""Build hook: put the lab's page and the snapshots' C kernel into the package.

Owns: `CustomBuildHook`. When src/hotloop/lab/static is absent and web/ is there, it runs `npm ci` and `npm run build`.
Without npm a wheel or sdist fails with those two commands; an editable install only warns, and `hotloop lab` then
answers with a page that names them. Where a C compiler is found, kernel.c is compiled: a wheel then carries
`_kernel.so` and the tag of this platform, an editable install has it beside its source. Without a compiler, or when
it fails, the wheel is pure Python and numpy does the same work. It also writes build_info.json, the commit that the
package was built from.

Promises: nothing of the page is built when the files are there already, so an install from an sdist or a wheel needs
no Node. No build fails for want of a C compiler. `python hatch_build.py` compiles the kernel beside its source.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMANDS = (("npm", "ci"), ("npm", "run", "build"))
CODECS = Path("src", "hotloop", "snapshots", "codecs")
KERNEL_SOURCE, KERNEL_LIBRARY = CODECS / "kernel.c", CODECS / "_kernel.so"
COMPILERS = ("cc", "gcc", "clang")
COMPILE_FLAGS = ("-O3", "-std=c99", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling finds this class by its name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page if it is not there, and note the commit."""
        root = Path(self.root)
        static = root / "src" / "hotloop" / "lab" / "static"
        is_editable = version == "editable"
        if not (static / "index.html").is_file():
            self._build_page(root / "web", is_editable)
        if is_editable:
            compile_kernel(root / KERNEL_SOURCE, root / KERNEL_LIBRARY)
            return
        self._write_build_info(root, build_data)
        if self.target_name == "wheel":
            library = root / "build" / KERNEL_LIBRARY.name
            if compile_kernel(root / KERNEL_SOURCE, library):
                build_data["force_include"][str(library)] = KERNEL_LIBRARY.relative_to("src").as_posix()
                build_data["pure_python"] = False
                # It needs no Python header and no Python version, only this kind of machine.
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"py3-none-{platform}"
            else:
                self.app.display_warning("no C compiler worked: the wheel is pure Python, and numpy works on deltas")

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


def compile_kernel(source: Path, library: Path) -> bool:
    """Compile the C kernel with the compiler that CC names, else the first one found; return whether it worked."""
    named = shlex.split(os.environ.get("CC", ""))
    compiler = named or [found for found in map(shutil.which, COMPILERS) if found][:1]
    if not compiler or not shutil.which(compiler[0]) or not source.is_file() or sys.platform == "win32":
        return False
    library.parent.mkdir(parents=True, exist_ok=True)
    # Under its name only when complete: a running process may have the old one mapped.
    made = library.with_name(library.name + ".new")
    done = subprocess.run([*compiler, *COMPILE_FLAGS, "-o", str(made), str(source)], capture_output=True, check=False)
    if done.returncode != 0:
        made.unlink(missing_ok=True)
        return False
    made.replace(library)
    return True


def _run_git(root: Path, *arguments: str) -> str:
    """Ask git about this folder; empty when it is no repository of its own."""
    if not (root / ".git").exists():
        return ""
    found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


if __name__ == "__main__":
    root = Path(__file__).parent
    sys.exit(0 if compile_kernel(root / KERNEL_SOURCE, root / KERNEL_LIBRARY) else 3)
