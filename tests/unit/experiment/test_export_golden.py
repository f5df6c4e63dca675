"""Reviewed files: the scripts and argument vectors of the default experiment of each lab model.

The vectors (`tests/golden/*.argv`, one flag a line) were checked against the tables of the specification and the
catalogue by eye. After an intended change run `python tests/unit/experiment/test_export_golden.py` and read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from export_rig import MODEL_ARGS, StubCluster, entry_words, render, render_serving

from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.flags import is_flag_word

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
LAB_MODELS = ("flash", "dense", "glm47", "glm5", "deepseek", "qwen38")


def render_argv(words: list[str]) -> str:
    """One flag with its values a line."""
    lines: list[str] = []
    for word in words:
        if is_flag_word(word) or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


def receive_argv(folder: Path, model: str) -> list[str]:
    """Run `experiment.sh train` under stubs and return what Ray was asked to start."""
    cluster = StubCluster(folder, load_catalog().models[model].model_script)
    done = cluster.run(render(model=model), "train")
    assert done.returncode == 0, done.stderr
    return entry_words(cluster.calls_of("ray")[0])


@pytest.mark.parametrize("model", LAB_MODELS)
def test_train_receives_exactly_the_reviewed_vector(tmp_path: Path, model: str) -> None:
    words = receive_argv(tmp_path, model)
    assert words[: 2 + len(MODEL_ARGS)] == ["python3", "train.py", *MODEL_ARGS]
    assert render_argv(words[2 + len(MODEL_ARGS) :]) == (GOLDEN / f"{model}.argv").read_text()


@pytest.mark.parametrize("model", LAB_MODELS)
def test_the_scripts_are_the_reviewed_ones(model: str) -> None:
    assert render(model=model) == (GOLDEN / f"{model}.experiment.sh").read_text()
    assert render_serving(model=model) == (GOLDEN / f"{model}.serving-reference.sh").read_text()


def test_the_six_models_are_the_lab_models_of_the_catalogue() -> None:
    assert {model.id for model in load_catalog().models.values() if model.in_lab} == set(LAB_MODELS)


def _write() -> None:
    import tempfile

    for model in LAB_MODELS:
        (GOLDEN / f"{model}.experiment.sh").write_text(render(model=model))
        (GOLDEN / f"{model}.serving-reference.sh").write_text(render_serving(model=model))
        with tempfile.TemporaryDirectory() as folder:
            words = receive_argv(Path(folder) / "cluster", model)
        (GOLDEN / f"{model}.argv").write_text(render_argv(words[2 + len(MODEL_ARGS) :]))


if __name__ == "__main__":
    _write()
