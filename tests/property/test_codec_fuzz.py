"""20,000 mutated headers, frames, indexes and manifests: each is decoded right or refused by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hotloop.snapshots.codecs import kernel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_snapshots.py"
COUNTS = {"header": 5000, "frame": 5000, "overwrite": 3000, "index": 2000, "plain_index": 2000, "manifest": 3000}


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_snapshots", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_target_is_fuzzed(fuzz: ModuleType) -> None:
    assert set(fuzz.TARGETS) == set(COUNTS)
    assert sum(COUNTS.values()) == 20_000


@pytest.mark.parametrize("target", COUNTS)
def test_a_mutated_input_is_decoded_right_or_refused_by_name(target: str, fuzz: ModuleType) -> None:
    corpus = fuzz.make_corpus()
    verdicts = fuzz.run_cases(corpus, target, 1_000_000_000, COUNTS[target])
    assert sum(verdicts.values()) == COUNTS[target]
    assert verdicts["collision"] <= COUNTS[target] // 1000  # Adler-32 is weak, not useless
    # The mutations must reach further than the first check, else this shows little.
    assert len(verdicts) >= {"index": 3, "plain_index": 2, "manifest": 2}.get(target, 4)


@pytest.mark.parametrize("target", ["frame", "overwrite"])
def test_numpy_alone_does_as_well(target: str, fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_chosen", kernel.NUMPY)
    corpus = fuzz.make_corpus()
    by_numpy = fuzz.run_cases(corpus, target, 0, 1000)
    monkeypatch.undo()
    assert by_numpy == fuzz.run_cases(corpus, target, 0, 1000)


def test_a_case_that_ends_badly_is_a_finding(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_other(*_: object) -> str:
        raise KeyError("x")

    monkeypatch.setitem(fuzz.TARGETS, "header", raise_other)
    with pytest.raises(fuzz.Finding, match="KeyError"):
        fuzz.run_cases(fuzz.make_corpus(), "header", 0, 1)
