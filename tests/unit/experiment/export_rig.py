"""A stand-in for a cluster: a slime checkout and programs that write down the argument vectors they receive.

The programs do nothing else, except `ray`, which on request hands its entry point to a shell the way a real Ray does:
`old` joins the words with list2cmdline, `new` with shlex.join.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.script import render_experiment_sh, render_header
from hotloop.experiment.export.serving import render_serving_reference
from hotloop.experiment.resolve import resolve

MODEL_ARGS = ["--stub-model-flag", "[0]*1+[1]*46"]
PROGRAMS = ("python", "python3", "huggingface-cli", "hf", "torchrun", "ssh", "pkill", "kill", "killall")

_RECORD = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\1\\0'; } >>"$STUB_LOG"
"""
_RAY = (
    _RECORD
    + """if [[ -n "${STUB_RAY_SHELL:-}" ]]; then
  exec "$STUB_PYTHON" "$STUB_RAY_HELPER" "$@"
fi
"""
)
_RAY_HELPER = """import shlex, subprocess, sys
words = sys.argv[sys.argv.index("--") + 1:]
import os
line = subprocess.list2cmdline(words) if os.environ["STUB_RAY_SHELL"] == "old" else shlex.join(words)
sys.exit(subprocess.run(line, shell=True).returncode)
"""


@dataclass(frozen=True)
class Call:
    """One program and what it received."""

    program: str
    argv: list[str]


class StubCluster:
    """A folder with programs, a slime checkout, and a log of calls."""

    def __init__(self, root: Path, model_script: str = "") -> None:
        self.root = root
        self.slime = root / "slime"
        self.bin = root / "bin"
        self.log = root / "calls"
        self.bin.mkdir(parents=True)
        self.slime.mkdir()
        for name in PROGRAMS:
            self._program(name, _RECORD)
        self._program("ray", _RAY)
        helper = root / "ray_helper.py"
        helper.write_text(_RAY_HELPER)
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(root),
            "STUB_LOG": str(self.log),
            "STUB_PYTHON": sys.executable,
            "STUB_RAY_HELPER": str(helper),
        }
        for driver in ("train.py", "train_async.py"):
            (self.slime / driver).write_text("")
        if model_script:
            script = self.slime / model_script
            script.parent.mkdir(parents=True)
            script.write_text(f"MODEL_ARGS=(\n  {' '.join(shlex.quote(word) for word in MODEL_ARGS)}\n)\n")

    def _program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def run(
        self, script: str, *argv: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script text with arguments, in the slime checkout unless told otherwise."""
        path = self.root / "script.sh"
        path.write_text(script)
        return subprocess.run(
            ["bash", str(path), *argv],
            cwd=cwd or self.slime,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[Call]:
        """Return every call so far, in order."""
        if not self.log.exists():
            return []
        records = os.fsdecode(self.log.read_bytes()).split("\0\x01\0")
        found = []
        for record in records:
            words = record.split("\0")
            if words != [""]:
                found.append(Call(words[0], words[1:]))
        return found

    def calls_of(self, program: str) -> list[list[str]]:
        """Return the argument vectors that one program received."""
        return [call.argv for call in self.calls() if call.program == program]


def render(**choices: object) -> str:
    """Return experiment.sh of an experiment, checked or not."""
    return render_of(Experiment.model_validate(choices))


def render_of(experiment: Experiment) -> str:
    """Return experiment.sh of an experiment, checked or not."""
    catalog = load_catalog()
    return render_experiment_sh(resolve(experiment, catalog), find_model(catalog, experiment.model), catalog)


def render_serving(**choices: object) -> str:
    """Return serving-reference.sh of an experiment, checked or not."""
    catalog = load_catalog()
    choices_resolved = resolve(Experiment.model_validate(choices), catalog)
    model = find_model(catalog, choices_resolved.model)
    return render_serving_reference(choices_resolved, model, render_header(choices_resolved, model))


def entry_words(ray_argv: list[str]) -> list[str]:
    """Return the words after `--` of a `ray job submit`."""
    return ray_argv[ray_argv.index("--") + 1 :]
