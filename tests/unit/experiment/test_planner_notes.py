"""Notes of 4.3: each with an experiment that has it and a neighbour that does not; none blocks anything."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.choices import Experiment
from hotloop.experiment.plan import build_plan
from hotloop.experiment.rules import ResumeFacts, list_rules

Edit = dict[str, Any]
SEPARATE: Edit = {"layout": "separate"}
ASYNC: Edit = {"layout": "separate", "schedule": "async"}
STRAW: Edit = {"straw": True, "straw_dir": "/q", "straw_run_id": "r", "straw_declaration": "/d"}
EXTERNAL: Edit = {"layout": "external", "transport": "disk", "weight_dir": "/w", "external_addrs": "a:1"}

CASES: list[tuple[str, Edit, Edit]] = [
    ("external_api", EXTERNAL, {"layout": "separate"}),
    ("straw_storage", STRAW, {"straw": False}),
    ("partial_mixes", {"partial": True}, {"partial": False}),
    ("async_age", ASYNC, {"schedule": "sync"}),
    ("no_correction", {**ASYNC, "correction": "none"}, {"correction": "tis"}),
    ("no_correction", {"precision": "fp8", "correction": "none"}, {"precision": "bf16"}),
    ("hybrid_kernels", {"model": "qwen38"}, {"model": "dense"}),
    ("hybrid_pool", {"model": "qwen38"}, {"model": "dense"}),
    ("sc_objective", {"sc": True}, {"sc": False}),
    ("hicache_host", {"hicache": True}, {"hicache": False}),
    ("eagle_limit", {"eagle": "builtin"}, {"concurrency": 48}),
    ("eagle_acceptance", {"eagle": "builtin"}, {"eagle": "off"}),
    ("prefill_chunk", {"model": "glm5"}, {"model": "deepseek"}),
    ("deterministic_engine", {"deterministic": True}, {"deterministic": False}),
    ("cpu_adam_host", {}, {"cpu_adam": False}),
    ("recompute_off", {"recompute": False}, {"recompute": True}),
    ("fp8_training", {"precision": "fp8train"}, {"precision": "fp8"}),
    ("int4_beta", {"precision": "int4"}, {"precision": "bf16"}),
    ("short_run", {"rounds": 19}, {"rounds": 20}),
    ("short_run", {"rounds": 3}, STRAW),
    ("deepscaler_tag", {}, {"reward": {"kind": "math"}}),
    ("async_requeue", {**ASYNC, "slime_target": "624b824a"}, {"slime_target": "v0.4.0"}),
    ("async_requeue", {**ASYNC, "slime_target": "624b824a"}, {"partial": True}),
    ("kv_capacity", {"model": "qwen38"}, {"concurrency": 16}),
    ("memory_tight", {"cpu_adam": False}, {"nodes": 2}),
    ("staleness_bound", {"max_staleness": 1}, {"max_staleness": None}),
    ("rollout_gpus_unused", {"rollout_gpus": 16}, {"layout": "separate"}),
    ("choice_unused", {"ssm_ratio": 0.5}, {"model": "qwen38"}),
    ("choice_unused", {"prefill_gpus": 8}, {"pd": True}),
    ("choice_unused", {"weight_dir": "/w"}, {"layout": "separate", "transport": "disk"}),
    ("choice_unused", {"eval_data": "/e.jsonl"}, {"eval_mode": "inline"}),
    ("rates_unknown", {"model": "qwen2.5-0.5b", "gpu": "gb10"}, {"gpu": "h100"}),
    ("resume_unread", {"resume_from": "/out"}, {"resume_from": ""}),
]


def note_codes(edit: Edit) -> set[str]:
    return {note.code for note in build_plan(Experiment.model_validate(edit)).notes}


@pytest.mark.parametrize(("code", "having", "neighbour"), CASES, ids=[case[0] for case in CASES])
def test_a_note_appears_with_its_cause_and_not_beside_it(code: str, having: Edit, neighbour: Edit) -> None:
    assert code in note_codes(having)
    assert code not in note_codes({**having, **neighbour})


def test_every_note_rule_has_a_case() -> None:
    covered = {case[0] for case in CASES} | {"resume_without_tracker"}
    assert {rule.code for rule in list_rules() if not rule.is_error} == covered


def test_notes_block_nothing() -> None:
    for _, having, _ in CASES:
        plan = build_plan(Experiment.model_validate(having))
        assert not {error.code for error in plan.errors} & {note.code for note in plan.notes}


def test_the_prefill_chunk_is_the_default_divided_by_dp_attention() -> None:
    # experiment.md 2: 8192 on an 80 GB GPU becomes 128 (glm5); 131072 leaves 2048.
    message = next(note.message for note in build_plan(Experiment(model="glm5")).notes if note.code == "prefill_chunk")
    assert "128 tokens per rank" in message
    asked = Experiment.model_validate(
        {"model": "glm5", "export": {"slime_args": ["--sglang-chunked-prefill-size", "131072"]}}
    )
    assert "prefill_chunk" not in {note.code for note in build_plan(asked).notes}


def test_hicache_names_the_flag_that_frees_it_when_colocated() -> None:
    colocated = next(n.message for n in build_plan(Experiment(hicache=True)).notes if n.code == "hicache_host")
    assert "--sglang-release-hicache" in colocated
    separate = Experiment(layout="separate", hicache=True)
    assert "--sglang-release-hicache" not in next(
        n.message for n in build_plan(separate).notes if n.code == "hicache_host"
    )


def test_x06_1_latest_2_of_3_rounds_runs_nothing() -> None:
    plan = build_plan(Experiment(resume_from="/out", rounds=3), resume=ResumeFacts(2))
    assert plan.resume is not None
    assert (plan.resume.first_round, plan.resume.rounds_to_run) == (3, 0)
    assert [error.code for error in plan.errors] == ["resume_runs_nothing"]
    assert [dict(repair.edit) for repair in plan.repairs] == [{"rounds": 4}]


def test_x06_1_k_more_rounds_set_the_absolute_end() -> None:
    plan = build_plan(Experiment(resume_from="/out", rounds_more=5), resume=ResumeFacts(2))
    assert plan.errors == ()
    assert plan.resume is not None
    assert (plan.resume.num_rounds, plan.resume.rounds_to_run) == (8, 5)


def test_x06_example_of_a_stopped_run() -> None:
    # loop.md 5: interval 20, num_rollout 100, stopped in round 57: resume at 40, 60 rounds left; saves 59, 79, 99.
    plan = build_plan(Experiment(resume_from="/out", rounds=100), resume=ResumeFacts(39))
    assert plan.resume is not None
    assert (plan.resume.first_round, plan.resume.rounds_to_run) == (40, 60)
    assert plan.resume.saves == (59, 79, 99)
    assert plan.resume.prompts_consumed == 320


def test_x06_2_a_folder_without_a_tracker_starts_afresh_and_says_so() -> None:
    plan = build_plan(Experiment(resume_from="/out"), resume=ResumeFacts(None))
    assert plan.resume is not None and plan.resume.first_round == 0
    message = next(note.message for note in plan.notes if note.code == "resume_without_tracker")
    assert "fresh optimizer" in message and "round 0" in message


def test_x06_3_a_changed_batch_moves_the_horizon_and_changed_sizes_may_differ() -> None:
    before = Experiment(model="flash", rounds=100)
    after = Experiment.model_validate(
        {
            "nodes": 2, "rounds": 100, "resume_from": "/out", "sampling": {"num_groups": 16},
            "export": {"slime_args": ["--tensor-model-parallel-size", "4"]},
        }
    )  # fmt: skip
    notes = {
        n.fields[0]: n for n in build_plan(after, resume=ResumeFacts(39, before)).notes if n.code.startswith("resume_")
    }
    assert notes["sampling.num_groups"].code == "resume_horizon"
    assert "8 -> 16" in notes["sampling.num_groups"].message
    assert notes["nodes"].code == "resume_parallel"
    assert notes["tp"].code == "resume_parallel"
    assert "2 -> 4" in notes["tp"].message


def test_x06_3_an_equal_experiment_has_no_difference() -> None:
    before = Experiment(rounds=40)
    after = Experiment(rounds=100, resume_from="/out")
    assert not [n for n in build_plan(after, resume=ResumeFacts(39, before)).notes if n.code.startswith("resume_")]


def test_the_cpu_optimizer_is_named_even_where_another_node_needs_more() -> None:
    edit = {"layout": "separate", "hicache": True}
    plan = build_plan(Experiment.model_validate(edit))
    assert {row.item for row in plan.memory if row.phase == "host"} == {"HiCache"}
    message = next(note.message for note in plan.notes if note.code == "cpu_adam_host")
    assert "the optimizer takes 336 GiB" in message
    assert plan.memory_plan.cpu_optimizer_bytes == build_plan(Experiment()).memory_plan.cpu_optimizer_bytes
