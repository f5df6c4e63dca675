"""What the page asks about experiments: every answer is the planner's, and what comes in is cleaned."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hotloop.cli.planner_input import read_resume_facts
from hotloop.errors import InputError
from hotloop.experiment.apply import apply_edit
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.bundle import build_bundle
from hotloop.experiment.plan import build_plan
from hotloop.experiment.provenance import BuildInfo
from hotloop.lab import answers, exports
from hotloop.lab.schedules import answer_schedules
from hotloop.lab.understand import answer_understand

BUILD = BuildInfo("c" * 40, False)
DEFAULTS = answers.dump_experiment(Experiment())


def test_a_plan_is_the_planners_own_word_for_word() -> None:
    answer = answers.answer_plan({"experiment": DEFAULTS})
    assert answer["plan"] == build_plan(Experiment()).to_json()
    assert answer["experiment"] == DEFAULTS
    assert (answer["edited"], answer["followed"]) == ([], [])


def test_an_edit_and_what_followed_from_it_come_together() -> None:
    answer = answers.answer_plan({"experiment": DEFAULTS, "edit": {"schedule": "async"}})
    assert answer["experiment"]["layout"] == "separate"
    assert [change["field"] for change in answer["edited"]] == ["schedule"]
    assert {change["field"]: change["rule"] for change in answer["followed"]}["layout"] == "D01"


def test_a_section_is_edited_by_dotted_name() -> None:
    answer = answers.answer_plan({"experiment": DEFAULTS, "edit": {"sampling.group_size": 16}})
    assert answer["experiment"]["sampling"]["group_size"] == 16


def test_another_kind_of_a_section_keeps_nothing_of_the_old_one() -> None:
    first = answers.answer_plan({"experiment": DEFAULTS, "edit": {"algorithm.kind": "reinforce_plus_plus"}})
    assert first["experiment"]["algorithm"]["gamma"] == 1.0
    second = answers.answer_plan({"experiment": first["experiment"], "edit": {"algorithm.kind": "grpo"}})
    assert second["experiment"] == DEFAULTS


def test_equal_choices_have_equal_hashes_and_others_do_not() -> None:
    assert answers.hash_experiment(Experiment()) == answers.hash_experiment(Experiment(rounds=3))
    assert answers.hash_experiment(Experiment()) != answers.hash_experiment(Experiment(rounds=4))


@pytest.mark.parametrize("values", [None, [], "x", {"rounds": -1}, {"nonsense": 1}])
def test_what_is_no_experiment_is_refused(values: Any) -> None:
    with pytest.raises(InputError):
        answers.answer_plan({"experiment": values})


def test_effects_say_what_each_option_would_lead_to() -> None:
    picked = {"layout": "separate", "r3": True, "mask_prefix": True}
    edits = [{"field": field, "value": value} for field, value in picked.items()]
    separate, r3, masked = answers.answer_effects({"experiment": DEFAULTS, "edits": edits})["effects"]
    wanted = build_plan(apply_edit(Experiment(), {"layout": "separate"}).experiment)
    assert separate["gpus"] == wanted.layout.train_gpus + wanted.layout.rollout_gpus == 16
    assert separate["round_s"] == wanted.staleness.round_s
    assert r3["new_errors"] == []
    assert masked["new_errors"] == ["mask_partial"]


def test_an_option_that_the_schema_refuses_has_a_code_in_place_of_figures() -> None:
    edits = [{"field": "rounds", "value": -1}, {"field": "no_such", "value": 1}]
    effects = answers.answer_effects({"experiment": DEFAULTS, "edits": edits})["effects"]
    assert [set(effect) for effect in effects] == [{"error"}, {"error"}]


def test_effects_are_limited_in_number() -> None:
    with pytest.raises(InputError):
        answers.answer_effects({"experiment": DEFAULTS, "edits": [{"field": "rounds", "value": 1}] * 65})


@pytest.mark.parametrize(
    ("name", "text", "rounds"),
    [
        ("experiment.json", '{"schema": 1, "app": "hotloop", "choices": {"rounds": 7}}', 7),
        ("bare.json", '{"rounds": 8}', 8),
        ("run.toml", "rounds = 9\n[sampling]\ngroup_size = 4\n", 9),
        ("camel.json", '{"responseTokens": 256, "rounds": 10}', 10),
    ],
)
def test_files_of_every_spelling_are_read(name: str, text: str, rounds: int) -> None:
    read = answers.answer_load({"name": name, "text": text})
    assert (read["experiment"]["rounds"], read["dropped"]) == (rounds, [])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"schema": 2, "choices": {}}', "schema_unsupported"),
        ('{"schema": 1}', "schema_unsupported"),
        ("{", "bad_json"),
        ("= 1", "bad_toml"),
        ("[1]", "wrong_type"),
        ('{"model": "nothing-like-it"}', "unknown_model"),
        ("[" * 100_000, "bad_json"),
    ],
)
def test_a_bad_file_has_a_code(text: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        answers.answer_load({"name": "file.json", "text": text})
    assert caught.value.code == code


def test_what_the_cleaning_leaves_out_is_named() -> None:
    text = json.dumps({"rounds": 5, "noSuch": 1, "__proto__": {"x": 1}, "recompute": "sometimes"})
    read = answers.answer_load({"name": "f.json", "text": text})
    assert read["experiment"]["rounds"] == 5
    assert read["dropped"] == ["__proto__.x", "noSuch", "recompute"]


def test_a_link_names_what_stays_private() -> None:
    experiment = answers.dump_experiment(Experiment(save_path="/data/mine", rounds=9))
    made = answers.answer_link({"kind": "experiment", "experiment": experiment})
    assert made["left_out"] == ["save_path"]
    payload = made["fragment"].removeprefix("experiment=")
    mine = answers.dump_experiment(Experiment(save_path="/data/yours"))
    opened = answers.answer_open_link({"kind": "experiment", "payload": payload, "current": mine})
    assert (opened["experiment"]["rounds"], opened["experiment"]["save_path"]) == (9, "/data/yours")


def test_a_link_to_a_model_that_is_not_here_is_refused() -> None:
    made = answers.answer_link({"kind": "experiment", "experiment": {"model": "from-elsewhere"}})
    payload = made["fragment"].removeprefix("experiment=")
    with pytest.raises(InputError) as caught:
        answers.answer_open_link({"kind": "experiment", "payload": payload, "current": DEFAULTS})
    assert caught.value.code == "unknown_model"


def test_a_comparison_names_what_differs() -> None:
    b = answers.dump_experiment(Experiment(model="dense"))
    fields = {d["field"]: (d["a"], d["b"]) for d in answers.answer_compare({"a": DEFAULTS, "b": b})["differences"]}
    assert fields["model"] == ("flash", "dense")


def test_exported_files_are_those_of_the_command() -> None:
    bundle = build_bundle(build_plan(Experiment()), load_catalog(), BUILD)
    answer = exports.answer_export({"experiment": DEFAULTS}, BUILD)
    assert answer["files"] == dict(bundle.files)
    assert (answer["blocked"], answer["blocked_files"]) == (False, [])


def test_an_error_holds_back_both_scripts_and_never_the_json() -> None:
    experiment = answers.dump_experiment(Experiment(mask_prefix=True))
    answer = exports.answer_export({"experiment": experiment}, BUILD)
    assert answer["blocked_files"] == ["experiment.sh", "serving-reference.sh"]
    assert answer["files"]["experiment.sh"] == "# not written: mask_partial\n"
    assert json.loads(answer["files"]["experiment.json"])["choices"]["mask_prefix"] is True
    with pytest.raises(InputError) as caught:
        exports.make_zip({"experiment": experiment}, BUILD)
    assert caught.value.code == "export_blocked"


def test_a_zip_of_the_same_choices_has_the_same_bytes_and_scripts_that_run() -> None:
    packed = exports.make_zip({"experiment": DEFAULTS}, BUILD)
    assert packed == exports.make_zip({"experiment": DEFAULTS}, BUILD)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        modes = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    assert modes == {"experiment.json": 0o644, "experiment.sh": 0o755, "serving-reference.sh": 0o755}


def test_the_three_schedules_are_drawn_from_the_plans_own_times() -> None:
    answer = answer_schedules({"experiment": DEFAULTS})
    by_kind = {schedule["kind"]: schedule for schedule in answer["schedules"]}
    assert [kind for kind, schedule in by_kind.items() if schedule["is_chosen"]] == ["sync"]
    times = {item.name: item.value for item in build_plan(Experiment()).estimates}
    first = next(s for s in by_kind["sync"]["spans"] if s["lane"] == "trainer")
    assert first["start_s"] == pytest.approx(times["rollout_s"])
    assert first["end_s"] - first["start_s"] == pytest.approx(times["train_s"])
    assert by_kind["async"]["moves"] == ["layout"]


def test_in_a_sync_schedule_sampler_and_trainer_never_work_at_once() -> None:
    for kind in ("sync", "partial"):
        spans = next(s for s in answer_schedules({"experiment": DEFAULTS})["schedules"] if s["kind"] == kind)["spans"]
        sampling = [s for s in spans if s["lane"] == "sampler" and s["kind"] in ("sample", "resume")]
        training = [s for s in spans if s["kind"] == "train"]
        overlaps = [
            (a, b) for a in sampling for b in training if a["start_s"] < b["end_s"] and b["start_s"] < a["end_s"]
        ]
        assert overlaps == []


def test_saves_are_marked_where_the_run_saves() -> None:
    every = answers.dump_experiment(Experiment(straw=True, rounds=10))
    last = answers.dump_experiment(Experiment(rounds=3))
    sync = [answer_schedules({"experiment": values})["schedules"][0] for values in (every, last)]
    assert [schedule["save_interval"] for schedule in sync] == [1, 20]
    assert len(sync[0]["checkpoints_s"]) >= 2
    assert len(sync[1]["checkpoints_s"]) <= 1


def test_the_example_has_the_worked_numbers() -> None:
    example = answer_understand()
    assert example["mean"] == 0.5
    assert example["std"] == pytest.approx(0.534522, abs=5e-7)
    assert example["advantages_without_epsilon"][0] == pytest.approx(0.935414, abs=5e-7)
    assert example["advantages"][0] == pytest.approx(0.935413, abs=5e-7)
    assert example["advantages"][7] == pytest.approx(-0.935413, abs=5e-7)


def test_the_page_has_the_types_of_the_schema() -> None:
    import importlib.util

    script = Path(__file__).parents[3] / "web" / "gen_types.py"
    spec = importlib.util.spec_from_file_location("gen_types", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.render()


def test_the_folder_of_a_resume_is_planned_as_the_command_plans_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_read_resume", read_resume_facts)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    experiment = Experiment(resume_from=str(tmp_path), rounds=3)
    shown = answers.answer_plan({"experiment": answers.dump_experiment(experiment)})
    wanted = build_plan(experiment, resume=read_resume_facts(experiment))
    assert [error["code"] for error in shown["plan"]["errors"]] == [error.code for error in wanted.errors]
    assert "resume_runs_nothing" in [error.code for error in wanted.errors]
    assert shown["plan"]["resume"] == wanted.to_json()["resume"] is not None
