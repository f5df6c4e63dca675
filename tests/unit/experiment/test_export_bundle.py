"""E11, L08, L11, L13: which files an export has, and what experiment.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.bundle import Bundle, build_bundle
from hotloop.experiment.load import load_experiment
from hotloop.experiment.plan import build_plan
from hotloop.experiment.presets import PRESETS, find_preset
from hotloop.experiment.provenance import BuildInfo

BUILD = BuildInfo("b" * 40, False)


def bundle(experiment: Experiment) -> Bundle:
    catalog = load_catalog()
    return build_bundle(build_plan(experiment, catalog=catalog), catalog, BUILD)


def test_l11_an_error_holds_both_scripts_back_and_l08_never_the_json() -> None:
    blocked = bundle(Experiment(schedule="async"))
    assert set(blocked.files) == {"experiment.json"}
    assert blocked.blocked_by == ("colocate_async",)
    assert json.loads(blocked.files["experiment.json"])["validation"]["errors"][0]["code"] == "colocate_async"


def test_l11_notes_hold_nothing_back() -> None:
    free = bundle(Experiment())
    assert set(free.files) == {"experiment.json", "experiment.sh", "serving-reference.sh"}
    assert free.blocked_by == ()
    assert json.loads(free.files["experiment.json"])["validation"]["notes"]


def test_e11_the_document_has_the_specified_shape() -> None:
    document = json.loads(bundle(Experiment()).files["experiment.json"])
    assert list(document) == ["schema", "app", "choices", "model", "validation", "plan", "provenance"]
    assert (document["schema"], document["app"]) == (1, "hotloop")
    assert set(document["choices"]) == set(Experiment.model_fields)
    assert document["model"]["hf_repo"] == "zai-org/GLM-4.7-Flash"
    assert set(document["plan"]) == {"gpus", "memory", "staleness", "resume"}
    assert document["plan"]["gpus"]["train"] == 8
    assert {"phase", "where", "item", "bytes", "formula"} == set(document["plan"]["memory"][0])
    assert set(document["provenance"]) >= {"page_commit", "dirty", "recipe", "model_config", "images", "missing"}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_e12_the_document_is_read_back_as_the_same_experiment(tmp_path: Path, name: str) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(bundle(find_preset(name)).files["experiment.json"], encoding="utf-8")
    assert load_experiment(path).experiment == find_preset(name)


def test_a_read_back_document_exports_the_same_bytes(tmp_path: Path) -> None:
    first = bundle(Experiment(model="dense", rounds=9))
    path = tmp_path / "experiment.json"
    path.write_text(first.files["experiment.json"], encoding="utf-8")
    assert bundle(load_experiment(path).experiment) == first


def test_l13_the_same_choices_give_the_same_bytes_without_a_time_stamp() -> None:
    assert bundle(Experiment()).files == bundle(Experiment()).files


def test_text_of_any_script_survives_in_the_document() -> None:
    text = bundle(Experiment(data_path="/数据/é\u2028.jsonl")).files["experiment.json"]
    assert json.loads(text)["choices"]["data_path"] == "/数据/é\u2028.jsonl"
    text.encode("utf-8")
