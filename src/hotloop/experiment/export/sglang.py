"""The server groups of a prefill/decode deployment, as the YAML that slime's `--sglang-config` reads.

Owns: `render_sglang_yaml`. Override keys are ServerArgs field names of the installed SGLang; an unknown key would be
dropped with one log line (slime 624b824a), so this writes only names that flags.json gives as `server_args_field`.

Promises: the groups sum to the rollout GPUs, every group has the engine size, all share the model path of
`--hf-checkpoint` (none is named). HiCache goes to the prefill group only (D10). No user text enters the file.
"""

from __future__ import annotations

from hotloop.experiment.catalog.records import Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.slime import GPUS_PER_NODE, HICACHE_RATIO


def rollout_pool(choices: Experiment) -> int:
    """Return the GPUs that serve: the trainer's own when colocated."""
    if choices.layout == "colocate":
        return (choices.nodes or 0) * GPUS_PER_NODE
    return choices.rollout_gpus or 0


def render_sglang_yaml(choices: Experiment, recipe: Recipe) -> str:
    """Return the file for an experiment with `pd`.

    Args:
        choices: resolved.
        recipe: the effective one, for the engine size.
    """
    prefill = choices.prefill_gpus or 0
    lines = ["sglang:", "  - name: default", "    server_groups:"]
    for role, gpus in (("prefill", prefill), ("decode", rollout_pool(choices) - prefill)):
        lines += [
            f"      - worker_type: {role}",
            f"        num_gpus: {gpus}",
            f"        num_gpus_per_engine: {recipe.engine_gpus}",
        ]
        if role == "prefill" and choices.hicache:
            lines += [
                "        overrides:",
                "          enable_hierarchical_cache: true",
                f"          hicache_ratio: {HICACHE_RATIO}",
            ]
    return "\n".join(lines) + "\n"
