"""L12 and the issue's hostile text: every free field, through every program, stays one word and never runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from export_rig import MODEL_ARGS, StubCluster, entry_words, render_of, render_serving

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.slime import SGLANG_CONFIG_FILE, build_train_argv
from hotloop.experiment.resolve import resolve

FLASH = "scripts/models/glm4.7-30B-A3B.sh"

HOSTILE = [
    "'; touch {pwned}; '\"; touch {pwned}; \"$(touch {pwned})`touch {pwned}`\\'; touch {pwned} #",
    "x\ntouch {pwned}\n| touch {pwned} & ${IFS}*?[a]~{{a,b}}!! é 中",
    "x;touch${IFS}{pwned};$(touch${IFS}{pwned})",
]
"""Every way out of quotes that bash and sh have; the last has no blank, so that an older Ray would not quote it."""

FREE_TEXT = {
    "hf_path": {},
    "train_path": {},
    "data_path": {},
    "save_path": {},
    "megatron_path": {},
    "generate_hook": {"task": "custom", "reward_hook": "a.b"},
    "reward_hook": {"task": "custom", "generate_hook": "a.b"},
    "external_addrs": {"layout": "external", "transport": "disk", "weight_dir": "/w"},
    "rdma_device": {"pd": True, "layout": "separate", "rollout_gpus": 16},
    "draft_path": {"eagle": "external"},
    "weight_dir": {"layout": "separate", "transport": "disk"},
    "local_weight_dir": {"layout": "separate", "transport": "delta", "weight_dir": "/w"},
    "straw_dir": {"straw": True, "straw_run_id": "r", "straw_declaration": "/d"},
    "straw_run_id": {"straw": True, "straw_dir": "/q", "straw_declaration": "/d"},
    "straw_declaration": {"straw": True, "straw_dir": "/q", "straw_run_id": "r"},
    "eval_data": {"eval_mode": "inline"},
    "resume_from": {},
    "sampling.stop": {},
    "data.prompt_key": {},
    "data.label_key": {},
    "data.slice": {},
    "reward.pattern": {"reward": {"kind": "format"}},
    "reward.url": {"reward": {"kind": "remote"}},
    "reward.function": {"reward": {"kind": "python"}},
    "export.publish": {"layout": "separate", "transport": "delta", "weight_dir": "/w", "local_weight_dir": "/n"},
    "export.slime_args": {},
}
"""Every free text of the schema that reaches an export, with what makes it reach it."""


def make(field: str, text: str) -> Experiment:
    values: dict[str, Any] = json.loads(json.dumps(FREE_TEXT[field]))
    section, _, name = field.rpartition(".")
    held: Any = ["--wandb-group", text] if name == "slime_args" else [text] if name == "stop" else text
    if section:
        values.setdefault(section, {})[name] = held
    else:
        values[field] = held
    return Experiment.model_validate(values)


def list_free_text() -> set[str]:
    """Every text of the schema that is not a choice from a list."""
    found = set()
    for name, value in Experiment().model_dump().items():
        info = Experiment.model_fields[name]
        if isinstance(value, dict):
            continue
        if "str" in str(info.annotation) and "Literal" not in str(info.annotation):
            found.add(name)
    return found - {"model", "gpu"}  # names of the catalogue, refused when unknown


def test_the_list_of_fields_is_complete() -> None:
    assert list_free_text() <= set(FREE_TEXT)


@pytest.mark.parametrize("field", sorted(FREE_TEXT))
def test_l12_hostile_text_reaches_the_driver_as_it_is_and_never_runs(tmp_path: Path, field: str) -> None:
    """`ray` here hands its entry point to a real shell, in the way of an older and of a newer Ray in turn."""
    pwned = tmp_path / "pwned"
    for number, pattern in enumerate(HOSTILE):
        shell = "new" if number == 1 else "old"
        cluster = StubCluster(tmp_path / str(number), FLASH)
        experiment = make(field, pattern.replace("{pwned}", str(pwned)))
        script = render_of(experiment)
        for command in ("prepare", "convert", "check"):
            cluster.run(script, command)
        done = cluster.run(script, "train", STUB_RAY_SHELL=shell)
        assert done.returncode == 0, done.stderr
        assert not pwned.exists(), pattern
        (received,) = cluster.calls_of("python3")
        catalog = load_catalog()
        resolved = resolve(experiment, catalog)
        expected = build_train_argv(resolved, find_model(catalog, resolved.model))
        if resolved.pd:
            assert Path(received[-1]).parent == cluster.slime
            received, expected = received[:-1], expected[:-1]
            assert SGLANG_CONFIG_FILE not in expected
        assert received == ["train.py", *MODEL_ARGS, *expected], pattern
        assert not list(cluster.slime.glob(".slime-lab.*"))


@pytest.mark.parametrize("field", sorted(FREE_TEXT))
def test_l12_hostile_text_never_runs_in_the_serving_reference(tmp_path: Path, field: str) -> None:
    pwned = tmp_path / "pwned"
    for number, pattern in enumerate(HOSTILE[:2]):
        cluster = StubCluster(tmp_path / str(number))
        experiment = make(field, pattern.replace("{pwned}", str(pwned)))
        done = cluster.run(render_serving(**experiment.model_dump(mode="json")))
        assert done.returncode == 0, done.stderr
        assert not pwned.exists(), pattern
        (received,) = cluster.calls_of("python3")
        assert received[:4] == ["-m", "sglang.launch_server", "--model-path", resolve(experiment).hf_path]


def test_plain_words_go_to_ray_as_they_are(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    cluster.run(render_of(Experiment()), "train")
    assert entry_words(cluster.calls_of("ray")[0])[:2] == ["python3", "train.py"]


def test_a_word_that_a_shell_would_read_goes_as_a_file(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    cluster.run(render_of(Experiment(save_path="/with space")), "train")
    program, path = entry_words(cluster.calls_of("ray")[0])
    assert program == "bash"
    assert Path(path).parent == cluster.slime


def test_user_text_stands_only_inside_single_quotes() -> None:
    marker = "XUSERTEXTX$(id)"
    for field in FREE_TEXT:
        for line in render_of(make(field, marker)).splitlines():
            if marker not in line:
                continue
            before = line[: line.index(marker)]
            assert before.count("'") % 2 == 1 or line.lstrip().startswith('"'), (field, line)
