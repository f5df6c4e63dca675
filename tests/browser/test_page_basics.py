"""L01-L16 of the lab: what the page is made of. One test per id."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_page import STORAGE_KEY, LabPage


def pack(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def test_L01_the_loop_has_six_nodes_and_six_edges_and_its_queue_follows_straw(lab: LabPage) -> None:
    ring = lab.page.locator("#dg-loop svg.ring")
    assert ring.locator("[data-testid^=loop-node-]").count() == 6
    assert ring.locator("[data-testid^=loop-edge-]").count() == 6
    assert "in memory" in ring.get_by_test_id("loop-node-D").text_content()
    lab.step("Consistency")
    lab.pick("Persistent queue (straw)")
    assert "survives a crash" in ring.get_by_test_id("loop-node-D").text_content()


def test_L02_a_round_plays_pauses_steps_and_changes_nothing(lab: LabPage) -> None:
    before = lab.experiment()
    caption = lab.page.get_by_test_id("round-caption")
    lab.page.get_by_role("button", name="Play a round").click()
    assert "1 of 6" in caption.text_content()
    lab.page.get_by_role("button", name="Pause").click()
    lab.page.get_by_role("button", name="Step", exact=True).click()
    assert "2 of 6" in caption.text_content()
    assert "not a simulation of speed" in lab.page.locator("#dg-loop").text_content()
    assert lab.experiment() == before


def test_L02_each_schedule_has_captions_of_its_own(lab: LabPage) -> None:
    def captions() -> list[str]:
        told = []
        for _ in range(6):
            lab.page.get_by_role("button", name="Step", exact=True).click()
            told.append(lab.page.get_by_test_id("round-caption").text_content().partition("·")[2])
        return told

    lab.step("Placement")
    lab.page.locator("#dg-loop summary").click()
    sync = captions()
    lab.pick("Fully async")
    fully_async = captions()
    lab.pick("Sync", group="schedule")
    lab.step("Consistency")
    lab.pick("Partial rollouts")
    partial = captions()
    assert len({*sync, *fully_async, *partial}) == 18


def test_L03_serving_shows_a_transfer_only_with_pd_and_a_draft_only_with_eagle(lab: LabPage) -> None:
    lab.step("Serving")
    stages = lab.page.locator("#dg-serving [data-testid^=serve-]")

    def names() -> list[str]:
        return stages.evaluate_all("all => all.map(e => e.dataset.testid.slice(6))")

    assert names() == ["prefill", "decode"]
    lab.pick("Prefill and decode apart (PD)")
    assert names() == ["prefill", "transfer", "decode"]
    lab.pick("Built-in head")
    assert names() == ["prefill", "transfer", "decode", "draft", "verify", "commit"]


def test_L04_six_steps_by_click_by_button_and_by_arrow(lab: LabPage) -> None:
    tabs = lab.page.get_by_role("tab")
    names = [text.split()[1] for text in tabs.all_inner_texts()]
    assert names == ["Model", "Placement", "Precision", "Consistency", "Serving", "Launch"]
    for name in reversed(names):
        lab.step(name)
        assert lab.page.locator("#panel h2").text_content() == name
    lab.page.get_by_role("button", name="Next: Placement").click()
    lab.page.get_by_role("button", name="Back: Model").click()
    assert lab.page.locator("#panel h2").text_content() == "Model"
    lab.page.locator("#tab-model").focus()
    for key, wanted in (("ArrowDown", "Placement"), ("ArrowRight", "Precision"), ("ArrowUp", "Placement")):
        lab.page.keyboard.press(key)
        assert lab.page.locator("#panel h2").text_content() == wanted
    lab.page.keyboard.press("End")
    assert lab.page.evaluate("document.activeElement.id") == "tab-launch"


def test_L05_one_entry_per_edit_with_all_that_followed(lab: LabPage) -> None:
    start = lab.experiment()
    lab.step("Placement")
    lab.pick("Fully async")
    after = lab.experiment()
    assert (after["schedule"], after["layout"]) == ("async", "separate")
    lab.undo()
    assert lab.experiment() == start
    lab.redo()
    assert lab.experiment() == after


def test_L05_keys_undo_and_redo_and_a_new_edit_clears_redo(lab: LabPage) -> None:
    lab.step("Placement")
    lab.pick("Separate")
    with lab.drawn():
        lab.page.keyboard.press("Control+z")
    assert lab.experiment()["layout"] == "colocate"
    with lab.drawn():
        lab.page.keyboard.press("Control+Shift+Z")
    assert lab.experiment()["layout"] == "separate"
    with lab.drawn():
        lab.page.keyboard.press("Meta+z")
    lab.pick("Recompute activations")
    assert lab.page.get_by_role("button", name="Redo", exact=True).get_attribute("aria-disabled") == "true"


def test_L05_reset_can_be_undone(lab: LabPage) -> None:
    lab.fill("Rounds", "77")
    lab.reset()
    assert lab.experiment()["rounds"] == 3
    lab.undo()
    assert lab.experiment()["rounds"] == 77


def test_L06_a_reload_restores_what_was_chosen(lab: LabPage) -> None:
    lab.fill("Rounds", "41")
    lab.page.reload()
    lab.wait_until_drawn()
    assert lab.page.get_by_label("Rounds", exact=True).input_value() == "41"


@pytest.mark.parametrize("kept", ["{", "[]", '{"schema":1,"experiment":{"model":7,"nonsense":{}}}', "null"])
def test_L06_broken_stored_text_gives_the_defaults(lab: LabPage, kept: str) -> None:
    lab.page.evaluate("([key, text]) => localStorage.setItem(key, text)", [STORAGE_KEY, kept])
    lab.page.reload()
    lab.wait_until_drawn()
    assert lab.page.get_by_label("Rounds", exact=True).input_value() == "3"


def test_L07_a_link_brings_the_choices_and_keeps_private_values(lab: LabPage, open_lab: Any) -> None:
    lab.preset("scale")
    lab.step("Serving")
    lab.fill("RDMA device", "mlx5_7")
    lab.page.get_by_role("button", name="Share link").click()
    lab.page.wait_for_function("() => document.querySelector('[data-link]').dataset.link !== ''")
    link = lab.page.locator("[data-link]").get_attribute("data-link")
    assert "#experiment=" in link
    text = base64.urlsafe_b64decode(link.partition("=")[2] + "==").decode()
    assert "mlx5_7" not in text
    reader = open_lab()
    reader.preset("agent")
    reader.step("Model")
    reader.fill("Reward function", "mine.reward")
    with reader.drawn():
        reader.page.evaluate("fragment => { location.hash = fragment }", link.partition("#")[2])
    got = reader.experiment()
    assert (got["model"], got["pd"], got["correction"]) == ("glm5", True, "icepop")
    assert (got["rdma_device"], got["reward_hook"]) == ("", "mine.reward")
    reader.undo()
    assert reader.experiment()["task"] == "custom"


@pytest.mark.parametrize("payload", ["%%%", pack([1]), "A" * 9000, pack({"schema": 9, "choices": {}})])
def test_L07_a_bad_link_gives_a_message_and_changes_nothing(open_lab: Any, payload: str) -> None:
    lab = open_lab()
    lab.fill("Rounds", "12")
    before = lab.experiment()
    lab.page.evaluate("fragment => { location.hash = fragment }", f"experiment={payload}")
    lab.page.wait_for_selector(".ban.e")
    assert lab.experiment() == before
    lab.troubles[:] = [trouble for trouble in lab.troubles if "400" not in trouble]


def test_L08_experiment_json_is_available_while_the_shell_export_is_blocked(lab: LabPage) -> None:
    lab.preset("scale")
    lab.step("Launch")
    with lab.page.expect_download() as caught:
        lab.page.get_by_role("button", name="experiment.json").first.click()
    document = json.loads(Path(caught.value.path()).read_text())
    assert (document["schema"], document["app"], document["choices"]["model"]) == (1, "hotloop", "glm5")
    assert [error["code"] for error in document["validation"]["errors"]] == ["pd_device"]


def test_L09_an_earlier_export_and_bare_choices_load_as_one_undoable_action(lab: LabPage) -> None:
    before = lab.experiment()
    for text in (
        json.dumps({"schema": 1, "app": "hotloop", "choices": {"rounds": 9}, "provenance": {"page_commit": "old"}}),
        json.dumps({"rounds": 9}),
        "rounds = 9\n",
    ):
        with lab.drawn():
            lab.load(text)
        assert lab.experiment()["rounds"] == 9
        lab.undo()
        assert lab.experiment() == before


@pytest.mark.parametrize("text", ["{", '{"schema": 2, "choices": {}}', '{"model": "no-such-model"}', '{"rounds": -4}'])
def test_L09_a_bad_file_gives_a_message_and_changes_nothing(lab: LabPage, text: str) -> None:
    lab.fill("Rounds", "12")
    before = lab.experiment()
    lab.load(text)
    lab.page.wait_for_selector(".ban.e")
    assert lab.experiment() == before
    lab.troubles[:] = [trouble for trouble in lab.troubles if "400" not in trouble]


def test_L09_provenance_of_a_loaded_file_is_made_anew(lab: LabPage) -> None:
    document = {"schema": 1, "choices": {"rounds": 9}, "provenance": {"page_commit": "forged" * 5}}
    with lab.drawn():
        lab.load(json.dumps(document))
    export = lab.ask("/api/export", {"experiment": lab.experiment()})["files"]["experiment.json"]
    assert "forged" not in export


def test_L10_what_is_no_choice_is_left_out_and_named(lab: LabPage) -> None:
    dirty = {
        "rounds": 5,
        "noSuchChoice": 1,
        "__proto__": {"polluted": True},
        "rdma_device": "mlx5\u0007_0\n" + "x" * 3000,
        "recompute": "sometimes",
    }
    with lab.drawn():
        lab.load(json.dumps(dirty))
    got = lab.experiment()
    assert (got["rounds"], got["recompute"]) == (5, True)
    assert got["rdma_device"].startswith("mlx5_0xxx")
    assert len(got["rdma_device"]) == 2048
    message = lab.page.locator(".ban").first.text_content()
    assert "noSuchChoice" in message
    assert "recompute" in message
    assert lab.page.evaluate("({}).polluted") is None


def test_L10_a_number_outside_its_range_is_set_to_the_nearest_and_said(lab: LabPage) -> None:
    lab.fill("Response tokens", "999999999")
    assert lab.experiment()["response_tokens"] == 131072
    field = lab.page.get_by_label("Rounds", exact=True)
    field.fill("two")
    field.press("Enter")
    assert "whole number" in lab.page.locator("#panel").text_content()
    assert lab.experiment()["rounds"] == 3


def test_L11_an_error_closes_copy_and_download_of_both_scripts_and_a_note_does_not(lab: LabPage) -> None:
    lab.step("Launch")
    buttons = [lab.page.get_by_role("button", name=name).first for name in ("experiment.sh", "serving-reference.sh")]
    lab.page.wait_for_selector("text=No errors.")
    assert lab.plan()["plan"]["notes"]
    assert [button.get_attribute("aria-disabled") for button in buttons] == ["false", "false"]
    lab.preset("scale")
    lab.page.wait_for_selector("#panel button[aria-disabled=true]:text-is('experiment.sh')")
    assert [button.get_attribute("aria-disabled") for button in buttons] == ["true", "true"]
    downloads: list[Any] = []
    lab.page.on("download", lambda download: downloads.append(download))
    for button in [*buttons, lab.page.locator("#dg-files").get_by_role("button", name="Copy")]:
        button.dispatch_event("click")
    assert downloads == []
    assert "Copied" not in lab.page.locator("#dg-files").text_content()


def test_L12_hostile_text_stays_one_quoted_word_in_the_downloaded_script(lab: LabPage, tmp_path: Path) -> None:
    lab.step("Launch")
    mark = tmp_path / "touched"
    lab.fill("Saves", f"'; touch {mark}; '$(touch {mark})`touch {mark}`")
    lab.page.wait_for_function(
        "() => document.querySelector('[data-testid=file-text]').textContent.includes('touched')"
    )
    with lab.page.expect_download() as caught:
        lab.page.get_by_role("button", name="experiment.sh").first.click()
    script = tmp_path / "experiment.sh"
    script.write_text(Path(caught.value.path()).read_text())
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    subprocess.run(["bash", str(script), "check"], check=False, capture_output=True, cwd=tmp_path)
    assert not mark.exists()


def test_L13_chinese_has_the_same_controls_and_the_same_files(lab: LabPage) -> None:
    def controls() -> list[list[str]]:
        counts = []
        for tab in range(6):
            lab.page.get_by_role("tab").nth(tab).click()
            if tab == 5:
                lab.page.locator("#panel").get_by_role("button", name="serving-reference.sh").wait_for()
            counts.append(
                lab.page.locator("#panel").evaluate(
                    "p => [...p.querySelectorAll('input,select,button')].map(e => e.tagName + (e.type || ''))"
                )
            )
        return counts

    def exported() -> Any:
        return lab.ask("/api/export", {"experiment": lab.experiment()})["files"]

    english, files = controls(), exported()
    lab.page.get_by_role("button", name="Switch to Chinese").click()
    assert lab.page.locator("html").get_attribute("lang") == "zh-CN"
    assert lab.page.locator("#panel h2").text_content() == "启动"
    assert controls() == english
    assert exported() == files
    lab.page.reload()
    lab.wait_until_drawn()
    assert lab.page.locator("html").get_attribute("lang") == "zh-CN"


@pytest.mark.parametrize("width", [320, 390, 1440])
def test_L14_nothing_scrolls_sideways(open_lab: Any, width: int) -> None:
    lab = open_lab(width=width, height=900)
    for preset in ("start", "scale", "agent"):
        lab.preset(preset)
        for tab in range(6):
            lab.page.get_by_role("tab").nth(tab).click()
            lab.page.locator("details.dg:not([open]) > summary").evaluate_all("all => all.forEach(s => s.click())")
            assert lab.scroll_width() <= width, (preset, tab)


def test_L14_a_narrow_page_starts_with_one_open_diagram_and_a_closed_file(open_lab: Any) -> None:
    lab = open_lab(width=390, height=900)
    assert lab.page.locator("details.dg[open]").count() == 1
    lab.page.get_by_role("tab", name="Launch").click()
    assert lab.page.locator("#dg-files[open]").count() == 0


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("start", {"model": "flash", "layout": "colocate", "schedule": "sync", "correction": "tis"}),
        ("scale", {"model": "glm5", "pd": True, "correction": "icepop", "layout": "separate"}),
        ("agent", {"task": "custom", "schedule": "async", "straw": True, "partial": True, "rollout_gpus": 16}),
        ("laptop", {"model": "qwen2.5-0.5b", "layout": "colocate", "correction": "none"}),
    ],
)
def test_L15_a_preset_is_one_undoable_action(lab: LabPage, name: str, wanted: dict[str, Any]) -> None:
    lab.fill("Rounds", "19")
    lab.preset(name)
    got = lab.experiment()
    assert {key: got[key] for key in wanted} == wanted
    lab.undo()
    assert lab.experiment()["rounds"] == 19


def test_L15_the_agent_preset_stays_blocked_until_its_hooks_are_named(lab: LabPage) -> None:
    lab.preset("agent")
    assert "hook_form" in lab.error_codes()


@pytest.mark.parametrize(
    ("label", "topic", "paper"),
    [
        ("Objective", "objective", "arxiv.org/abs/2402.03300"),
        ("Correction", "correction", "arxiv.org/abs/2510.18855"),
        ("R3", "r3", "arxiv.org/abs/2510.11370"),
        ("Score centering", "score_centering", "doi.org/10.1007/BF00992696"),
        ("Partial rollouts", "partial", "arxiv.org/abs/2501.12599"),
        ("Deterministic", "deterministic", "thinkingmachines.ai"),
    ],
)
def test_L16_each_consistency_option_opens_its_derivation_and_paper(
    lab: LabPage, label: str, topic: str, paper: str
) -> None:
    lab.step("Consistency")
    lab.page.get_by_role("button", name=f"why & math {label}", exact=True).click()
    box = lab.page.get_by_test_id(f"why-{topic}")
    box.locator("pre").first.wait_for()
    assert any(paper in link for link in box.locator("a").evaluate_all("all => all.map(a => a.href)"))


def test_the_command_prints_its_address_first_and_leaves_with_an_interrupt(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "hotloop.cli.main", "lab", "--port", "0", "--no-open", "--runs", str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    address = child.stdout.readline()
    child.terminate()
    child.wait(timeout=30)
    child.stdout.close()
    assert address.startswith("http://127.0.0.1:")
    assert len(address.partition("token=")[2].strip()) >= 32
