"""`hotloop catalog` lists what there is, in a terminal of any width."""

from __future__ import annotations

import json

from click.testing import CliRunner

from hotloop.cli.catalog import command
from hotloop.experiment.catalog.load import load_catalog


def run(*words: str) -> str:
    result = CliRunner().invoke(command, list(words))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_it_lists_every_model_and_gpu() -> None:
    words = run().split()
    catalog = load_catalog()
    assert set(catalog.models) | set(catalog.gpus) <= set(words)


def test_its_json_has_the_source_of_every_fact() -> None:
    document = json.loads(run("--json"))
    assert len(document["models"]) == 19
    assert all(entry["source"] for part in document.values() for entry in part.values())
