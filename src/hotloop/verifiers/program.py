"""Programs: 1 if the program in a response passes the task's tests, run in a child process with limits.

Owns: the extraction of the program, the child process, its limits, and the verdict. The tests are Python statements
in the task's label (usually `assert` lines), run after the program in the same namespace.

Promises: wall time, CPU time, memory, file size and output are bounded; the whole process group is killed at the end;
leaving early with exit code 0 is not a pass, because a pass is a secret line that only the end of the tests prints.
Does not do: a sandbox. The child has the user's rights, can read files and can use the network: run programs of a
model you do not trust in a container.

    judge -> slot (at most `max_processes` children) -> child: limits, program, tests -> exit, or killed at the limit
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
from dataclasses import dataclass

from hotloop.types import Rollout, Score
from hotloop.verifiers.exact import require_label

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

_RUNNER = """
import resource, sys
bounds = dict(zip((resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE), map(int, sys.argv[1:4])))
for what, bound in bounds.items():
    try:
        resource.setrlimit(what, (bound, bound))
    except (ValueError, OSError):
        pass  # the system holds a lower limit or does not know this one; the wall clock still ends the child
def run(secret, program, tests):
    names = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), names)
    exec(compile(tests, "tests.py", "exec"), names)
    sys.__stdout__.write("\\n" + secret + "\\n")
run(*sys.stdin.buffer.read().decode().split("\\0"))
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one child may use."""

    wall_s: float = 5.0
    cpu_s: int = 4
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    output_bytes: int = 1 << 20


class ProgramVerifier:
    """Runs the program of each response against the task's tests."""

    name = "program"

    def __init__(self, limits: Limits | None = None, max_processes: int | None = None) -> None:
        self._limits = limits or Limits()
        self._slots = asyncio.Semaphore(max_processes or max(1, os.cpu_count() or 1))

    async def judge(self, rollout: Rollout) -> Score:
        """Run program and tests.

        Raises:
            RunError: code `label_missing`.
        """
        tests = require_label(self.name, rollout)
        async with self._slots:
            return await run_program(extract_program(rollout.response), tests, self._limits)

    async def close(self) -> None:
        """Nothing to give back: every child ended with its rollout."""


def extract_program(response: str) -> str:
    """Return the last fenced block of a response, or the whole response."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1]) if blocks else response


async def run_program(program: str, tests: str, limits: Limits) -> Score:
    """Run a program and its tests in a child process.

    Returns:
        1 if every test passed; else 0 with the last line of its errors, or which limit ended it.
    """
    secret = secrets.token_hex(16)
    bounds = (limits.cpu_s, limits.memory_bytes, limits.file_bytes)
    with tempfile.TemporaryDirectory(prefix="hotloop-program-") as folder:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _RUNNER,
            *map(str, bounds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        text = "\0".join((secret, program.replace("\0", ""), tests))
        try:
            output = await asyncio.wait_for(_talk(child, text, limits.output_bytes), limits.wall_s)
        except TimeoutError:
            return Score(0.0, f"still running after {limits.wall_s:g} s")
        finally:
            _kill_group(child.pid)
            _close_pipes(child)  # first: `wait` ends only when the pipes do, and nobody reads a full one any more
            await child.wait()
    if output is None:
        return Score(0.0, f"printed more than {limits.output_bytes} bytes")
    if secret in output.split("\n"):
        return Score(1.0, "all tests passed")
    lines = [line for line in output.splitlines() if line.strip()]
    return Score(0.0, lines[-1][:200] if lines else f"ended before the last test (exit code {child.returncode})")


async def _talk(child: asyncio.subprocess.Process, text: str, output_bytes: int) -> str | None:
    """Send the program and read until the child ends; None when it says too much."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(text.encode("utf-8", "replace"))
        await child.stdin.drain()
        child.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the child died before it read; its output and exit code tell why
    received = bytearray()
    while block := await child.stdout.read(1 << 16):
        received += block
        if len(received) > output_bytes:
            return None
    await child.wait()
    return received.decode("utf-8", "replace")


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # the whole group has ended


def _close_pipes(child: asyncio.subprocess.Process) -> None:
    transport = getattr(child, "_transport", None)  # asyncio has no public way to close unread pipes at once
    if transport is not None:
        transport.close()
