"""Does a run learn as well when its rollouts come from a deployment? Exits 1 if the medians differ by over 3 points.

    python benchmarks/layouts.py --seeds 5 [--first 0] [--set KEY=VALUE ...]

For each seed, the default run twice, one after the other: `layout=colocate`, where trainer and engine share a process,
and `layout=separate`, where a gateway and its replicas load an anchor and then a delta of every round out of a bucket.
Both train the same policy from the same warm-up on the same prompts; they differ in the order in which floats are
added, so curves part after some rounds and only the ends are compared. A replica serves a version only after the
checksums of every tensor equal those that the trainer published; a round that is not served ends the run with an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from learning import run_seed

LAYOUTS = ("colocate", "separate")
ENDS = ("eval_greedy_after", "eval_sampled_after")
MAX_DIFFERENCE = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    ends: dict[tuple[str, str], list[float]] = {(layout, end): [] for layout in LAYOUTS for end in ENDS}
    print("seed  layout     greedy   sampled   versions   wall s")
    with tempfile.TemporaryDirectory(prefix="hotloop-layouts-") as folder:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            for layout in LAYOUTS:
                settings = [*arguments.set, f"layout={layout}"]
                summary = run_seed(seed, settings, Path(folder) / layout, Path(folder) / "cache")
                for end in ENDS:
                    ends[layout, end].append(summary[end])
                greedy, sampled = (summary[end] for end in ENDS)
                print(
                    f"{seed:>4}  {layout:<9} {greedy:>7.3f} {sampled:>9.3f} {summary['policy_version']:>10}"
                    f" {summary['wall_s']:>8.1f}",
                    flush=True,
                )
    failed = False
    for end in ENDS:
        colocated, separate = (statistics.median(ends[layout, end]) for layout in LAYOUTS)
        missed = abs(separate - colocated) > MAX_DIFFERENCE
        failed |= missed
        remark = " (missed: at most 3)" if missed else ""
        points = 100 * (separate - colocated)
        print(f"{end}: medians {colocated:.3f} colocated, {separate:.3f} separate, {points:+.1f} points{remark}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
