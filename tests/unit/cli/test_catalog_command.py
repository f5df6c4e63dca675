"""`hotloop catalog`: lists what there is, and turns a config.json into a file that `--catalog` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotloop.cli.catalog import command
from hotloop.errors import InputError
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import build_plan

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


def run(*words: str) -> str:
    result = CliRunner().invoke(command, list(words))
    if result.exception is not None:
        raise result.exception
    return result.output


def write_config(folder: Path, text: str | None = None) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG) if text is None else text, encoding="utf-8")
    return path


def test_it_lists_every_model_and_gpu() -> None:
    words = run().split()
    catalog = load_catalog()
    assert set(catalog.models) | set(catalog.gpus) <= set(words)


def test_its_json_has_the_source_of_every_fact() -> None:
    document = json.loads(run("--json"))
    assert len(document["models"]) == 19
    assert all(entry["source"] for part in document.values() for entry in part.values())


def test_an_added_model_can_be_planned(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    script = "scripts/models/mine.sh"
    message = run(
        "add",
        str(write_config(tmp_path)),
        "--name",
        "mine",
        "--repo",
        "me/Mine",
        "--model-script",
        script,
        "--out",
        str(out),
    )
    assert f"--catalog {out}" in message
    assert "mine" in run("--catalog", str(out))
    assert build_plan(Experiment(model="mine"), catalog=load_catalog([out])).errors == ()


def test_the_name_is_the_folders_unless_given(tmp_path: Path) -> None:
    assert f'[models."{tmp_path.name}"]' in run("add", str(write_config(tmp_path)))


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    out.write_text("kept", encoding="utf-8")
    with pytest.raises(InputError, match="file_exists"):
        run("add", str(write_config(tmp_path)), "--name", "mine", "--out", str(out))
    assert out.read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize(("text", "code"), [("{", "bad_json"), ("[]", "bad_json"), ("{}", "config_unsupported")])
def test_a_file_that_is_no_config_is_an_input_error(tmp_path: Path, text: str, code: str) -> None:
    with pytest.raises(InputError, match=code):
        run("add", str(write_config(tmp_path, text)), "--name", "mine")


def test_an_absent_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file_unreadable"):
        run("add", str(tmp_path / "none.json"))
