"""D01-D10 on the page: what follows an edit is part of the same undoable action."""

from __future__ import annotations

from lab_page import LabPage


def test_D01_async_while_colocated_moves_to_separate(lab: LabPage) -> None:
    before = lab.experiment()
    lab.step("Placement")
    lab.pick("Fully async")
    assert (lab.experiment()["schedule"], lab.experiment()["layout"]) == ("async", "separate")
    lab.undo()
    assert lab.experiment() == before


def test_D02_colocate_brings_sync_and_nccl(lab: LabPage) -> None:
    lab.step("Placement")
    lab.pick("Fully async")
    lab.step("Serving")
    lab.pick("Disk")
    before = lab.experiment()
    lab.step("Placement")
    lab.pick("Colocated")
    after = lab.experiment()
    assert (after["layout"], after["schedule"], after["transport"]) == ("colocate", "sync", "nccl")
    lab.undo()
    assert lab.experiment() == before


def test_D03_external_brings_disk(lab: LabPage) -> None:
    lab.step("Placement")
    lab.pick("External")
    assert lab.experiment()["transport"] == "disk"
    lab.undo()
    assert lab.experiment()["transport"] == "nccl"


def test_D04_another_model_resets_what_follows_its_recipe(lab: LabPage) -> None:
    lab.step("Placement")
    lab.fill("Trainer nodes", "4")
    lab.step("Launch")
    lab.fill("Saves", "/data/mine")
    before = lab.experiment()
    assert (before["nodes"], before["save_path"]) == (4, "/data/mine")
    lab.step("Model")
    lab.pick("GLM-4.7")
    after = lab.experiment()
    assert (after["nodes"], after["save_path"], lab.plan()["resolved"]["nodes"]) == (None, None, 8)
    lab.undo()
    assert lab.experiment() == before


def test_D05_a_dense_model_turns_r3_off(lab: LabPage) -> None:
    lab.step("Consistency")
    lab.pick("R3")
    lab.step("Model")
    lab.pick("GLM-4-9B (GLM-Z1-9B-0414)")
    assert lab.experiment()["r3"] is False
    lab.undo()
    assert lab.experiment()["r3"] is True


def test_D06_models_published_in_fp8_bring_it_and_glm5_its_kv_too(lab: LabPage) -> None:
    lab.pick("GLM-5.3")
    resolved = lab.plan()["resolved"]
    assert (resolved["precision"], resolved["kv_dtype"]) == ("fp8", "fp8")
    lab.pick("DeepSeek-R1")
    resolved = lab.plan()["resolved"]
    assert (resolved["precision"], resolved["kv_dtype"]) == ("fp8", "auto")


def test_D07_partial_off_turns_the_prefix_mask_off(lab: LabPage) -> None:
    lab.step("Consistency")
    lab.pick("Partial rollouts")
    lab.pick("Mask the old prefix")
    lab.pick("Partial rollouts")
    assert (lab.experiment()["partial"], lab.experiment()["mask_prefix"]) == (False, False)
    lab.undo()
    assert (lab.experiment()["partial"], lab.experiment()["mask_prefix"]) == (True, True)


def test_D08_other_conflicts_stay_visible_and_change_nothing(lab: LabPage) -> None:
    lab.step("Consistency")
    lab.pick("Mask the old prefix")
    assert "mask_partial" in lab.error_codes()
    assert lab.experiment()["partial"] is False


def test_D09_async_and_straw_have_distributed_producers_and_change_no_choice(lab: LabPage) -> None:
    lab.step("Placement")
    lab.pick("Fully async")
    before = lab.experiment()
    lab.step("Consistency")
    lab.pick("Persistent queue (straw)")
    assert {**before, "straw": True} == lab.experiment()
    assert "distributed producers" in lab.page.locator("#dg-loop").text_content()


def test_D10_pd_and_hicache_cache_on_the_prefill_group_only(lab: LabPage) -> None:
    lab.step("Placement")
    lab.pick("Separate")
    lab.fill("Rollout GPUs", "16")
    lab.step("Serving")
    lab.pick("Prefill and decode apart (PD)")
    lab.pick("HiCache")
    groups = {group["role"]: group["hicache"] for group in lab.plan()["plan"]["layout"]["groups"]}
    assert groups == {"prefill": True, "decode": False}
    assert "prefill group only" in lab.page.get_by_test_id("serve-hicache").text_content()
