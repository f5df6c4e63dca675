"""serving-reference.sh: the same engine without slime, for a look at it before the run or beside it.

Owns: `build_serving_rows` and `render_serving_reference`. The flags are the experiment's `--sglang-` flags without the
prefix, and what slime fills in by itself: model path, TP, trust, address, and the nodes of an engine over one node.

Promises: nothing of `not_in_serving_reference` is written (`--server-concurrency` stops a stock server, `--config`
means something else there). Names that SGLang 0.5.23 dropped are listed in the header with their new ones.

Source: flags of SGLang 0.5.15.post1 as slime 624b824a starts it.
"""

from __future__ import annotations

from hotloop.experiment.catalog.records import Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.shell import render_array, render_comment
from hotloop.experiment.export.slime import GPUS_PER_NODE, Row, build_train_groups
from hotloop.experiment.flags import load_flags, split_flags
from hotloop.experiment.resolve import effective_recipe

_PREFIX = "--sglang-"
_PD_ONLY = frozenset({"--sglang-disaggregation-transfer-backend", "--sglang-disaggregation-ib-device"})
"""Mean nothing without a prefill and a decode server; the reference is one regular server."""


def build_serving_rows(choices: Experiment, model: Model) -> list[Row]:
    """Return the flags of one engine that do not depend on where it runs.

    Args:
        choices: resolved.
    """
    table = load_flags()
    recipe = effective_recipe(choices, model)
    words = [word for group in build_train_groups(choices, model) for word in group.words]
    uses, _ = split_flags(words)
    last = {use.name: use for use in uses}
    pp_size = int(last["--sglang-pp-size"].values[0]) if "--sglang-pp-size" in last else 1
    rows: list[Row] = [
        ("--model-path", choices.hf_path or ""),
        ("--tp-size", str(recipe.engine_gpus // pp_size)),
        ("--trust-remote-code",),
    ]
    for name, use in last.items():
        if not name.startswith(_PREFIX) or name in table.not_in_serving or name in _PD_ONLY:
            continue
        rows.append(("--" + name.removeprefix(_PREFIX), *use.values))
    if choices.hicache and choices.pd:
        rows += [("--enable-hierarchical-cache",), ("--hicache-ratio", "2")]
    if choices.r3:
        rows.append(("--enable-return-routed-experts",))
    return rows


def count_engine_nodes(choices: Experiment, model: Model) -> int:
    """Return the nodes that one engine spans."""
    return -(-effective_recipe(choices, model).engine_gpus // GPUS_PER_NODE)


def render_serving_reference(choices: Experiment, model: Model, header: str) -> str:
    """Return the whole script.

    Args:
        choices: resolved.
        header: comment text shared with experiment.sh.
    """
    rows = build_serving_rows(choices, model)
    nodes = count_engine_nodes(choices, model)
    flags = load_flags().flags
    renamed = [
        f"  {row[0]} -> --{new.removeprefix(_PREFIX)}"
        for row in rows
        if (new := flags[name].replaced_by if (name := _PREFIX + row[0][2:]) in flags else "")
    ]
    notes = [f"One engine of {model.label} with the flags that slime gives it, for SGLang 0.5.15.post1."]
    if renamed:
        notes += ["SGLang 0.5.23 and later have other names for these flags; replace them there:", *renamed]
    if choices.pd:
        notes.append("slime splits this pool into prefill and decode engines; the reference is one regular engine.")
    if choices.layout == "external":
        notes.append("The engines must be up before the training job parses its arguments: it asks each for its size.")
    text = "#!/usr/bin/env bash\n" + render_comment(header + "\n" + "\n".join(notes)) + "set -euo pipefail\n\n"
    text += render_array("SERVER_ARGS", rows)
    text += 'SERVER_ARGS+=(--host "${SERVE_HOST:-0.0.0.0}" --port "${SERVE_PORT:-30000}")\n'
    if nodes > 1:
        text += _render_multi_node(nodes)
    text += '\nexec python3 -m sglang.launch_server "${SERVER_ARGS[@]}" "$@"\n'
    return text


def _render_multi_node(nodes: int) -> str:
    return f"""
# The engine spans {nodes} nodes: run this on each with its rank 0..{nodes - 1} and the address of rank 0.
if [[ -z "${{SERVE_MASTER_ADDR:-}}" ]]; then
  echo "serving-reference.sh: set SERVE_MASTER_ADDR to host:port of the node with rank 0" >&2
  exit 1
fi
if [[ ! "${{SERVE_NODE_RANK:-}}" =~ ^(0|[1-9][0-9]{{0,4}})$ ]] || ((SERVE_NODE_RANK >= {nodes})); then
  echo "serving-reference.sh: set SERVE_NODE_RANK to 0..{nodes - 1}, got '${{SERVE_NODE_RANK:-}}'" >&2
  exit 1
fi
SERVER_ARGS+=(--nnodes {nodes} --node-rank "$SERVE_NODE_RANK" --dist-init-addr "$SERVE_MASTER_ADDR")
"""
