"""Rehearse: the very experiment on the page runs for real, and is watched, stopped, resumed and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage

RUN_MS = 240_000
"""A real run on a shared machine; nothing here asserts how long it takes."""


def short_run(rounds: int, **more: Any) -> str:
    """The laptop preset, cut to a few rounds, as a file that brings no code."""
    from hotloop.experiment.presets import find_preset

    choices = find_preset("laptop").model_dump(mode="json")
    task = more.pop("task_name", choices["laptop"]["task"])
    choices |= {"rounds": rounds, "eval_interval": 4, **more}
    choices["laptop"] |= {"checkpoint_interval": 2, "eval_rows": 64, "task": task}
    return json.dumps(choices)


def load_short_run(lab: LabPage, rounds: int, **more: Any) -> None:
    with lab.drawn():
        lab.load(short_run(rounds, **more))


def begin(lab: LabPage) -> None:
    """Press Rehearse and wait until the page shows the new run in place of an earlier one."""
    current = "() => document.querySelector('[data-testid=run-state]')?.dataset.run ?? ''"
    lab.page.wait_for_load_state("networkidle")
    before = lab.page.evaluate(current)
    lab.page.locator("#rehearse").get_by_role("button", name="Rehearse", exact=True).click()
    lab.page.wait_for_function(f"before => !['', before].includes(({current})())", arg=before)


def wait_for_state(lab: LabPage, state: str) -> None:
    lab.page.wait_for_selector(f"[data-testid=run-state][data-state={state}]", timeout=RUN_MS)


def wait_for_records(lab: LabPage, count: int) -> None:
    lab.page.wait_for_function(
        "count => Number(document.querySelector('.live')?.dataset.records ?? 0) >= count", arg=count, timeout=RUN_MS
    )


@pytest.fixture
def no_runs_left(server: Any, open_lab: Any) -> Iterator[None]:
    """Stop whatever a test left running, so that the next one may start."""
    yield
    lab = open_lab()
    for run in lab.ask("/api/runs")["runs"]:
        if run["state"] == "running":
            lab.ask(f"/api/runs/{run['run_id']}/stop", {})


@pytest.mark.usefixtures("no_runs_left")
def test_a_run_from_the_page_draws_itself_and_finishes(lab: LabPage) -> None:
    load_short_run(lab, 8)
    begin(lab)
    wait_for_state(lab, "running")
    wait_for_records(lab, 2)
    wait_for_state(lab, "finished")
    wait_for_records(lab, 8)
    assert len(lab.page.get_by_test_id("line-train").get_attribute("points").split()) == 8
    reward = float(lab.page.get_by_test_id("tile-reward").locator("b").text_content())
    with lab.page.context.expect_page() as opened:
        lab.page.get_by_role("link", name="Open report").click()
    printed = opened.value.locator("main.report").inner_text()
    assert "Outcome" in printed
    assert "A group of round 7" in printed
    run_id = lab.ask("/api/runs")["runs"][0]["run_id"]
    report = lab.ask(f"/api/runs/{run_id}/report")
    assert reward == pytest.approx(report["metrics"][-1]["rollout/raw_reward"], abs=0.005)
    assert report["summary"]["rounds"] == 8
    lab.page.get_by_role("button", name="Show as table").first.click()
    rows = lab.page.locator("#rehearse figure table tbody tr").all()
    assert len(rows) >= 8
    for tile in ("held-out", "kl", "clip", "mismatch", "staleness", "length", "time"):
        lab.page.get_by_test_id(f"tile-{tile}").click()
        assert lab.page.get_by_test_id("chart").count() >= 1, tile
    assert lab.page.get_by_test_id("lanes").locator("rect").count() > 3


@pytest.mark.usefixtures("no_runs_left")
def test_rollouts_are_shown_with_reward_reason_advantage_and_coloured_tokens(lab: LabPage) -> None:
    load_short_run(lab, 3)
    begin(lab)
    wait_for_state(lab, "finished")
    table = lab.page.get_by_test_id("rollouts")
    table.wait_for()
    assert table.locator("tbody tr").count() == 16
    first = table.locator("tbody tr").first
    assert first.locator(".tok").count() >= 1
    assert first.locator("td").nth(3).text_content() in ("equal", "differs")
    gaps = [row.locator("td").nth(6).text_content() for row in table.locator("tbody tr").all()]
    assert all(gap == "\u2013" or abs(float(gap.replace("\u2212", "-"))) < 0.01 for gap in gaps)
    for colour in ("version", "logprob gap", "advantage"):
        lab.page.get_by_role("group", name="Colour tokens by").get_by_role("button", name=colour).click()
    run_id = lab.ask("/api/runs")["runs"][0]["run_id"]
    groups = [lab.ask(f"/api/runs/{run_id}/rollouts?round=2&group={group}")["rollouts"] for group in range(32)]
    trained = [rollout for group in groups for rollout in group if rollout["advantage"]]
    assert trained
    assert all(len(rollout["gaps"]) == len(rollout["tokens"]) for rollout in trained)
    lab.page.get_by_role("button", name="Next group").click()
    lab.page.get_by_text("group 2 of 32").wait_for()
    lab.page.locator("#rehearse").get_by_label("Round", exact=True).select_option("0")
    lab.page.get_by_text("Rollouts of round 0").wait_for()
    lab.page.get_by_role("button", name="Show rollout 3").click()
    lab.page.get_by_text("Rollout 3, token by token").wait_for()


@pytest.mark.usefixtures("no_runs_left")
def test_a_reload_in_the_middle_of_a_run_loses_nothing(lab: LabPage) -> None:
    load_short_run(lab, 14)
    begin(lab)
    wait_for_records(lab, 3)
    lab.page.reload()
    lab.wait_until_drawn()
    wait_for_state(lab, "finished")
    wait_for_records(lab, 14)
    points = lab.page.get_by_test_id("line-train").get_attribute("points").split()
    assert len(points) == 14


@pytest.mark.usefixtures("no_runs_left")
def test_a_run_is_stopped_saves_and_goes_on_where_it_was(lab: LabPage) -> None:
    load_short_run(lab, 400)
    begin(lab)
    wait_for_records(lab, 3)
    lab.page.locator("#rehearse").get_by_role("button", name="Stop").click()
    wait_for_state(lab, "stopped")
    before = int(lab.page.locator(".live").get_attribute("data-records"))
    lab.page.locator("#rehearse").get_by_role("button", name="Resume").click()
    wait_for_state(lab, "running")
    wait_for_records(lab, before + 2)
    lab.page.locator("#rehearse").get_by_role("button", name="Stop").click()
    wait_for_state(lab, "stopped")
    run_id = lab.ask("/api/runs")["runs"][0]["run_id"]
    rounds = [record["round"] for record in lab.ask(f"/api/runs/{run_id}/report")["metrics"]]
    assert rounds == list(range(len(rounds)))


@pytest.mark.usefixtures("no_runs_left")
def test_a_crashed_run_shows_its_last_lines_and_what_to_do(lab: LabPage, tmp_path: Path) -> None:
    load_short_run(lab, 3, data_path=str(tmp_path / "absent.jsonl"), task_name="", eval_mode="off")
    lab.page.get_by_label("I know these and agree to run them").check()
    begin(lab)
    wait_for_state(lab, "failed")
    crash = lab.page.get_by_test_id("crash").text_content()
    assert "absent.jsonl" in crash
    assert "press Rehearse to start anew" in crash


def test_hooks_and_paths_of_a_loaded_file_are_asked_about_before_a_run(lab: LabPage) -> None:
    load_short_run(lab, 3, reward={"kind": "python", "function": "their_code.reward"})
    asked = lab.page.get_by_test_id("foreign")
    assert "their_code.reward" in asked.text_content()
    button = lab.page.locator("#rehearse").get_by_role("button", name="Rehearse", exact=True)
    assert button.get_attribute("aria-disabled") == "true"
    before = len(lab.ask("/api/runs")["runs"])
    button.dispatch_event("click")
    assert len(lab.ask("/api/runs")["runs"]) == before
    asked.get_by_label("I know these and agree to run them").check()
    assert button.get_attribute("aria-disabled") == "false"


def test_the_server_itself_refuses_foreign_code_that_was_not_agreed_to(lab: LabPage) -> None:
    experiment = json.loads(short_run(3, reward={"kind": "python", "function": "their_code.reward"}))
    refused = lab.ask("/api/runs", {"experiment": experiment})
    assert refused["error"]["code"] == "foreign_code"
    assert refused["error"]["details"] == {"foreign": ["their_code.reward"]}
    lab.troubles[:] = [trouble for trouble in lab.troubles if "400" not in trouble]


def test_X02_2_the_page_lists_what_is_kept_replaced_and_not_rehearsed(lab: LabPage) -> None:
    form = lab.ask("/api/rehearsal", {"experiment": lab.experiment()})
    for name, key in (("kept", "kept"), ("replaced", "replaced"), ("not", "not_rehearsed")):
        drawn = lab.page.get_by_test_id(f"list-{name}").locator("li").count()
        assert drawn == len(form[key]) > 0, name


def test_a_blocked_experiment_cannot_be_rehearsed_and_says_why(lab: LabPage) -> None:
    lab.preset("scale")
    section = lab.page.locator("#rehearse")
    button = section.get_by_role("button", name="Rehearse", exact=True)
    assert button.get_attribute("aria-disabled") == "true"
    assert "Blocked by 1 error" in section.locator("#why-not").text_content()


@pytest.mark.usefixtures("no_runs_left")
def test_what_a_model_wrote_is_text_and_never_markup(lab: LabPage, server: Any) -> None:
    load_short_run(lab, 2)
    begin(lab)
    wait_for_state(lab, "finished")
    run_id = lab.ask("/api/runs")["runs"][0]["run_id"]
    plant_markup(Path(server.runs) / run_id / "run")
    lab.page.reload()
    lab.wait_until_drawn()
    table = lab.page.get_by_test_id("rollouts")
    table.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()
    assert table.locator("img, script").count() == 0


def plant_markup(run: Path) -> None:
    """Write a round whose tokens and reason are markup."""
    import orjson
    import zstandard

    path = run / "rollouts" / "rollout_1.jsonl.zst"
    lines = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read().splitlines()
    records = [orjson.loads(line) | {"reason": "<img src=x onerror=alert(1)>"} for line in lines]
    packed = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)
    path.write_bytes(zstandard.ZstdCompressor().compress(packed))
    tokenizer = run / "policy" / "tokenizer.json"
    document = orjson.loads(tokenizer.read_bytes())
    vocabulary = {f"<script>{text}</script>": index for text, index in document["model"]["vocab"].items()}
    document["model"]["vocab"] = vocabulary
    if tokenizer.is_symlink():
        tokenizer.unlink()
    tokenizer.write_bytes(orjson.dumps(document))


@pytest.mark.slow
@pytest.mark.usefixtures("no_runs_left")
def test_X02_3_the_default_experiment_learns_from_the_page(lab: LabPage) -> None:
    begin(lab)
    wait_for_state(lab, "running")
    wait_for_state(lab, "finished")
    run_id = lab.ask("/api/runs")["runs"][0]["run_id"]
    report = lab.ask(f"/api/runs/{run_id}/report")
    rewards = [record["rollout/raw_reward"] for record in report["metrics"]]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.1
    assert report["summary"]["eval_sampled_after"] > report["summary"]["eval_sampled_before"]
