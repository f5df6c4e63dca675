"""Time the planner: `python benchmarks/plan.py`. Prints medians and the machine.

In process: the plan of some lab models, of the largest layout (512 nodes) and of an experiment with many errors, each
with its JSON. As a command: `hotloop plan --json` in a new process.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import build_plan

REPEATS = 30
COMMAND_REPEATS = 7

CASES: dict[str, dict[str, Any]] = {
    "flash, 8 GPUs (default)": {},
    "glm5, 256 GPUs": {"model": "glm5"},
    "deepseek, 128 GPUs": {"model": "deepseek"},
    "flash, 512 nodes": {"nodes": 512},
    "glm5, separate + PD, 512 GPUs": {"model": "glm5", "layout": "separate", "pd": True, "rdma_device": "mlx5_0"},
    "glm5, eight errors and their repairs": {
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


def time_call(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median and the slowest of some calls, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times), max(times)


def main() -> None:
    """Print one line for each case."""
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    build_plan(Experiment())
    for name, choices in CASES.items():
        experiment = Experiment.model_validate(choices)
        median, slowest = time_call(lambda e=experiment: build_plan(e), REPEATS)
        plan = build_plan(experiment)
        as_json, _ = time_call(lambda p=plan: json.dumps(p.to_json()), REPEATS)
        errors, repairs = len(plan.errors), len(plan.repairs)
        print(
            f"{name:40} plan {median:7.2f} ms (slowest {slowest:7.2f})  json {as_json:6.2f} ms  "
            f"{errors} errors, {repairs} repairs"
        )
    command = [sys.executable, "-m", "hotloop.cli.main", "plan", "--json"]
    median, slowest = time_call(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), COMMAND_REPEATS)
    print(f"{'hotloop plan --json (a new process)':40} {median:7.0f} ms (slowest {slowest:7.0f})")


if __name__ == "__main__":
    main()
