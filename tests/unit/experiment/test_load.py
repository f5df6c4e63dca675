"""Reading an experiment: layers, spellings, and every problem reported with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotloop.errors import InputError
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import known_paths, load_experiment
from hotloop.experiment.positions import locate_keys


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _problems(error: InputError) -> list[tuple[str, str]]:
    return [(problem.code, problem.where) for problem in error.problems]


def test_without_a_file_the_defaults_hold() -> None:
    loaded = load_experiment(None)
    assert loaded.experiment == Experiment()
    assert loaded.origin("rounds") == "default"


def test_a_setting_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.toml", "rounds = 7\n[sampling]\ntemperature = 0.5\ntop_p = 0.9\n")
    loaded = load_experiment(path, ["sampling.temperature=0.8"])
    assert (loaded.experiment.rounds, loaded.experiment.sampling.temperature) == (7, 0.8)
    assert loaded.origin("rounds") == f"{path}:1"
    assert loaded.origin("sampling.temperature") == "--set"
    assert loaded.origin("sampling.top_p") == f"{path}:4"
    assert loaded.origin("sampling.top_k") == "default"


def test_a_base_is_used_only_without_a_file(tmp_path: Path) -> None:
    base = Experiment(rounds=44)
    assert load_experiment(None, base=base, base_name="preset x").experiment.rounds == 44
    assert load_experiment(None, base=base, base_name="preset x").origin("rounds") == "preset x"
    assert load_experiment(_write(tmp_path / "e.toml", "nodes = 2\n"), base=base).experiment.rounds == 3


def test_camel_case_and_snake_case_mean_the_same(tmp_path: Path) -> None:
    camel = _write(tmp_path / "a.json", '{"kvDtype": "fp8", "sampling": {"groupSize": 4}}')
    snake = _write(tmp_path / "b.toml", 'kv_dtype = "fp8"\nsampling = { group_size = 4 }\n')
    assert load_experiment(camel).experiment == load_experiment(snake).experiment


def test_schema_1_files_and_bare_choices_are_both_read(tmp_path: Path) -> None:
    whole = _write(
        tmp_path / "a.json", json.dumps({"schema": 1, "app": "hotloop", "choices": {"rounds": 9}, "plan": {}})
    )
    assert load_experiment(whole).experiment.rounds == 9


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_number_is_refused(tmp_path: Path, schema: object) -> None:
    path = _write(tmp_path / "a.json", json.dumps({"schema": schema, "choices": {}}))
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    assert caught.value.code == "schema_unsupported"


def test_all_problems_of_a_file_are_reported_together_in_line_order(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "run.toml",
        'rounds = "many"\nslimeTarget = "v9"\n[sampling]\ntemprature = 0.8\ngroup_size = 0\n'
        '[reward]\nkind = "exactly"\n',
    )
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    assert caught.value.exit_code == 2
    assert _problems(caught.value) == [
        ("wrong_type", f"{path}:1: rounds = 'many'"),
        ("wrong_value", f"{path}:2: slime_target = 'v9'"),
        ("unknown_key", f"{path}:4"),
        ("out_of_range", f"{path}:5: sampling.group_size = 0"),
        ("wrong_value", f"{path}:7: reward.kind = 'exactly'"),
    ]
    assert "sampling.temprature is not a setting [unknown_key]. Did you mean sampling.temperature?" in str(caught.value)


def test_json_problems_name_their_line(tmp_path: Path) -> None:
    text = '{"schema": 1,\n "choices": {\n  "rounds": 3,\n  "sampling": {\n   "num_groups": 4,\n   "groupSize": [1]},\n'
    text += '  "x": 1}}'
    path = _write(tmp_path / "a.json", text)
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    assert _problems(caught.value) == [
        ("wrong_type", f"{path}:6: sampling.group_size = [1]"),
        ("unknown_key", f"{path}:7"),
    ]


def test_a_key_of_another_variant_is_named_as_such(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.toml", '[algorithm]\nkind = "grpo"\ngamma = 0.9\n')
    with pytest.raises(InputError, match=r"algorithm.gamma belongs to algorithm.kind = reinforce_plus_plus only"):
        load_experiment(path)


def test_a_key_at_the_wrong_level_is_pointed_to_its_section(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Did you mean sampling.temperature\?"):
        load_experiment(_write(tmp_path / "run.toml", "temperature = 0.7\n"))


@pytest.mark.parametrize("setting", ["rounds", "=3", "a b=3", ".x=1"])
def test_a_malformed_setting_is_a_problem(setting: str) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(None, [setting])
    assert caught.value.code == "bad_setting"


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("3", 3), ("sort8", "sort8"), ('"3"', "3"), ("none", None)]
)
def test_a_setting_is_read_as_toml_then_as_text(text: str, value: object) -> None:
    from hotloop.experiment.load import parse_setting

    assert parse_setting(f"a.b={text}", []) == ("a.b", value)


def test_an_empty_text_means_not_chosen_where_a_number_is_expected() -> None:
    loaded = load_experiment(None, ["max_staleness=", "hf_path="])
    assert loaded.experiment.max_staleness is None
    assert loaded.experiment.hf_path == ""


def test_hook_names_keep_their_spelling() -> None:
    loaded = load_experiment(None, ["laptop.hooks.custom-rm=pkg.judge"])
    assert loaded.experiment.laptop.hooks == {"custom-rm": "pkg.judge"}


def test_a_key_given_in_both_spellings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(_write(tmp_path / "a.json", '{"rolloutGpus": 8, "rollout_gpus": 16}'))
    assert caught.value.code == "duplicate_key"


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [("a.toml", "rounds = = 3\n", "bad_toml"), ("a.json", '{"rounds": }', "bad_json"), ("b.json", "[1]", "wrong_type")],
)
def test_a_text_that_does_not_parse_names_the_file(tmp_path: Path, name: str, text: str, code: str) -> None:
    path = _write(tmp_path / name, text)
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    assert caught.value.code == code and str(path) in str(caught.value)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(tmp_path / "nope.toml")
    assert (caught.value.code, caught.value.exit_code) == ("file_not_found", 2)


def test_every_leaf_of_the_schema_is_a_known_path() -> None:
    paths = known_paths()
    assert {"rounds", "sampling.group_size", "algorithm.gamma", "reward.pattern", "laptop.policy"} <= set(paths)
    assert "sampling" not in paths and len(paths) == len(set(paths))


def test_toml_positions_cover_dotted_and_inline_keys() -> None:
    text = 'a = 1\nb.c = 2\n[d]\n# e = 9\ne = { f = 1, g = 2 }\n["h"]\ni = 3\n'
    assert locate_keys(text, "toml") == {"a": 1, "b.c": 2, "d": 3, "d.e": 5, "d.e.f": 5, "d.e.g": 5, "h": 6, "h.i": 7}


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("deep.json", '{"a": ' * 100_000, "bad_json"),
        ("deep.json", "[" * 100_000, "bad_json"),
        ("deep.json", '{"a": ' * 65 + "1" + "}" * 65, "bad_json"),
        ("deep.toml", "a = " + "[" * 100_000, "bad_toml"),
        ("deep.toml", ".".join("a" * 66) + " = 1", "bad_toml"),
        ("digits.json", '{"rounds": ' + "9" * 5000 + "}", "bad_json"),
        ("digits.toml", "rounds = " + "9" * 5000, "bad_toml"),
        ("twice.json", '{"rounds": 1, "rounds": 2}', "duplicate_key"),
        ("twice.json", '{"sampling": {"topP": 1, "topP": 0.5}}', "duplicate_key"),
    ],
)
def test_no_text_breaks_the_reader(tmp_path: Path, name: str, text: str, code: str) -> None:
    path = _write(tmp_path / name, text)
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    assert caught.value.code == code
    assert caught.value.where.startswith(str(path))


@pytest.mark.parametrize("setting", ["rounds=" + "[" * 100_000, "rounds=" + "9" * 5000, ".".join("a" * 70) + "=1"])
def test_no_setting_breaks_the_reader(setting: str) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(None, [setting])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("name", "text"), [("run.toml", "rounds = 7\n"), ("run.json", '{"rounds": 7}')])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    loaded = load_experiment(path)
    assert (loaded.experiment.rounds, loaded.origin("rounds")) == (7, f"{path}:1")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"data_path": "/a\\u0000b"}', ":1: data_path"),
        ('{"rounds": 1,\n"laptop": {"policy": "\\u0000"}}', ":2: laptop.policy"),
        ('{"sampling": {"stop": ["x", "\\u0000"]}}', ":1: sampling.stop"),
    ],
)
def test_no_text_of_an_experiment_may_hold_nul(tmp_path: Path, text: str, where: str) -> None:
    path = _write(tmp_path / "run.json", text)
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    assert _problems(caught.value) == [("wrong_value", f"{path}{where}")]
    with pytest.raises(InputError, match=r"data_path: must not hold a NUL character \[wrong_value\]"):
        load_experiment(None, ['data_path="/a\\u0000b"'])
