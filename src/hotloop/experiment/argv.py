"""What slime's parsers see of an experiment: the final vector, its environment, and how the parsers read it.

Owns: `Launch`, `build_launch`, and `View`, which reads a vector as the parsers do: the last of a repeated flag counts.

Promises: pure. A value of the wrong type reads as the default, because the flag check reports it already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hotloop.experiment.catalog.records import Gpu, Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.sglang import ServerGroup, build_server_groups
from hotloop.experiment.export.slime import build_environment, build_train_argv, is_glm5
from hotloop.experiment.flags import FlagUse, split_flags
from hotloop.experiment.resolve import effective_recipe


class Launch(NamedTuple):
    """What slime's parsers see."""

    argv: tuple[str, ...]
    """After the script's name and MODEL_ARGS."""
    environment: Mapping[str, str]
    server_groups: tuple[ServerGroup, ...] = ()
    """What the file of `--sglang-config` holds, empty without one."""
    has_allgather_cp: bool = False
    """MODEL_ARGS carry `--allgather-cp`."""
    is_sparse_attention: bool = False
    """The architecture is DeepseekV32 or GlmMoeDsa."""
    is_blackwell: bool = False
    slime_target: str = "v0.4.0"


class View:
    """Last-one-wins reading of a vector."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        uses, _ = split_flags(launch.argv)
        self._last: dict[str, FlagUse] = {use.name: use for use in uses}

    def has(self, name: str) -> bool:
        return name in self._last

    def text(self, name: str) -> str | None:
        use = self._last.get(name)
        return use.values[0] if use and use.values else None

    def number(self, name: str, default: float | None = None) -> float | None:
        """A value that is no number is the flag check's finding; here it counts as the default."""
        text = self.text(name)
        if text is None:
            return default
        try:
            return float(text)
        except ValueError:
            return default

    def count(self, name: str, default: int) -> int:
        return int(self.number(name, default) or 0)

    def first_count(self, names: tuple[str, ...], default: int) -> int:
        """Value of a flag with several spellings."""
        return next((self.count(name, default) for name in names if self.has(name)), default)


def build_launch(choices: Experiment, model: Model, gpu: Gpu | None = None) -> Launch:
    """Return what slime's parsers would see.

    Args:
        choices: resolved.
        gpu: decides the rule on device connections; None is taken as a GPU before Blackwell.
    """
    return Launch(
        argv=tuple(build_train_argv(choices, model)),
        environment=build_environment(choices),
        server_groups=build_server_groups(choices, effective_recipe(choices, model)) if choices.pd else (),
        has_allgather_cp=model.recipe.cp_layout == "allgather",
        is_sparse_attention=is_glm5(model),
        is_blackwell=bool(gpu and gpu.is_blackwell),
        slime_target=choices.slime_target,
    )
