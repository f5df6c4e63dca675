"""Half an hour of a storm over one deployment: kills, hangs and damage while it is loaded and asked without pause.

    python benchmarks/chaos.py [--minutes 30] [--clients 4] [--seed 0]

Exits 1 and prints every violation: a token that the declared version does not draw, a request that ended without an
answer or an error, a deployment that did not reach the newest accepted version by itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "fault"))

from service_storm import open_storm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotloop-chaos-") as name, open_storm(Path(name), arguments.seed) as storm:
        storm.run(arguments.minutes * 60, arguments.clients)
        tally = storm.tally
        print(f"{len(storm.policies)} versions published, {tally.loads['accepted']} loads accepted")
        for title, counts in (("faults", tally.faults), ("requests", tally.outcomes), ("loads", tally.loads)):
            print(f"{title}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
        print(
            f"{tally.tokens} tokens recomputed, {tally.telling_tokens} of which the version before would have given "
            f"another logprob; {tally.across_versions} answers made by more than one version"
        )
        for violation in tally.violations:
            print(f"VIOLATION {violation}")
    print(f"{len(tally.violations)} violations")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
