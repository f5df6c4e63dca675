"""kill -9 again and again: does a resumed run equal the one that was left alone?

    python benchmarks/kills.py [--kills 20] [--seed 0]

Every second kill strikes inside a save, at a random one of its steps; the others at a random moment of a random round.
After each, the run is resumed to its end and compared with the untouched one: metrics (times excepted), rollout files
byte for byte, checkpoints tensor for tensor. Exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "fault"))

from kill_and_compare import SETTINGS, assert_same_run, finish_run, kill_at_random, runs_to_line
from killed_run import POINTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="hotloop-kills-") as name:
        untouched = Path(name) / "untouched"
        finish_run("never", "--out", str(untouched), *SETTINGS)
        for number in range(arguments.kills):
            run = Path(name) / f"run{number}"
            if number % 2:
                die_at = f"{draw.choice(POINTS[:-1])}:{draw.randint(1, 5)}"
                finish_run(die_at, "--out", str(run), *SETTINGS)
            else:
                die_at = "random"
                kill_at_random(draw.randrange(2**31), run)
            at = runs_to_line(run)
            began = time.perf_counter()
            finish_run("never", "--resume", str(run))
            assert_same_run(untouched, run)
            seconds = time.perf_counter() - began
            print(
                f"kill {number + 1:>2}: {die_at:<20} after {at} rounds; resumed in {seconds:.0f} s: equal", flush=True
            )
    print(f"{arguments.kills} kills, every resumed run equal to the untouched one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
