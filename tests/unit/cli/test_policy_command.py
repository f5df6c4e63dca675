"""`hotloop policy`: a made policy is described, bad input exits with style.md's codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotloop.cli.policy import command
from hotloop.errors import InputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_policy_is_made_and_described(tmp_path: Path) -> None:
    out = tmp_path / "p"
    made = CliRunner().invoke(command, ["make", "--out", str(out), "--kind", "moe", "--max-steps", "2", "--seed", "3"])
    assert made.exit_code == 0, made.output
    assert "224,640 parameters, seed 3" in made.output and "NOT reached in 2 steps" in made.output
    told = CliRunner().invoke(command, ["info", str(out), "--json"])
    facts = json.loads(told.output)
    assert facts["parameters"] == "224,640 (224.6 k)"
    assert facts["experts"] == "8 of width 64, 2 per token"
    assert facts["tokenizer"] == "32 ids, stop ids [2], a chat template"
    assert facts["made_here"].startswith("seed 3, 2 warm-up steps")
    plain = CliRunner().invoke(command, ["info", str(out)])
    assert "hidden size" in plain.output and "the lean decoder" in plain.output


def test_the_second_policy_comes_from_the_cache(tmp_path: Path) -> None:
    for name, words in (("a", "made in"), ("b", "from the cache")):
        result = CliRunner().invoke(command, ["make", "--out", str(tmp_path / name), "--max-steps", "0"])
        assert result.exit_code == 0 and words in result.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["info", "nowhere"], "policy_not_found"),
        (["make", "--out", ".", "--max-steps", "0"], "policy_exists"),
        (["make", "--out", "new", "--task", "juggling"], "unknown_task"),
    ],
)
def test_bad_input_is_an_input_error(arguments: list[str], code: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, InputError)
    assert (result.exception.code, result.exception.exit_code) == (code, 2)


@pytest.mark.parametrize(
    "option",
    [
        "--seed=-1",
        "--seed=99999999999999999999999",
        "--max-positions=0",
        "--accuracy=7",
        "--max-steps=-1",
    ],
)
def test_a_number_that_no_policy_can_have_is_refused_before_anything_is_made(tmp_path: Path, option: str) -> None:
    outcome = CliRunner().invoke(command, ["make", "--out", str(tmp_path / "p"), option])
    assert outcome.exit_code == 2 and "not in the range" in outcome.output
    assert not (tmp_path / "p").exists()
