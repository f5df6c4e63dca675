"""Links round-trip every experiment without its private values."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.share import encode_comparison, encode_experiment, is_private_path, read_link

TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)

CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["flash", "dense", "glm5", "qwen38"]),
        "layout": st.sampled_from(["colocate", "separate", "external"]),
        "schedule": st.sampled_from(["sync", "async"]),
        "nodes": st.none() | st.integers(1, 512),
        "precision": st.sampled_from([None, "bf16", "fp8", "int4"]),
        "ssm_ratio": st.none() | st.floats(0.1, 10),
        "r3": st.booleans(),
        "rounds": st.integers(0, 100000),
        "hf_path": st.none() | TEXT,
        "generate_hook": TEXT,
        "eval_data": TEXT,
        "max_staleness": st.none() | st.integers(0, 9),
        "sampling": st.fixed_dictionaries(
            {}, optional={"num_groups": st.integers(1, 64), "stop": st.lists(TEXT, max_size=3)}
        ),
        "algorithm": st.one_of(
            st.fixed_dictionaries({"kind": st.just("grpo")}, optional={"eps_clip": st.floats(0.01, 1)}),
            st.fixed_dictionaries({"kind": st.just("reinforce_plus_plus")}, optional={"gamma": st.floats(0.1, 1)}),
        ),
        "reward": st.one_of(
            st.just({"kind": "exact"}),
            st.fixed_dictionaries({"kind": st.just("format"), "pattern": TEXT}),
            st.fixed_dictionaries({"kind": st.just("python"), "function": TEXT}),
        ),
        "laptop": st.fixed_dictionaries(
            {}, optional={"policy": st.sampled_from(["", "dense", "/dir"]), "publish": TEXT}
        ),
    },
)


def public_values(experiment: Experiment) -> dict[str, Any]:
    values = dict(flatten(experiment.model_dump(mode="json")))
    if values.get("laptop.policy") not in ("", "dense", "moe"):
        values["laptop.policy"] = ""
    return {
        path: value
        for path, value in values.items()
        if path == "laptop.policy" or not (is_private_path(path) or path.startswith("laptop.hooks"))
    }


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_an_opened_link_has_every_public_value_and_no_private_one(values: dict[str, Any]) -> None:
    experiment = Experiment.model_validate(values)
    opened = read_link(encode_experiment(experiment)).experiment
    assert public_values(opened) == public_values(experiment)
    for path, value in flatten(opened.model_dump(mode="json")):
        if is_private_path(path) and path != "laptop.policy":
            assert value in (None, "", [], {}), path


@settings(max_examples=30, deadline=None)
@given(CHOICES, CHOICES)
def test_the_reader_s_private_values_survive_any_link(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    reader = Experiment.model_validate(mine)
    opened = read_link(encode_experiment(Experiment.model_validate(theirs)), reader).experiment
    for path, value in flatten(reader.model_dump(mode="json")):
        if is_private_path(path) and not path.startswith(("reward.", "laptop.policy")):
            assert dict(flatten(opened.model_dump(mode="json")))[path] == value


@settings(max_examples=30, deadline=None)
@given(CHOICES)
def test_a_link_made_from_an_opened_link_is_the_same(values: dict[str, Any]) -> None:
    first = encode_experiment(Experiment.model_validate(values))
    assert encode_experiment(read_link(first).experiment) == first


@settings(max_examples=20, deadline=None)
@given(CHOICES, CHOICES)
def test_both_sides_of_a_comparison_round_trip(a: dict[str, Any], b: dict[str, Any]) -> None:
    left, right = Experiment.model_validate(a), Experiment.model_validate(b)
    opened = read_link(encode_comparison(left, right))
    assert opened.reference is not None
    assert public_values(opened.reference) == public_values(left)
    assert public_values(opened.experiment) == public_values(right)
