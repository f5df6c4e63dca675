"""Vectors that the page (web/src/lib, read by Vitest) and the package must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotloop.errors import InputError
from hotloop.experiment.choices import Experiment
from hotloop.experiment.share import read_link
from hotloop.units import format_seconds

HERE = Path(__file__).parent
LINK: dict[str, list[Any]] = json.loads((HERE / "link.json").read_text(encoding="utf-8"))
NUMBERS: dict[str, list[Any]] = json.loads((HERE / "numbers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", LINK["good"], ids=range(len(LINK["good"])))
def test_a_link_holds_these_choices(case: dict[str, Any]) -> None:
    wanted = Experiment.model_validate(case.get("restored", case["choices"]))
    assert read_link(f"#experiment={case['payload']}").experiment == wanted


@pytest.mark.parametrize("payload", LINK["bad"], ids=range(len(LINK["bad"])))
def test_a_broken_link_is_refused(payload: str) -> None:
    with pytest.raises(InputError):
        read_link(f"#experiment={payload}")


@pytest.mark.parametrize(("value", "text"), NUMBERS["seconds"])
def test_a_duration_is_written_this_way(value: float, text: str) -> None:
    assert format_seconds(value) == text
