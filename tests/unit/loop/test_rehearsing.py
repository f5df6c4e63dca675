"""A cluster experiment's laptop form: command-line settings hold, and the account is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.experiment.load import Loaded, load_experiment
from hotloop.experiment.presets import PRESETS
from hotloop.experiment.rehearsal import Rehearsal
from hotloop.loop.rehearsing import describe_account, prepare_rehearsal, render_account
from hotloop.loop.support import check_support


def _rehearse(path: Path, text: str, settings: list[str]) -> tuple[Loaded, Rehearsal]:
    path.write_text(text)
    aliases = {"seed": "laptop.seed"}
    return prepare_rehearsal(load_experiment(path, settings, aliases=aliases), settings, aliases)


def test_a_setting_is_applied_last(tmp_path: Path) -> None:
    settings = ["rounds=3", "seed=5", "correction=icepop"]
    form, rehearsal = _rehearse(tmp_path / "e.toml", 'model = "flash"\nr3 = true\nrounds = 800\n', settings)
    assert (form.experiment.rounds, form.experiment.laptop.seed, form.experiment.correction) == (3, 5, "icepop")
    assert (form.experiment.laptop.policy, form.experiment.r3) == ("moe", True)
    assert ("rounds", 3) in [(choice.name, choice.value) for choice in rehearsal.kept]
    assert "rounds" not in [choice.name for choice in rehearsal.replaced]
    assert form.origin("optimizer.lr") == f"laptop form of {tmp_path / 'e.toml'}"


def test_what_is_not_rehearsed_stays_so_even_when_set(tmp_path: Path) -> None:
    form, rehearsal = _rehearse(tmp_path / "e.toml", 'model = "dense"\n', ["schedule=async", "layout=separate"])
    check_support(form.experiment)
    assert {"schedule"} <= {choice.name for choice in rehearsal.not_rehearsed}
    text = render_account(rehearsal)
    assert "not rehearsed:\n" in text and "  schedule = 'async' (the loop does not carry this out yet)" in text
    assert {"kept", "replaced", "not_rehearsed"} == set(describe_account(rehearsal))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_a_form_that_this_loop_carries_out(name: str) -> None:
    experiment = PRESETS[name]()
    if experiment.laptop.policy:
        check_support(experiment)
        return
    loaded = load_experiment(None, base=experiment, base_name=name)
    check_support(prepare_rehearsal(loaded, [], {})[0].experiment)
