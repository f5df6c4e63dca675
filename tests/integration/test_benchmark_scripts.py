"""The service's benchmarks run end to end in their small form; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_deltas_are_loaded_under_open_streams_without_a_failed_request() -> None:
    found = run("hot_load.py", "--small", "--streams", "4", "--deltas", "3")
    assert found["failures"] == [] and found["swaps"] == 3 and found["swaps_crossed"] >= 1
    assert found["requests"] >= 4 and found["tokens"] > 0
    assert 0 < found["pause_p50_s"] <= found["pause_p99_s"] < found["restart_s"]


@pytest.mark.slow
def test_the_gateway_is_compared_with_the_bare_replica() -> None:
    found = run("gateway.py", "--quick")
    assert found["requests"] == 180 and found["rate"] > 0
    assert found["bare_p50_ms"] > 0 and found["streaming"] > 0 and found["memory_late_bytes"] > 0
