"""Time the planner: `python benchmarks/plan.py`. Prints medians and the machine.

In process: the plan of some lab models, of the largest layout (512 nodes) and of an experiment with many errors, each
with its JSON. As a command: `hotloop plan FILE --json` in a new process, beside what such a process cannot do without:
the interpreter, click, and pydantic with one empty model. CPU time is printed beside wall time, because it holds on a
machine that others use too.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import Plan, build_plan

REPEATS = 30
COMMAND_REPEATS = 9

CASES: dict[str, dict[str, Any]] = {
    "flash, 8 GPUs (default)": {},
    "glm5, 256 GPUs": {"model": "glm5"},
    "deepseek, 128 GPUs": {"model": "deepseek"},
    "flash, 512 nodes": {"nodes": 512},
    "glm5, separate + PD, 512 GPUs": {"model": "glm5", "layout": "separate", "pd": True, "rdma_device": "mlx5_0"},
    "glm5, eleven errors and repairs": {
        "model": "glm5",
        "nodes": 3,
        "schedule": "async",
        "deterministic": True,
        "mask_prefix": True,
        "eagle": "external",
        "max_staleness": 0,
        "cpu_adam": False,
        "pd": True,
    },
}


def measure(call: Callable[[], object], repeats: int) -> str:
    """Return the median wall and CPU time of some calls, in words."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(1000 * (time.perf_counter() - wall))
        cpus.append(1000 * (time.process_time() - cpu))
    return f"{statistics.median(walls):7.2f} ms wall, {statistics.median(cpus):7.2f} ms CPU"


def measure_commands(commands: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Run commands in new processes, in turns, so that all of them meet the same machine; medians in words.

    Modules are compiled beforehand, into a folder of this run, as an installed package has them.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as cache:
        environment["PYTHONPYCACHEPREFIX"] = cache
        for _ in range(1 + COMMAND_REPEATS):
            for name, command in commands.items():
                wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
                wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                times[name].append((1000 * wall, 1000 * cpu))
    said = {}
    for name, pairs in times.items():
        walls, cpus = zip(*pairs[1:], strict=True)  # The first run compiles.
        said[name] = (
            f"{statistics.median(walls):7.0f} ms wall (fastest {min(walls):.0f}), "
            f"{statistics.median(cpus):7.0f} ms CPU (least {min(cpus):.0f})"
        )
    return said


def list_commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands to time: plans of two experiment files, and what no command built like this can do without.

    The command is the script that an installation puts beside its interpreter.
    """
    python, hotloop = sys.executable, str(Path(sys.executable).with_name("hotloop"))
    small, large = folder / "default.toml", folder / "large.toml"
    small.write_text('model = "flash"\n', encoding="utf-8")
    large.write_text('model = "glm5"\nlayout = "separate"\npd = true\nrdma_device = "mlx5_0"\n', encoding="utf-8")
    return {
        "hotloop plan FILE --json, flash, 8 GPUs": [hotloop, "plan", str(small), "--json"],
        "hotloop plan FILE --json, glm5, 512 GPUs": [hotloop, "plan", str(large), "--json"],
        "python -c pass": [python, "-c", "pass"],
        "python, import click": [python, "-c", "import click"],
        "python, import click and pydantic": [python, "-c", "import click; from pydantic import BaseModel, Field"],
        "the same, with plug-ins as pydantic comes": [
            python, "-c", "import click, pydantic\nclass Empty(pydantic.BaseModel): pass",
        ],
    }  # fmt: skip


def dump(plan: Plan) -> str:
    """Write a plan as the command does."""
    return json.dumps(plan.to_json())


def main() -> None:
    """Print one line for each case."""
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    build_plan(Experiment())
    for name, choices in CASES.items():
        experiment = Experiment.model_validate(choices)
        plan = build_plan(experiment)
        print(f"{name:36} plan {measure(partial(build_plan, experiment), REPEATS)}")
        found = f"{len(plan.errors)} errors, {len(plan.repairs)} repairs"
        print(f"{'':36} json {measure(partial(dump, plan), REPEATS)}; {found}")
    with tempfile.TemporaryDirectory() as folder:
        for name, said in measure_commands(list_commands(Path(folder))).items():
            print(f"{name:41} {said}")


if __name__ == "__main__":
    main()
