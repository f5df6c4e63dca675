"""`import hotloop` and the light commands stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "ray"]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted(sys.modules)))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import hotloop",
        "import hotloop.cli.main",
        "import hotloop.experiment.plan",
        "import hotloop.cli.plan, hotloop.cli.export, hotloop.cli.publish, hotloop.cli.lab, hotloop.cli.snapshots",
        "import hotloop.engines.base, hotloop.trainers.base",
        "import hotloop.models.tokenizer",
        "import hotloop.snapshots.publisher",
    ],
)
def test_no_heavy_module_is_imported(statement: str) -> None:
    assert not modules_after(statement) & set(HEAVY)
