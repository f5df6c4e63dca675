"""Time the planner: `python benchmarks/plan.py`. Prints medians and the machine.

In process: the plan of some lab models, of the largest layout (512 nodes) and of an experiment with many errors, each
with its JSON. As a command: `hotloop plan --json` in a new process, with its modules compiled beforehand as an
installed package has them. CPU time is printed beside wall time, because it holds on a machine that others use too.
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
from collections.abc import Callable
from functools import partial
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


def measure_command() -> str:
    """Return the median wall and CPU time of `hotloop plan --json`, in words."""
    command = [sys.executable, "-m", "hotloop.cli.main", "plan", "--json"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as cache:
        environment["PYTHONPYCACHEPREFIX"] = cache
        for _ in range(1 + COMMAND_REPEATS):
            wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            walls.append(1000 * (time.perf_counter() - wall))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpus.append(1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    # The first run compiles.
    return f"{statistics.median(walls[1:]):7.0f} ms wall, {statistics.median(cpus[1:]):7.0f} ms CPU"


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
    print(f"{'hotloop plan --json, a new process':41} {measure_command()}")


if __name__ == "__main__":
    main()
