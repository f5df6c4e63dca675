"""The two subcommands that make what a run reads: `prepare` (downloads and copies) and `convert` (trainer checkpoint).

Owns: `choose_folders`, `render_prepare`, `render_convert`, `build_convert_rows`.

Promises: an FP8-published model keeps its download in a directory of its own, is cast to BF16 beside it, and the copy's
config loses the quantisation block. A copy is marked when it is whole, so a second `prepare` goes on where the first
one stopped. The converter's world never has more processes than the model has layers (the catalogue's test).

Source: slime 624b824a, tools/ and docs/en/examples.
"""

from __future__ import annotations

import posixpath
from typing import NamedTuple

from hotloop.experiment.catalog.records import Catalog, Convert, Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.shell import join_words, quote, render_array
from hotloop.experiment.export.slime import Row, strip_slice

_DATA_FILES = {
    "dapo-math-17k/dapo-math-17k.jsonl": "math_train",
    "aime-2024/aime-2024.jsonl": "math_eval",
}
"""Ends of paths that name a published data set, and its key in the catalogue."""

_INT4_GROUP = 128
_INT4_GROUP_KIMI = 32
"""Group sizes of slime's INT4 scripts (624b824a)."""


class ModelFolders(NamedTuple):
    """The three directories that a model may need."""

    source: str
    """What is downloaded, in the published precision."""
    bf16: str
    """What the converter reads."""
    serving: str
    """`--hf-checkpoint`."""


def choose_folders(choices: Experiment, model: Model) -> ModelFolders:
    """Name the model's directories from the serving one: `X` as published, `X-BF16`, `X-FP8`, `X-INT4` beside it.

    Args:
        choices: resolved.
    """
    serving = choices.hf_path or ""
    wanted = "fp8" if choices.precision == "fp8train" else choices.precision or "bf16"
    base = serving.rstrip("/") or serving
    if wanted == model.published_precision:
        source = serving
    else:
        suffix = f"-{wanted.upper()}"
        source = base.removesuffix(suffix) if base.endswith(suffix) else f"{base}-source"
    if model.published_precision == "bf16":
        bf16 = source
    else:
        bf16 = serving if wanted == "bf16" else f"{source.rstrip('/') or source}-BF16"
    return ModelFolders(source, bf16, serving)


def render_prepare(choices: Experiment, model: Model, catalog: Catalog) -> str:
    folders = choose_folders(choices, model)
    wanted = "fp8" if choices.precision == "fp8train" else choices.precision
    lines = [f'  download {quote(model.hf_repo)} --local-dir "$SOURCE_DIR"']
    helpers = ""
    if model.published_precision == "fp8":
        helpers = _CAST_HELPERS
        lines.append('  make_once "$BF16_DIR" cast_to_bf16')
    if folders.serving not in (folders.source, folders.bf16):
        if wanted == "int4":
            group = _INT4_GROUP_KIMI if "kimi" in model.id else _INT4_GROUP
            command = 'python tools/convert_hf_to_int4_direct.py --model-dir "$BF16_DIR" --save-dir "$SERVING_DIR"'
            command += f" --group-size {group}"
        else:
            command = 'python tools/convert_hf_to_fp8.py --model-dir "$BF16_DIR" --save-dir "$SERVING_DIR"'
            command += " --strategy block --block-size 128 128 --max-workers 4"
        lines.append(f'  make_once "$SERVING_DIR" {command}')
    if len(lines) > 1:
        lines.insert(0, "  enter_slime")
    lines += _data_lines(choices, catalog)
    return helpers + "prepare() {\n" + "\n".join(lines) + "\n}\n"


_CAST_HELPERS = """\
# The published weights are FP8 blocks; the trainer reads BF16, without the quantisation block in the config.
cast_to_bf16() {
  # tools/fp8_cast_bf16.py copies files through a shell, so it can only take plain paths.
  if [[ "$SOURCE_DIR$BF16_DIR" == *[!A-Za-z0-9_@%+=:,./-]* ]]; then
    fail "the cast needs model paths of letters, digits and ._-/ only: $SOURCE_DIR and $BF16_DIR"
  fi
  python tools/fp8_cast_bf16.py --input-fp8-hf-path "$SOURCE_DIR" --output-bf16-hf-path "$BF16_DIR"
  python - "$BF16_DIR/config.json" <<'PYTHON'
import json
import sys

path = sys.argv[1]
with open(path, encoding="utf-8") as file:
    config = json.load(file)
config.pop("quantization_config", None)
with open(path, "w", encoding="utf-8") as file:
    json.dump(config, file, indent=2)
PYTHON
}

"""


def _data_lines(choices: Experiment, catalog: Catalog) -> list[str]:
    lines = []
    if choices.task == "math":
        lines.append(_data_line(strip_slice(choices.data_path or ""), catalog, "the prompts"))
    if choices.eval_mode != "off" and choices.eval_data:
        lines.append(_data_line(strip_slice(choices.eval_data), catalog, "the evaluation prompts"))
    return lines


def _data_line(path: str, catalog: Catalog, what: str) -> str:
    for ending, key in _DATA_FILES.items():
        if path.endswith("/" + ending):
            words = [str(catalog.data[key]), "--local-dir", posixpath.dirname(path)]
            return f"  download --repo-type dataset {join_words(words)}"
    return f"  printf 'not downloaded: %s are your own file %s\\n' {quote(what)} {quote(path)}"


def render_convert(choices: Experiment, model: Model) -> str:
    convert = model.convert
    launch = f"python -m torch.distributed.run --nproc-per-node {convert.processes_per_node} \\\n"
    checks = ""
    if convert.nodes > 1:
        last = convert.nodes - 1
        checks = f"""  if [[ -z "${{CONVERT_MASTER_ADDR:-}}" ]]; then
    fail "convert runs on {convert.nodes} nodes: set CONVERT_MASTER_ADDR to the address of the node with rank 0"
  fi
  if [[ ! "${{CONVERT_NODE_RANK:-}}" =~ ^(0|[1-9][0-9]{{0,4}})$ ]] || ((CONVERT_NODE_RANK > {last})); then
    fail "convert runs on {convert.nodes} nodes: set CONVERT_NODE_RANK to 0..{last}, got '${{CONVERT_NODE_RANK:-}}'"
  fi
"""
        launch += (
            f'    --nnodes {convert.nodes} --node-rank "$CONVERT_NODE_RANK" \\\n'
            '    --master-addr "$CONVERT_MASTER_ADDR" --master-port "${CONVERT_MASTER_PORT:-12345}" \\\n'
        )
    run = '  PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}" ' + launch
    rows = render_array("CONVERT_ARGS", build_convert_rows(convert, model))
    return f"""{rows}convert() {{
{checks}  enter_slime
  load_model_args
{run}    tools/convert_hf_to_torch_dist.py "${{MODEL_ARGS[@]}}" "${{CONVERT_ARGS[@]}}" \\
    --hf-checkpoint "$BF16_DIR" --save "$TRAIN_DIR"
}}
"""


def build_convert_rows(convert: Convert, model: Model) -> list[Row]:
    """Return the parallel sizes of the converter; none where it chooses its own (automatic PP)."""
    if convert.auto_pp or convert.nodes * convert.processes_per_node == 1:
        return []
    rows: list[Row] = [
        ("--tensor-model-parallel-size", str(convert.tp)),
        ("--pipeline-model-parallel-size", str(convert.pp)),
    ]
    if model.arch.moe:
        rows += [("--expert-model-parallel-size", str(convert.ep)), ("--expert-tensor-parallel-size", "1")]
    if convert.first_stage_layers:
        rows.append(("--decoder-first-pipeline-num-layers", str(convert.first_stage_layers)))
    if convert.last_stage_layers:
        rows.append(("--decoder-last-pipeline-num-layers", str(convert.last_stage_layers)))
    return rows
