"""The three layouts of a run: what each needs, and settings that the chosen one would not read."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError
from hotloop.experiment.load import load_experiment
from hotloop.experiment.presets import make_laptop_preset
from hotloop.loop.support import check_support

EXTERNAL = ["layout=external", "laptop.service_url=http://127.0.0.1:8800", "laptop.publish=/tmp/bucket"]


def codes(settings: list[str]) -> list[str]:
    experiment = load_experiment(None, settings, base=make_laptop_preset()).experiment
    try:
        check_support(experiment)
    except InputError as error:
        return [problem.code for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], []),
        (["layout=separate"], []),
        (["layout=separate", "laptop.replicas=2", "transport=delta"], []),
        (["layout=separate", "transport=disk"], []),
        (EXTERNAL, []),
        (["transport=delta"], ["colocate_transport"]),
        (["transport=disk"], ["colocate_transport"]),
        (["laptop.replicas=2"], ["setting_unused"]),
        ([*EXTERNAL, "laptop.replicas=2"], ["setting_unused"]),
        (["laptop.service_url=http://127.0.0.1:8800"], ["setting_unused"]),
        (["layout=separate", "laptop.service_url=http://127.0.0.1:8800"], ["setting_unused"]),
        (["layout=external"], ["external_address", "external_address"]),
        (EXTERNAL[:2], ["external_address"]),
    ],
)
def test_what_a_layout_needs(settings: list[str], expected: list[str]) -> None:
    assert codes(settings) == expected
