"""Properties of the planner over drawn experiments: totality, monotone memory, repairs that help."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.experiment.apply import apply, apply_edit
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import compute_layout, compute_zigzag_chunks
from hotloop.experiment.memory import compute_memory
from hotloop.experiment.plan import build_plan
from hotloop.experiment.repairs import PROTECTED
from hotloop.experiment.resolve import resolve

CATALOG = load_catalog()
MODELS = sorted(CATALOG.models)
ONOFF = st.booleans()

CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(MODELS),
        "slime_target": st.sampled_from(["v0.4.0", "624b824a"]),
        "layout": st.sampled_from(["colocate", "separate", "external"]),
        "schedule": st.sampled_from(["sync", "async"]),
        "nodes": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32, 64]),
        "rollout_gpus": st.sampled_from([1, 2, 8, 12, 16, 32, 64, 128]),
        "precision": st.sampled_from(["bf16", "fp8", "fp8train", "int4"]),
        "kv_dtype": st.sampled_from(["auto", "fp8"]),
        "ssm_ratio": st.sampled_from([None, 0.0, 0.5, 2.0]),
        "correction": st.sampled_from(["tis", "none", "icepop"]),
        "r3": ONOFF,
        "sc": ONOFF,
        "deterministic": ONOFF,
        "pd": ONOFF,
        "prefill_gpus": st.sampled_from([1, 4, 8, 16, 64]),
        "rdma_device": st.sampled_from(["", "mlx5_0"]),
        "hicache": ONOFF,
        "eagle": st.sampled_from(["off", "builtin", "external"]),
        "transport": st.sampled_from(["nccl", "disk", "delta"]),
        "weight_dir": st.sampled_from(["", "/w"]),
        "partial": ONOFF,
        "mask_prefix": ONOFF,
        "cpu_adam": ONOFF,
        "recompute": ONOFF,
        "concurrency": st.sampled_from([1, 16, 128, 1024]),
        "response_tokens": st.sampled_from([1, 4096, 16384, 131072]),
        "gpu": st.sampled_from(sorted(CATALOG.gpus)),
        "max_staleness": st.sampled_from([None, 0, 1, 4]),
        "eval_mode": st.sampled_from(["off", "inline", "side"]),
        "rounds": st.sampled_from([0, 1, 3, 100]),
        "sampling": st.fixed_dictionaries(
            {}, optional={"num_groups": st.sampled_from([1, 8, 100]), "group_size": st.sampled_from([1, 2, 8])}
        ),
    },
)


def make(values: dict[str, Any]) -> Experiment:
    return Experiment.model_validate(values)


@settings(max_examples=150, deadline=None)
@given(CHOICES)
def test_every_experiment_has_a_plan_whose_rows_add_up(values: dict[str, Any]) -> None:
    plan = build_plan(make(values))
    for total in plan.memory_plan.totals:
        assert sum(row.bytes for row in plan.memory if row.phase == total.phase) == total.bytes
    assert plan.resolved == resolve(plan.resolved)
    assert ("memory" in {error.code for error in plan.errors}) == (plan.verdict == "over")


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_every_repair_removes_errors_adds_none_and_leaves_protected_choices(values: dict[str, Any]) -> None:
    plan = build_plan(make(values))
    before = [error.code for error in plan.errors]
    for repair in plan.repairs:
        applied = apply_edit(plan.experiment, repair.edit)
        after = [error.code for error in build_plan(applied.experiment).errors]
        assert len(after) < len(before)
        assert set(after) < set(before)
        assert not {change.field for change in (*applied.edited, *applied.followed)} & PROTECTED
        assert applied.experiment.model == plan.experiment.model
        assert resolve(applied.experiment).precision == plan.resolved.precision


@settings(max_examples=60, deadline=None)
@given(CHOICES, st.sampled_from(["cpu_adam", "recompute"]))
def test_cpu_adam_and_recompute_never_raise_training_memory(values: dict[str, Any], choice: str) -> None:
    off = compute_memory(make({**values, choice: False}), with_lever=False)
    on = compute_memory(make({**values, choice: True}), with_lever=False)
    assert on.total("train").bytes <= off.total("train").bytes
    assert all(a <= b for a, b in zip(on.stage_bytes, off.stage_bytes, strict=True))


def _with(model: str, flag: str, size: int) -> dict[str, int]:
    words = [flag, str(size), "--pipeline-model-parallel-size", "1"]
    words += ["--decoder-last-pipeline-num-layers", "0", "--decoder-first-pipeline-num-layers", "0"]
    experiment = make({"model": model, "nodes": 64, "export": {"slime_args": words}, "cpu_adam": False})
    rows = compute_memory(experiment, with_lever=False).rows
    return {row.item: row.bytes for row in rows if row.phase == "train"}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(["--tensor-model-parallel-size", "--context-parallel-size"]),
    st.sampled_from([1, 2, 4]),
)
def test_more_tp_or_cp_never_raises_the_rows_that_they_act_on(model: str, flag: str, size: int) -> None:
    small, large = _with(model, flag, size), _with(model, flag, 2 * size)
    acted_on = ["weights", "gradients", "activations", "logits"]
    if flag == "--context-parallel-size":
        # CP leaves the tokens on a GPU and the parameters as they are; the optimizer is sharded over DP x CP.
        acted_on.append("optimizer")
    for item in acted_on:
        assert large[item] <= small[item], item


@settings(max_examples=60, deadline=None)
@given(CHOICES, CHOICES)
def test_an_edit_sets_what_it_names(values: dict[str, Any], edit: dict[str, Any]) -> None:
    after = apply(make(values), edit)
    for name, value in edit.items():
        if name == "sampling":
            continue
        assert getattr(after, name) == value


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
def test_ranks_are_a_bijection_onto_both_grids(model: str, nodes: int) -> None:
    layout = compute_layout(Experiment(model=model, nodes=nodes))
    if not layout.gpus:
        assert not layout.is_whole
        return
    ranks = [gpu for gpu in layout.gpus if gpu.rank >= 0]
    assert len({(g.tp, g.cp, g.dp, g.pp) for g in ranks}) == layout.train_gpus
    assert layout.tp * layout.cp * layout.dp * layout.pp == layout.train_gpus
    assert layout.etp * layout.ep * layout.edp * layout.pp == layout.train_gpus
    assert all(g.ep < layout.ep and g.edp < layout.edp for g in ranks)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 16))
def test_zigzag_chunks_cover_every_token_once(length: int, cp: int) -> None:
    covered = sorted(r for rank in compute_zigzag_chunks(length, cp) for r in rank if r[0] < r[1])
    assert covered[0][0] == 0 and covered[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(covered))
