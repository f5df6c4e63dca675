"""What is asked before a rehearsal starts, what is drawn beside a running one, and its report."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from hotloop.errors import InputError, MissingExtra
from hotloop.experiment.choices import Experiment
from hotloop.experiment.rehearsal import laptop_form
from hotloop.experiment.sections import Laptop, PythonReward, RemoteReward
from hotloop.lab import answers, rehearsals, report


def body(experiment: Experiment, **more: Any) -> dict[str, Any]:
    return {"experiment": answers.dump_experiment(experiment), **more}


def test_the_three_lists_are_those_of_the_laptop_form() -> None:
    answer = rehearsals.answer_rehearsal(body(Experiment()), laptop_form)
    form = laptop_form(Experiment())
    assert [entry["name"] for entry in answer["kept"]] == [entry.name for entry in form.kept]
    assert [(e["name"], e["before"], e["after"]) for e in answer["replaced"]] == [
        (e.name, e.before, e.after) for e in form.replaced
    ]
    assert answer["rounds"] == form.experiment.rounds == 30


@pytest.mark.parametrize(
    ("experiment", "foreign"),
    [
        (Experiment(), []),
        (Experiment(reward=PythonReward(function="a.reward")), ["a.reward"]),
        (Experiment(reward=RemoteReward(url="http://h/score")), ["http://h/score"]),
        (Experiment(task="custom", generate_hook="a.generate", reward_hook="a.reward"), ["a.generate", "a.reward"]),
        (Experiment(generate_hook="a.generate"), []),
        (Experiment(laptop=Laptop(policy="/models/x", hooks={"buffer_filter": "a.keep"})), ["a.keep", "/models/x"]),
        (Experiment(laptop=Laptop(policy="moe")), []),
    ],
)
def test_what_a_run_would_import_or_read_is_listed(experiment: Experiment, foreign: list[str]) -> None:
    assert rehearsals.list_foreign_code(experiment) == foreign


def test_foreign_code_runs_only_when_exactly_it_was_agreed_to() -> None:
    experiment = Experiment(reward=PythonReward(function="a.reward"))
    for agreed in ([], ["b.reward"], ["a.reward", "b.reward"]):
        with pytest.raises(InputError) as caught:
            rehearsals.prepare_run(body(experiment, agreed=agreed))
        assert (caught.value.code, caught.value.details) == ("foreign_code", {"foreign": ["a.reward"]})
    ready = rehearsals.prepare_run(body(experiment, agreed=["a.reward"]))
    assert ready.document["choices"]["reward"]["function"] == "a.reward"


def test_without_torch_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(MissingExtra) as caught:
        rehearsals.prepare_run(body(Experiment()))
    assert "pip install 'hotloop[torch]'" in str(caught.value)
    assert answers.answer_schema()["missing"] == "torch"


def test_a_run_gets_the_very_experiment_of_the_page() -> None:
    ready = rehearsals.prepare_run(body(Experiment(rounds=7)))
    assert ready.document["choices"] == answers.dump_experiment(Experiment(rounds=7))


def make_run(run: Path, *, reason: str = "equal") -> None:
    (run / "rollouts").mkdir(parents=True)
    (run / "experiment.json").write_bytes(
        orjson.dumps(
            {
                "choices": {"laptop": {"eval_rows": 512}},
                "rehearsal": {"replaced": [{"name": "model", "before": "flash", "after": "moe", "why": "a toy"}]},
            }
        )
    )
    records = [
        {
            "group_index": group,
            "index": index,
            "rollout_id": 2 * group + index,
            "prompt": "<b>s10=</b>",
            "response": "01",
            "response_length": 1,
            "tokens": [1, 3],
            "rollout_log_probs": [-0.5],
            "version_spans": [[0, 1, 0]],
            "status": "completed",
            "reward": float(group),
            "reason": reason,
            "advantage": 0.0,
        }
        for group in (0, 1)
        for index in (0, 1)
    ]
    lines = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)
    (run / "rollouts" / "rollout_1.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    metrics = [{"round": i, "rollout/raw_reward": 0.5 + 0.1 * i, "perf/step_time": 0.25} for i in (0, 1)]
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(m, option=orjson.OPT_APPEND_NEWLINE) for m in metrics))


def test_a_curves_uncertainty_comes_with_its_point(tmp_path: Path) -> None:
    make_run(tmp_path)
    line = json.dumps({"round": 1, "eval/sampled": 0.5})
    told = json.loads(rehearsals.add_uncertainty(tmp_path, line))
    assert told["lab/reward_se"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    low, high = told["lab/held_out_low"], told["lab/held_out_high"]
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 1.959964 * math.sqrt(0.25 / 512), rel=0.01)


def test_a_round_without_rollouts_and_evaluation_is_told_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert json.loads(rehearsals.add_uncertainty(tmp_path, '{"round": 0}')) == {"round": 0}


def test_the_report_has_outcome_account_rounds_and_rollouts_as_text(tmp_path: Path) -> None:
    make_run(tmp_path, reason="<script>alert(1)</script>")
    summary = {"eval_greedy_before": 0.7, "eval_greedy_after": 0.99, "eval_sampled_before": 0.4, "wall_s": 65.0}
    (tmp_path / "summary.json").write_bytes(orjson.dumps(summary))
    page = report.render_report(tmp_path, {"run_id": "r", "title": "flash", "state": "finished"}, tmp_path)
    assert "<td>0.7</td><td>0.99</td>" in page
    assert "1 min 05 s in all" in page
    assert "Reward from 0.50 to 0.60 in 2 rounds" in page
    assert "<td>model</td><td>flash</td><td>moe</td>" in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;s10=" in page


def test_the_report_of_a_run_that_wrote_nothing_says_so(tmp_path: Path) -> None:
    page = report.render_report(tmp_path, {"run_id": "r", "title": "flash", "state": "failed"}, tmp_path)
    assert "has not come to its end" in page


def test_a_long_run_is_reported_in_at_most_sixty_rows_and_the_last(tmp_path: Path) -> None:
    lines = [orjson.dumps({"round": i, "rollout/raw_reward": 0.5}) for i in range(1000)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    page = report.render_report(tmp_path, {"run_id": "r", "title": "flash", "state": "failed"}, tmp_path)
    assert page.count("<tr>") <= 62
    assert "<td>999</td>" in page
