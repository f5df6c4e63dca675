"""Rows L30-L36, the model's side: A is fixed, B is edited, differences are taken after the recipe."""

from __future__ import annotations

from hotloop.experiment.apply import apply
from hotloop.experiment.catalog.load import load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.compare import Comparison, compare_experiments, find_differences
from hotloop.experiment.export.bundle import build_bundle
from hotloop.experiment.plan import build_plan
from hotloop.experiment.provenance import BuildInfo

BUILD = BuildInfo("c" * 40, False)


def test_l30_a_is_fixed_while_b_is_edited() -> None:
    first = Experiment(rounds=5)
    state = Comparison(first).save()
    state = state.edit(apply(state.b, {"model": "glm5"})).edit(apply(state.b, {"rounds": 9}))
    assert state.a == Experiment(rounds=5)
    assert state.b.rounds == 9


def test_l31_differences_include_what_a_dependency_rule_changed() -> None:
    a = Experiment(layout="separate", schedule="async", transport="delta")
    b = apply(a, {"layout": "colocate"})
    found = {difference.field: (difference.a, difference.b) for difference in find_differences(a, b)}
    assert found["layout"] == ("separate", "colocate")
    assert found["schedule"] == ("async", "sync")
    assert found["transport"] == ("delta", "nccl")


def test_l31_differences_include_what_the_recipe_fills_in_and_say_so() -> None:
    found = {entry.field: entry for entry in find_differences(Experiment(), Experiment(model="glm5"))}
    assert (found["nodes"].a, found["nodes"].b) == (1, 32)
    assert found["nodes"].is_followed
    assert not found["model"].is_followed
    chosen = {entry.field: entry for entry in find_differences(Experiment(), Experiment(nodes=2))}
    assert not chosen["nodes"].is_followed


def test_equal_experiments_have_no_difference() -> None:
    assert find_differences(Experiment(nodes=1), Experiment()) == ()


def test_a_section_of_another_kind_differs_key_by_key() -> None:
    a = Experiment.model_validate({"algorithm": {"kind": "reinforce_plus_plus", "gamma": 0.9}})
    found = {entry.field: (entry.a, entry.b) for entry in find_differences(a, Experiment())}
    assert found["algorithm.kind"] == ("reinforce_plus_plus", "grpo")
    assert found["algorithm.gamma"] == (0.9, None)


def test_l32_each_side_has_its_own_errors_and_notes() -> None:
    report = compare_experiments(Experiment(model="glm47", nodes=3), Experiment(rounds=30))
    assert "train_grid" in report.a.errors
    assert report.b.errors == ()
    assert "short_run" in report.a.notes
    assert "short_run" not in report.b.notes
    assert report.a.gpus["train"] == 24


def test_l33_the_export_is_always_b_s() -> None:
    catalog = load_catalog()
    state = Comparison(Experiment(rounds=5)).save().edit(Experiment(rounds=7))

    def export(experiment: Experiment) -> dict[str, str]:
        return dict(build_bundle(build_plan(experiment, catalog=catalog), catalog, BUILD).files)

    assert export(state.b) == export(Experiment(rounds=7))
    assert export(state.b) != export(state.a or state.b)


def test_l34_restoring_a_puts_it_into_b_and_keeps_it() -> None:
    state = Comparison(Experiment(rounds=5)).save().edit(Experiment(rounds=7)).restore()
    assert state.b == state.a == Experiment(rounds=5)
    alone = Comparison(Experiment(rounds=7))
    assert alone.restore() == alone


def test_l35_replacing_or_clearing_a_leaves_b_alone() -> None:
    state = Comparison(Experiment(rounds=5)).save().edit(Experiment(rounds=7))
    assert state.save() == Comparison(Experiment(rounds=7), Experiment(rounds=7))
    assert state.clear() == Comparison(Experiment(rounds=7))
