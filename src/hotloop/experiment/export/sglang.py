"""The server groups of a prefill/decode deployment, as the YAML that slime's `--sglang-config` reads.

Owns: `build_server_groups` and `render_sglang_yaml`. Override keys are ServerArgs field names of the installed SGLang;
an unknown key would be dropped with one log line (slime 624b824a), so this writes only names that flags.json gives as
`server_args_field`.

Promises: the groups sum to the rollout GPUs, every group has the engine size, all share the model path of
`--hf-checkpoint` (none is named). HiCache goes to the prefill group only (D10). No user text enters the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hotloop.experiment.catalog.records import Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.slime import GPUS_PER_NODE, HICACHE_RATIO


def rollout_pool(choices: Experiment) -> int:
    """Return the GPUs that serve: the trainer's own when colocated."""
    if choices.layout == "colocate":
        return (choices.nodes or 0) * GPUS_PER_NODE
    return choices.rollout_gpus or 0


class ServerGroup(NamedTuple):
    """Engines of one role."""

    role: str
    gpus: int
    engine_gpus: int
    overrides: tuple[tuple[str, str], ...] = ()
    """ServerArgs field and its YAML value."""


def build_server_groups(choices: Experiment, recipe: Recipe) -> tuple[ServerGroup, ...]:
    """Return the groups of an experiment with `pd`.

    Args:
        choices: resolved.
        recipe: the effective one, for the engine size.
    """
    prefill = choices.prefill_gpus or 0
    cache: tuple[tuple[str, str], ...] = ()
    if choices.hicache:
        cache = (("enable_hierarchical_cache", "true"), ("hicache_ratio", str(HICACHE_RATIO)))
    return (
        ServerGroup("prefill", prefill, recipe.engine_gpus, cache),
        ServerGroup("decode", rollout_pool(choices) - prefill, recipe.engine_gpus),
    )


def render_sglang_yaml(groups: Sequence[ServerGroup]) -> str:
    """Return the file that `--sglang-config` reads."""
    lines = ["sglang:", "  - name: default", "    server_groups:"]
    for group in groups:
        lines += [
            f"      - worker_type: {group.role}",
            f"        num_gpus: {group.gpus}",
            f"        num_gpus_per_engine: {group.engine_gpus}",
        ]
        if group.overrides:
            lines.append("        overrides:")
            lines += [f"          {name}: {value}" for name, value in group.overrides]
    return "\n".join(lines) + "\n"
