"""L20-L24 (understand an RL run), L30-L36 (compare A / B), L40-L48 (repairs and provenance). One test per id."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage

ROOT = Path(__file__).parents[2]


def stage_of(lab: LabPage) -> int:
    return int(lab.page.locator(".steps5").get_attribute("data-stage"))


def test_L20_five_stages_by_hand_and_by_time_with_pause(lab: LabPage) -> None:
    section = lab.page.locator("#understand")
    assert section.locator(".steps5 button").count() == 5
    by_hand = []
    for _ in range(5):
        by_hand.append((stage_of(lab), section.locator(".tell").text_content()))
        section.get_by_role("button", name="Next stage").click()
    assert [index for index, _ in by_hand] == [1, 2, 3, 4, 5]
    assert stage_of(lab) == 1
    lab.page.clock.install()
    section.get_by_role("button", name="Play", exact=True).click()
    by_time = [(stage_of(lab), section.locator(".tell").text_content())]
    for _ in range(4):
        lab.page.clock.run_for(2600)
        by_time.append((stage_of(lab), section.locator(".tell").text_content()))
    assert by_time == by_hand
    lab.page.clock.run_for(2600)
    section.locator(".steps5 button").first.click()
    section.get_by_role("button", name="Play", exact=True).click()
    lab.page.clock.run_for(2600)
    section.get_by_role("button", name="Pause").click()
    lab.page.clock.run_for(9000)
    assert stage_of(lab) == 2


def test_L21_going_through_it_leaves_the_experiment_as_it_was(lab: LabPage) -> None:
    lab.fill("Rounds", "23")
    before = json.dumps(lab.stored(), sort_keys=True)
    for _ in range(6):
        lab.page.get_by_role("button", name="Next stage").click()
    assert json.dumps(lab.stored(), sort_keys=True) == before


def test_L22_its_numbers_are_the_trainers_own(lab: LabPage) -> None:
    section = lab.page.locator("#understand")
    section.locator(".steps5 button").nth(3).click()
    text = section.locator(".tell").text_content()
    assert "Mean 0.5, sample standard deviation 0.534522" in text
    assert "0.935414" in text  # without the 1e-6 in the divisor
    drawn = [row.locator("[role=cell]").nth(2).text_content() for row in section.locator(".adv [role=row]").all()[1:]]
    assert drawn == ["+0.935413"] * 4 + ["\u22120.935413"] * 4


def test_L23_the_starting_point_is_one_entry_and_one_undo_restores_all(lab: LabPage) -> None:
    lab.step("Consistency")
    lab.pick("IcePop")
    lab.step("Model")
    lab.fill("Rollouts per prompt", "4")
    before = lab.experiment()
    with lab.drawn():
        lab.page.get_by_role("button", name="Use this GRPO starting point").click()
    after = lab.experiment()
    assert (after["correction"], after["sampling"]["group_size"], after["algorithm"]["kind"]) == ("tis", 8, "grpo")
    lab.undo()
    assert lab.experiment() == before


def test_L24_it_says_that_it_is_illustrative_not_measured_and_no_promise(lab: LabPage) -> None:
    text = lab.page.locator("#understand").text_content()
    for words in ("Illustrative", "not measured", "no promise"):
        assert words in text


@pytest.fixture
def pair(lab: LabPage) -> LabPage:
    """A is the default experiment; B is fully async."""
    lab.page.get_by_role("button", name="Save B as A").click()
    lab.step("Placement")
    lab.pick("Fully async")
    lab.page.get_by_test_id("differences").get_by_text("Schedule").wait_for()
    return lab


def test_L30_A_stays_fixed_across_edits_undo_redo_and_reload(pair: LabPage) -> None:
    a = pair.stored()["a"]
    assert a["layout"] == "colocate"
    pair.pick("Recompute activations")
    pair.undo()
    pair.redo()
    assert pair.stored()["a"] == a
    pair.page.reload()
    pair.wait_until_drawn()
    assert pair.stored()["a"] == a
    pair.page.get_by_test_id("differences").wait_for()


def test_L31_the_differences_include_what_a_rule_changed(pair: LabPage) -> None:
    text = pair.page.get_by_test_id("differences").text_content()
    assert "Schedule" in text
    assert "Who owns the GPUs" in text  # D01 moved it; only the schedule was picked


def test_L32_each_side_has_its_own_errors_and_notes(lab: LabPage) -> None:
    lab.preset("scale")
    lab.page.get_by_role("button", name="Save B as A").click()
    lab.preset("start")
    outcomes = lab.page.get_by_test_id("outcomes")
    outcomes.wait_for()
    cells = outcomes.locator("tr").last.locator("td").all_text_contents()
    assert "1 error" in cells[1]
    assert "0 errors" in cells[2]
    assert "Only A: pd_device" in lab.page.locator("#compare").text_content()


def test_L33_the_export_is_always_B(pair: LabPage) -> None:
    pair.step("Launch")
    pair.page.wait_for_selector("#panel button:text('experiment.sh')")
    with pair.page.expect_download() as caught:
        pair.page.get_by_role("button", name="experiment.json").first.click()
    shown = Path(caught.value.path()).read_bytes()
    files = pair.ask("/api/export", {"experiment": pair.experiment()})["files"]
    assert hashlib.sha256(shown).digest() == hashlib.sha256(files["experiment.json"].encode()).digest()
    assert json.loads(shown)["choices"]["schedule"] == "async"


def test_L34_A_restored_into_B_is_one_undoable_action(pair: LabPage) -> None:
    b = pair.experiment()
    with pair.drawn():
        pair.page.get_by_role("button", name="Restore A into B").click()
    assert pair.experiment() == pair.stored()["a"]
    pair.undo()
    assert pair.experiment() == b


def test_L35_replacing_and_clearing_A_are_outside_the_history_of_B(pair: LabPage) -> None:
    b = pair.experiment()
    pair.page.get_by_role("button", name="Replace A with B").click()
    assert pair.stored()["a"] == b
    pair.page.get_by_role("button", name="Clear A").click()
    assert pair.stored()["a"] is None
    assert pair.experiment() == b
    pair.undo()
    assert (pair.experiment()["schedule"], pair.stored()["a"]) == ("sync", None)


def test_L36_an_A_B_link_filters_both_sides(lab: LabPage, open_lab: Any) -> None:
    lab.preset("scale")
    lab.step("Serving")
    lab.fill("RDMA device", "mlx5_a")
    lab.page.get_by_role("button", name="Save B as A").click()
    lab.fill("RDMA device", "mlx5_b")
    lab.fill("Concurrency", "64")
    lab.page.get_by_role("button", name="Share A / B").click()
    lab.page.wait_for_function("() => document.querySelector('[data-link]').dataset.link !== ''")
    link = lab.page.locator("[data-link]").get_attribute("data-link")
    assert "#compare=" in link
    assert "mlx5" not in base64.urlsafe_b64decode(link.partition("=")[2] + "==").decode()
    reader = open_lab()
    with reader.drawn():
        reader.page.evaluate("fragment => { location.hash = fragment }", link.partition("#")[2])
    reader.page.get_by_test_id("differences").wait_for()
    kept = reader.stored()
    assert (kept["experiment"]["concurrency"], kept["a"]["concurrency"]) == (64, 128)
    assert (kept["experiment"]["rdma_device"], kept["a"]["rdma_device"]) == ("", "")


def ask_for_pd(lab: LabPage) -> None:
    """PD on one colocated engine: nothing is left for prefill."""
    lab.step("Serving")
    lab.pick("Prefill and decode apart (PD)")
    lab.step("Launch")


def test_L40_repairs_stand_beside_the_export_only_when_pd_lacks_gpus_and_apply_nothing(lab: LabPage) -> None:
    lab.step("Launch")
    assert lab.page.get_by_test_id("pd-repairs").count() == 0
    ask_for_pd(lab)
    cards = lab.page.get_by_test_id("pd-repairs").get_by_test_id("repair")
    assert cards.count() >= 2
    text = cards.first.text_content()
    assert "GPUs after" in text
    assert "You still have to give" in text
    assert lab.experiment()["layout"] == "colocate"


def test_L41_sizes_come_from_the_recipe(lab: LabPage) -> None:
    ask_for_pd(lab)
    repairs = [repair for repair in lab.plan()["plan"]["repairs"] if repair["code"] == "pd_groups"]
    engine = lab.plan()["plan"]["layout"]["engine_gpus"]
    sizes = [repair["edit"] for repair in repairs if "rollout_gpus" in repair["edit"]]
    assert sizes
    for edit in sizes:
        assert edit["rollout_gpus"] % engine == 0
        assert edit["prefill_gpus"] % engine == 0
        assert edit["rollout_gpus"] >= 2 * engine
        assert edit["prefill_gpus"] < edit["rollout_gpus"]


def test_L42_one_repair_is_one_entry_and_one_undo(lab: LabPage) -> None:
    ask_for_pd(lab)
    before = lab.experiment()
    with lab.drawn():
        lab.page.get_by_test_id("pd-repairs").get_by_role("button", name="Apply").first.click()
    assert "pd_groups" not in lab.error_codes()
    assert lab.experiment() != before
    lab.undo()
    assert lab.experiment() == before


def test_L43_a_repair_invents_no_device_and_no_address(lab: LabPage) -> None:
    ask_for_pd(lab)
    with lab.drawn():
        lab.page.get_by_test_id("pd-repairs").get_by_role("button", name="Apply").first.click()
    after = lab.experiment()
    assert (after["rdma_device"], after["external_addrs"]) == ("", "")
    assert "pd_device" in lab.error_codes()


def test_L44_the_image_changes_the_hint_only(lab: LabPage) -> None:
    def scripts() -> Any:
        files = lab.ask("/api/export", {"experiment": lab.experiment()})["files"]
        return [line for line in files["experiment.sh"].splitlines() if not line.startswith("#")]

    before, plan = scripts(), lab.plan()["plan"]
    lab.step("Launch")
    with lab.drawn():
        lab.page.get_by_label("Installation image").select_option("gb10")
    assert "no claim of fit" in lab.page.locator("#panel").text_content()
    assert scripts() == before
    assert lab.plan()["plan"]["memory"] == plan["memory"]


def test_L45_sources_hashes_image_facts_and_what_is_missing_are_listed(lab: LabPage) -> None:
    section = lab.page.get_by_test_id("provenance")
    text = section.text_content()
    facts = lab.ask("/api/provenance", {"experiment": lab.experiment()})
    for wanted in (facts["recipe"]["sha256"], facts["model_config"]["sha256"], facts["images"]["label"], "static"):
        assert wanted in text
    missing = lab.page.get_by_test_id("missing").text_content()
    for fact in ("driver", "NCCL", "actual GPU type", "storage client"):
        assert fact in missing


def test_L46_hashes_are_of_the_real_files_and_a_dirty_build_is_flagged(lab: LabPage) -> None:
    facts = lab.ask("/api/provenance", {"experiment": lab.experiment()})
    real = hashlib.sha256((ROOT / "src/hotloop/experiment/catalog/models.toml").read_bytes()).hexdigest()
    assert facts["catalog"]["sha256"] == real
    assert (lab.page.get_by_test_id("dirty").count() == 1) is facts["dirty"]


def test_L47_the_same_provenance_on_the_page_in_the_json_and_in_the_shell(lab: LabPage) -> None:
    files = lab.ask("/api/export", {"experiment": lab.experiment()})["files"]
    facts = lab.ask("/api/provenance", {"experiment": lab.experiment()})
    assert json.loads(files["experiment.json"])["provenance"] == facts
    assert facts["recipe"]["commit"][:8] in files["experiment.sh"]
    assert facts["recipe"]["commit"] in lab.page.get_by_test_id("provenance").text_content()


def test_L48_the_scope_is_static_and_nothing_says_that_a_run_passed(lab: LabPage) -> None:
    document = json.loads(lab.ask("/api/export", {"experiment": lab.experiment()})["files"]["experiment.json"])
    assert document["validation"]["scope"] == "static"
    assert set(document["validation"]) == {"scope", "errors", "notes"}
    assert "No run on GPUs is implied" in lab.page.locator("#source").text_content()
