"""Does the default run learn, seed after seed? Prints start, end and time of each; exits 1 if a seed misses a target.

    python benchmarks/learning.py --seeds 10 [--first 0] [--policy moe] [--set KEY=VALUE ...]

Each seed is one `hotloop run` in a process of its own, one after the other, with the full record kept. Targets of the
default task: it ends at greedy >= 0.98 and sampled >= 0.95, from a start at sampled <= 0.55, in under 90 s on free
cores.
Targets of the mixture of experts: sampled accuracy gains at least 0.2, in under 180 s.
Times depend on what else the machine does; the load average of each run is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_START_SAMPLED, MIN_END_GREEDY, MIN_END_SAMPLED, MAX_WALL_S = 0.55, 0.98, 0.95, 90.0
MOE_MIN_GAIN, MOE_MAX_WALL_S = 0.2, 180.0


def run_seed(seed: int, settings: list[str], folder: Path, cache: Path) -> dict[str, Any]:
    """Run one seed and return its summary."""
    out = folder / f"seed{seed}"
    command = [sys.executable, "-m", "hotloop.cli.main", "run", "--quiet", "--seed", str(seed), "--out", str(out)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *(f"--set={setting}" for setting in settings)], check=True, env=environment)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def misses(summary: dict[str, Any], *, is_moe: bool, checks_time: bool) -> list[str]:
    """Name the targets that a run missed."""
    if is_moe:
        gain = summary["eval_sampled_after"] - summary["eval_sampled_before"]
        checks = {"gain": gain >= MOE_MIN_GAIN, "time": not checks_time or summary["wall_s"] < MOE_MAX_WALL_S}
    else:
        checks = {
            "start": summary["eval_sampled_before"] <= MAX_START_SAMPLED,
            "greedy": summary["eval_greedy_after"] >= MIN_END_GREEDY,
            "sampled": summary["eval_sampled_after"] >= MIN_END_SAMPLED,
            "time": not checks_time or summary["wall_s"] < MAX_WALL_S,
        }
    return [name for name, is_met in checks.items() if not is_met]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--policy", choices=("dense", "moe"), default="dense")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-time", action="store_true", help="Do not hold the runs to a time (on a busy machine).")
    arguments = parser.parse_args()
    is_moe = arguments.policy == "moe"
    settings = [*arguments.set, f"laptop.policy={arguments.policy}"]
    failed = 0
    print("seed  greedy before/after   sampled before/after   rounds   wall s   rounds/s   load   missed")
    with tempfile.TemporaryDirectory(prefix="hotloop-learning-") as folder:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            summary = run_seed(seed, settings, Path(folder), Path(folder) / "cache")
            missed = misses(summary, is_moe=is_moe, checks_time=not arguments.no_time)
            failed += bool(missed)
            rate = summary["rounds"] / summary["wall_s"]
            print(
                f"{seed:>4}   {summary['eval_greedy_before']:.3f} / {summary['eval_greedy_after']:.3f}"
                f"        {summary['eval_sampled_before']:.3f} / {summary['eval_sampled_after']:.3f}"
                f"       {summary['rounds']:>6} {summary['wall_s']:>8.1f} {rate:>10.1f}"
                f"   {os.getloadavg()[0]:>4.1f}   {', '.join(missed) or '-'}",
                flush=True,
            )
    print(f"{arguments.seeds - failed} of {arguments.seeds} seeds met every target")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
