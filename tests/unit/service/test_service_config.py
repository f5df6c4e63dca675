"""The file of a deployment: defaults, and every error with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.errors import InputError
from hotloop.service.config import load_config


def problems(tmp_path: Path, text: str) -> list[tuple[str, str]]:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    found = caught.value.problems or (caught.value,)
    return [(problem.code, problem.where.removeprefix(str(path))) for problem in found]


def test_two_keys_suffice(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("bucket: file:///b\nserved_model_name: policy\n")
    config = load_config(path)
    assert (config.replicas, config.host, config.engine.kind, config.transition.mode) == (
        1,
        "127.0.0.1",
        "torch",
        "ASYNC",
    )
    assert load_config(path, {"replicas": 3}).replicas == 3


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = "bucket: file:///b\nreplicas: -1\nengine:\n  kind: torch\n  threads: 0\nlimits:\n  max_queue: many\n"
    assert problems(tmp_path, text) == [
        ("missing_key", ":1: served_model_name"),
        ("invalid_value", ":2: replicas"),
        ("invalid_value", ":5: engine.threads"),
        ("invalid_value", ":7: limits.max_queue"),
    ]


@pytest.mark.parametrize(
    ("line", "where", "close"),
    [("replica: 2", ":3: replica", "replicas"), ("engine: {kinds: fake}", ":3: engine.kinds", "kind")],
)
def test_a_misspelt_key_gets_a_suggestion(tmp_path: Path, line: str, where: str, close: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"bucket: file:///b\nserved_model_name: policy\n{line}\n")
    with pytest.raises(InputError, match=rf"Did you mean {close}\?") as caught:
        load_config(path)
    assert f"{path}{where}" in str(caught.value) and "[unknown_key]" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [("- a\n", ""), ("", ""), ("bucket: [\n", ":2"), ("a: b: c\n", ":1"), ("a: !!python/name:os.system x", ":1")],
)
def test_what_is_not_a_plain_mapping_is_a_syntax_error(tmp_path: Path, text: str, where: str) -> None:
    assert problems(tmp_path, text) == [("config_syntax", where)]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_config(tmp_path / "none.yaml")
    assert caught.value.code == "config_unreadable" and "none.yaml" in str(caught.value)


def test_a_file_that_is_no_utf_8_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"bucket: \xff\xfe\n")
    with pytest.raises(InputError, match=r"is not UTF-8 text \(invalid start byte at byte 8\) \[config_syntax\]"):
        load_config(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " * 3 + "{a: " * 50_000, "bucket: 2024-99-99\n"])
def test_yaml_that_breaks_its_parser_is_refused(tmp_path: Path, text: str) -> None:
    assert [code for code, _ in problems(tmp_path, text)] == ["config_syntax"]


def test_a_key_given_twice_is_refused_at_every_level(tmp_path: Path) -> None:
    text = "bucket: file:///b\nserved_model_name: p\nbucket: file:///c\nengine:\n  kind: fake\n  kind: torch\n"
    assert problems(tmp_path, text) == [("config_syntax", ":3"), ("config_syntax", ":6")]
    assert problems(tmp_path, "a: 1\n'a': 2\n") == [("config_syntax", ":2")]
    assert problems(tmp_path, "{a: 1, a: 1}") == [("config_syntax", ":1")]


def test_the_same_key_in_two_tables_is_no_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("bucket: file:///b\nserved_model_name: p\nengine: {url: a, options: {url: b}}\n")
    assert load_config(path).engine.options == {"url": "b"}


@pytest.mark.parametrize(
    "line", ['bucket: "file:///b\\0"', 'tokenizer: "\\0"', 'engine: {device: "\\x00"}', 'peers: {nodes: ["\\0"]}']
)
def test_no_text_may_hold_nul(tmp_path: Path, line: str) -> None:
    assert problems(tmp_path, f"served_model_name: p\n{line}\n") == [("invalid_value", ":2")]
