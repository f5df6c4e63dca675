"""A deployment that no replica could serve is refused before one is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hotloop.cli.serve import command
from hotloop.errors import InputError, MissingExtra
from hotloop.models.tokenizer import build_char_tokenizer
from hotloop.service.config import DeploymentConfig
from hotloop.service.start_checks import check_start, find_missing_bucket


def make_config(**settings: Any) -> DeploymentConfig:
    return DeploymentConfig.model_validate({"bucket": "file:///b", "served_model_name": "policy", **settings})


@pytest.mark.parametrize(
    ("settings", "code", "where"),
    [
        ({"tokenizer": "/nowhere"}, "tokenizer_not_found", "tokenizer: /nowhere"),
        ({"engine": {"kind": "vllm"}}, "engine_address", "engine.url"),
        ({"engine": {"kind": "sglang", "url": "host:1"}}, "engine_address", "engine.url"),
        ({"engine": {"device": "gpu"}}, "engine_settings", "engine.device = gpu"),
        ({"engine": {"device": "meta"}}, "engine_settings", "engine.device = meta"),
        ({"engine": {"device": "cuda:4711"}}, "engine_settings", "engine.device = cuda:4711"),
    ],
)
def test_what_no_replica_could_get_over_is_bad_input(settings: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        check_start(make_config(**settings))
    assert (caught.value.code, caught.value.where, caught.value.exit_code) == (code, where, 2)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        check_start(make_config(tokenizer="/nowhere", engine={"kind": "vllm"}))
    assert [problem.code for problem in caught.value.problems] == ["tokenizer_not_found", "engine_address"]


def test_a_missing_torch_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"hotloop\[torch\]"):
        check_start(make_config())
    check_start(make_config(engine={"kind": "fake"}))


def test_a_deployment_that_can_start_is_let_through(tmp_path: Path) -> None:
    for name, data in build_char_tokenizer().items():
        (tmp_path / name).write_bytes(data)
    check_start(make_config(tokenizer=str(tmp_path)))
    check_start(make_config(engine={"kind": "vllm", "url": "http://127.0.0.1:1"}))


def test_the_command_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    state = tmp_path / "state"
    file.write_text(f"bucket: {tmp_path}/b\nserved_model_name: p\nstate_dir: {state}\ntokenizer: /nowhere\n")
    outcome = CliRunner().invoke(command, [str(file)])
    assert isinstance(outcome.exception, InputError) and outcome.exception.code == "tokenizer_not_found"
    assert not state.exists()


def test_only_a_folder_that_is_not_there_is_a_missing_bucket(tmp_path: Path) -> None:
    assert find_missing_bucket(make_config(bucket=f"file://{tmp_path}/b")) == f"file://{tmp_path}/b"
    assert find_missing_bucket(make_config(bucket=f"file://{tmp_path}")) == ""
    assert find_missing_bucket(make_config(bucket="s3://b/run")) == ""
