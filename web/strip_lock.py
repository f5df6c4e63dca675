"""Remove the funding links from package-lock.json; run after npm has changed it."""

from __future__ import annotations

import json
from pathlib import Path

LOCK = Path(__file__).parent / "package-lock.json"


def main() -> None:
    """Rewrite the lock without links."""
    lock = json.loads(LOCK.read_text(encoding="utf-8"))
    for package in lock["packages"].values():
        package.pop("funding", None)
    LOCK.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
