"""The JSON schema carries every choice, its default, its bounds and its documentation."""

from __future__ import annotations

import json

from hotloop.experiment.choices import Experiment
from hotloop.experiment.schema_json import build_schema, read_field_docs, render_schema
from hotloop.experiment.sections import Sampling


def test_the_schema_has_every_choice_and_refuses_unknown_keys() -> None:
    schema = build_schema()
    assert set(schema["properties"]) == set(Experiment.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["layout"]["enum"] == ["colocate", "separate", "external"]
    assert schema["properties"]["rounds"]["maximum"] == 100000
    assert schema["x-schema"] == 1


def test_the_text_under_a_field_is_its_description() -> None:
    described = build_schema()["$defs"]["Sampling"]["properties"]["top_k"]["description"]
    assert described == "-1 keeps the whole vocabulary."


def test_documentation_of_a_base_class_is_inherited() -> None:
    assert read_field_docs("Gspo")["kl_coef"] == "KL in the reward."
    assert set(read_field_docs("Sampling")) <= set(Sampling.model_fields)


def test_the_text_is_stable_json() -> None:
    assert render_schema() == render_schema()
    assert json.loads(render_schema()) == build_schema()
