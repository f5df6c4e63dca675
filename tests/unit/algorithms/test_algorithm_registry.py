"""The registry, the papers page and the experiment file name the same algorithms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

from hotloop.algorithms.registry import ENTRIES, find_entries
from hotloop.experiment.sections import Grpo

REPOSITORY = Path(__file__).parents[3]


def test_every_entry_has_its_row_in_the_papers_page_and_no_row_is_left_over() -> None:
    lines = (REPOSITORY / "docs" / "papers.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "`" in line]
    expected = [
        f"| {entry.area} | `{entry.name}` | `{entry.function.removeprefix('hotloop.algorithms.')}` | {entry.source} |"
        for entry in ENTRIES
    ]
    assert rows == expected


def test_every_entry_resolves_to_a_function_with_a_docstring_that_names_a_source() -> None:
    for entry in ENTRIES:
        assert "Source:" in (entry.resolve().__doc__ or ""), entry


def test_names_are_unique_inside_an_area() -> None:
    assert len({(entry.area, entry.name) for entry in ENTRIES}) == len(ENTRIES)


def test_the_choices_of_the_experiment_file_are_entries() -> None:
    kinds = get_args(Grpo.model_fields["kl_loss_type"].annotation)
    assert set(kinds) == {entry.name for entry in find_entries("kl")}
    modes = get_args(Grpo.model_fields["aggregation"].annotation)
    assert set(modes) == {entry.name for entry in find_entries("aggregation")}


def test_the_numpy_side_imports_no_torch() -> None:
    modules = "advantages, filters, aggregation, registry"
    code = f"from hotloop.algorithms import {modules}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
