"""Our loop against TRL's GRPOTrainer: the same task, start policy, optimiser, group and batch sizes, on one CPU thread.

    python benchmarks/loop_vs_trl.py [--seeds 1] [--trl-steps 60] [--to-target]

TRL runs in an environment of its own, made on the first call (several hundred MB) under the user's cache folder. The
two alternate, seed by seed, in one run of this script; trust the ratios, not the seconds. Our side is the default run
of `hotloop run` with its full record kept (every rollout, metrics, checkpoints). Evaluation is off the clock on both
sides.

Targets: over the whole default run at least 5 times TRL's steps per second, over its first 50 rounds at least 2 times.
With `--to-target`: seconds of training until greedy 95 % with sampled 93 %, at least 5 times shorter at the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

TRL_PACKAGES = ("trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0", "torch==2.13.0")
FIRST_ROUNDS = 50
STOP_GREEDY, STOP_SAMPLED = 0.95, 0.93
MIN_WHOLE, MIN_FIRST, MIN_TO_TARGET = 5.0, 2.0, 5.0


def make_trl_environment() -> Path:
    """Return the interpreter of TRL's own environment; install it if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotloop" / "benchmarks"
    folder = cache / TRL_PACKAGES[0].replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"making an environment for TRL in {folder}", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)
        (folder / "complete").touch()
    return python


def run_ours(seed: int, folder: Path, eval_interval: int) -> list[dict[str, Any]]:
    """Run the default experiment in a process of its own and return its records."""
    out = folder / f"ours{seed}"
    command = [sys.executable, "-m", "hotloop.cli.main", "run", "--quiet", "--seed", str(seed), "--out", str(out)]
    command += [f"--set=eval_interval={eval_interval}", "--set=eval_samples=1"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run_trl(python: Path, seed: int, folder: Path, *, steps: int, eval_every: int, max_s: float) -> dict[str, Any]:
    """Run TRL from the policy that our run of the same seed started from."""
    from hotloop.loop.tasks import load_task_set

    tasks = load_task_set("sort5")
    job = {
        "policy": str(folder / f"ours{seed}" / "policy"),
        "train": [(task.prompt, task.label) for task in tasks.train],
        "held_out": [(task.prompt, task.label) for task in tasks.held_out],
        "max_new_tokens": tasks.max_new_tokens,
        "num_groups": 32,
        "group_size": 16,
        "lr": 5e-4,
        "steps": steps,
        "seed": seed,
        "eval_every": eval_every,
        "stop_greedy": STOP_GREEDY,
        "stop_sampled": STOP_SAMPLED,
        "max_s": max_s,
    }
    path = folder / f"trl{seed}.json"
    path.write_text(json.dumps(job))
    side = Path(__file__).with_name("trl_side.py")
    done = subprocess.run(
        [python, side, path], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(result.removeprefix("RESULT "))
    return found


def training_seconds(record: dict[str, Any]) -> float:
    """Seconds of a round without its evaluation; checkpoint, rollout file and weight push included."""
    return float(record["perf/step_time"] - record.get("perf/eval_time", 0.0))


def time_to_target(records: list[dict[str, Any]]) -> float | None:
    """Seconds of training until an evaluation meets both targets."""
    spent = 0.0
    for record in records:
        spent += training_seconds(record)
        if record.get("eval/greedy", 0) >= STOP_GREEDY and record["eval/sampled"] >= STOP_SAMPLED:
            return spent
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trl-steps", type=int, default=60, help="Steps of TRL that are timed.")
    parser.add_argument("--to-target", action="store_true", help="Run TRL until both targets (minutes a seed).")
    parser.add_argument("--trl-max-s", type=float, default=900.0, help="Training seconds after which TRL is stopped.")
    arguments = parser.parse_args()
    python = make_trl_environment()
    whole: list[float] = []
    first: list[float] = []
    to_target: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hotloop-vs-trl-") as name:
        for seed in range(arguments.seeds):
            records = run_ours(seed, Path(name), 10 if arguments.to_target else 500)
            steps, every = (500, 10) if arguments.to_target else (arguments.trl_steps, 0)
            trl = run_trl(python, seed, Path(name), steps=steps, eval_every=every, max_s=arguments.trl_max_s)
            seconds = trl["step_seconds"][1:]  # the first step builds what the others reuse
            trl_rate = len(seconds) / sum(seconds)
            trl_first = 1 / statistics.fmean(seconds[:FIRST_ROUNDS])
            ours = len(records) / sum(map(training_seconds, records))
            ours_first = FIRST_ROUNDS / sum(map(training_seconds, records[:FIRST_ROUNDS]))
            whole.append(ours / trl_rate)
            first.append(ours_first / trl_first)
            print(
                f"seed {seed}: ours {ours:.1f} steps/s over {len(records)} rounds, {ours_first:.1f} over the first "
                f"{FIRST_ROUNDS}; TRL {trl_rate:.2f} over {len(seconds)} steps; ratio {whole[-1]:.1f} whole, "
                f"{first[-1]:.1f} first {FIRST_ROUNDS}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            if arguments.to_target:
                mine = time_to_target(records)
                reached = trl["curve"] and trl["curve"][-1][2] >= STOP_GREEDY and trl["curve"][-1][3] >= STOP_SAMPLED
                theirs = trl["curve"][-1][1] if reached else sum(trl["step_seconds"])
                if mine is None:
                    sys.exit(f"seed {seed}: our run never met both targets")
                to_target.append(theirs / mine)
                word = "took" if reached else "had not got there after"
                print(f"        to both targets: ours {mine:.1f} s, TRL {word} {theirs:.1f} s", flush=True)
    results = [
        ("whole run", statistics.median(whole), MIN_WHOLE),
        (f"first {FIRST_ROUNDS}", min(first), MIN_FIRST),
    ]
    if to_target:
        results.append(("time to both targets, median", statistics.median(to_target), MIN_TO_TARGET))
    for label, value, least in results:
        print(f"{label}: {value:.1f}x (target {least:.0f}x) {'ok' if value >= least else 'MISSED'}")
    return 0 if all(value >= least for _, value, least in results) else 1


if __name__ == "__main__":
    sys.exit(main())
