"""Propose what a model without a recipe needs, and turn a Hugging Face config into a catalogue table.

Owns: `propose_recipe` (parallel sizes from an architecture), `propose_convert`, and `propose_entry`, the TOML text
of `hotloop catalog add config.json`.

Promises: proposed sizes divide (the grids, the stages, the heads) and leave room by the planner's own byte counts;
each carries `our proposal` as its source. Does not do: read files (the command does), vouch for a model's training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hotloop.errors import InputError
from hotloop.experiment.catalog.hf_arch import get_published_precision, has_mtp_head, parse_arch
from hotloop.experiment.catalog.records import Arch, Convert, Recipe

_STATIC_BYTES = 40 * 10**9
"""Weights and gradients that a proposal allows on an 80 GB GPU; the rest is for activations, logits and optimizer."""
_ENGINE_BYTES = 28 * 10**9
"""Serving weights that a proposal allows on an 80 GB GPU: half of a pool of 0.7."""
_SOURCE = "our proposal from the architecture; not a published recipe"


def _largest_power_of_two(limit: int, divides: int) -> int:
    size = 1
    while size * 2 <= limit and divides % (size * 2) == 0:
        size *= 2
    return size


def propose_recipe(arch: Arch) -> Recipe:
    """Choose parallel sizes for 80 GB GPUs, the fewest nodes first, then the fewest pipeline stages."""
    total = arch.params_total
    wanted_tp = 1 if total < 2e9 else 2 if total < 12e9 else 4 if total < 40e9 else 8
    tp = _largest_power_of_two(wanted_tp, arch.attention_heads)
    dense = total - arch.params_expert
    chosen = (64, 1, 1)
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        found = None
        for pp in (1, 2, 4, 8, 16):
            gpus = nodes * 8
            middle = -(-arch.layers // pp)
            if gpus % (tp * pp) or arch.layers - middle * (pp - 1) < 1:
                continue
            ep = _largest_power_of_two(gpus // pp, arch.experts) if arch.moe else 1
            if 6 * (dense // (tp * pp) + arch.params_expert // (ep * pp)) <= _STATIC_BYTES:
                found = (nodes, pp, ep)
                break
        if found:
            chosen = found
            break
    nodes, pp, ep = chosen
    middle = -(-arch.layers // pp)
    last = arch.layers - middle * (pp - 1)
    engine = 1
    while 2 * total / engine > _ENGINE_BYTES and engine < nodes * 8:
        engine *= 2
    if arch.moe:
        engine = max(engine, min(8, nodes * 8))
    return Recipe(
        nodes=nodes,
        tp=tp,
        pp=pp,
        cp=1,
        ep=ep,
        etp=1,
        last_stage_layers=last if pp > 1 and last != middle else 0,
        engine_gpus=engine,
        engine_dp=engine if arch.is_mla else 1,
        engine_ep=engine if arch.moe and engine > 8 else 1,
        max_tokens_per_gpu=8192,
        cpu_adam=arch.moe or total > 20e9,
        source=_SOURCE,
    )


def propose_convert(arch: Arch, recipe: Recipe) -> Convert:
    """Choose the converter's processes: one node, and never more processes than layers."""
    processes = 1 if arch.params_total < 10e9 else _largest_power_of_two(min(8, arch.layers), 8)
    nodes = max(1, recipe.nodes // 8)
    return Convert(nodes=nodes, processes_per_node=processes, auto_pp=processes > 1, source=_SOURCE)


_SKIPPED = ("extra",)


def _render_value(value: object) -> str:
    """Write a TOML value; JSON's text form is one for the kinds that a catalogue holds."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _render_table(record: Arch | Recipe | Convert) -> list[str]:
    """Write the fields of a record that differ from their defaults, or have none."""
    lines = []
    defaults = record._field_defaults
    for name, value in record._asdict().items():
        if name in _SKIPPED or (name in defaults and value == defaults[name]):
            continue
        lines.append(f"{name} = {_render_value(value)}")
    return lines


def propose_entry(model_id: str, config: Mapping[str, Any], hf_repo: str, model_script: str = "") -> str:
    """Write a catalogue table for a Hugging Face config, with parallel sizes proposed.

    Args:
        model_id: name of the table. hf_repo: `owner/name`. model_script: slime's script of the model; without one it
        can
            be served and rehearsed, not exported for training.
    Raises: InputError `config_unsupported` or `catalog_entry` (a name that is no name).
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", model_id):
        why = "must be 1 to 64 letters, digits, dots, dashes or underscores"
        raise InputError("catalog_entry", why, where=f"model name {model_id!r}", do="Choose another name.")
    arch = parse_arch(config)
    recipe = propose_recipe(arch)
    head = {
        "label": hf_repo.rsplit("/", 1)[-1],
        "hf_repo": hf_repo,
        "published_precision": get_published_precision(config),
        "has_mtp": has_mtp_head(config),
        "source": f"config.json of {hf_repo}",
        "notes": ["Parallel sizes are proposed from the dimensions; nobody has trained with them."],
    }
    head |= {"model_script": model_script} if model_script else {"rollout_only": True}
    lines = [f'[models."{model_id}"]', *(f"{name} = {_render_value(value)}" for name, value in head.items())]
    for name, record in (("arch", arch), ("recipe", recipe), ("convert", propose_convert(arch, recipe))):
        lines += ["", f'[models."{model_id}".{name}]', *_render_table(record)]
    return "\n".join(lines) + "\n"
