"""experiment.sh: prepare, convert, check and train, as one bash file.

Owns: `render_experiment_sh` and the header comment that both scripts carry.

Promises: a pure function of the choices, without a time stamp. No kill and no `ray start`: the script never touches a
process it did not start. User text is only ever a single-quoted word; the temporary file of PD groups is made in the
repository root and removed by an exit trap. An unknown subcommand prints the usage and exits 2.

Ray runs a job's entry point through a second shell. Newer Ray quotes every word for it, older Ray does not, so a vector
with a word that a shell would read is passed as a file (`needs_launcher`), and means the same under both.

Source: slime 624b824a (tools, docs/en/examples); Ray `job submit` (python/ray/dashboard/modules/job/cli.py).
"""

from __future__ import annotations

import json
import re

from hotloop.experiment.catalog.records import Catalog, Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.prepare import choose_folders, render_convert, render_prepare
from hotloop.experiment.export.sglang import build_server_groups, render_sglang_yaml
from hotloop.experiment.export.shell import (
    choose_heredoc_mark,
    quote,
    render_array,
    render_comment,
)
from hotloop.experiment.export.slime import (
    ArgGroup,
    build_environment,
    build_train_argv,
    build_train_groups,
    choose_driver,
    make_side_eval_choices,
    publishes,
    strip_slice,
)
from hotloop.experiment.flags import load_flags, split_flags
from hotloop.experiment.resolve import effective_recipe

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
"""Words that mean themselves to any shell."""


_SAVING = frozenset({"--save", "--save-interval"})
"""Left out of the evaluation job, so that it can never write over a checkpoint of the training."""


def list_unverified_flags(choices: Experiment, model: Model) -> list[str]:
    """Return the flags of the vector that slime 624b824a does not have, and the values that it refuses."""
    uses, _ = split_flags(build_train_argv(choices, model))
    later = load_flags().later_only
    names = [use.name for use in uses if use.name in later]
    names += [
        f"{use.name} straw" for use in uses if use.name == "--rollout-data-transport" and use.values == ("straw",)
    ]
    return names


def render_header(choices: Experiment, model: Model) -> str:
    """Return the comment text that opens both scripts. It holds no text of the user's."""
    commit = load_flags().slime_commit
    recipe_file = model.run_script or model.model_script
    lines = [
        f"hotloop experiment: {model.label}, {choices.layout}, {choices.schedule}, {choices.precision}, "
        f"correction {choices.correction}.",
        f"Recipe: {recipe_file} of slime {commit}; sizes: {effective_recipe(choices, model).source}.",
        f"Written for slime {choices.slime_target}.",
    ]
    unverified = list_unverified_flags(choices, model)
    if choices.slime_target == "v0.4.0":
        if unverified:
            lines.append(f"Not verified at slime 624b824a, which drops or refuses them: {', '.join(unverified)}.")
        else:
            lines.append("Every flag below is one that slime 624b824a also has.")
    if choices.max_staleness is not None:
        lines += [
            f"Staleness bound: {choices.max_staleness} versions. slime has no flag for it, so nothing below holds it:",
            "watch staleness/max, and lower concurrency, queue or response length when it rises above the bound.",
        ]
    if publishes(choices):
        lines += [
            "Every policy version that the trainer writes is published. Before the first run, publish its base; these",
            "are the commands (the bucket is the job's ROLLOUT_BUCKET below):",
            "  hotloop publish full --dir SERVING_DIR --bucket ROLLOUT_BUCKET --identity weight_v000000"
            " --policy-version 0 --startup",
            "  hotloop publish list --bucket ROLLOUT_BUCKET",
            "  hotloop publish verify --bucket ROLLOUT_BUCKET",
        ]
    return "\n".join(lines)


def render_experiment_sh(choices: Experiment, model: Model, catalog: Catalog) -> str:
    """Return the whole script.

    Args:
        choices: resolved and free of errors; anything else still gives a valid script, though not a useful one.
    """
    groups = build_train_groups(choices, model)
    has_side_eval = choices.eval_mode == "side"
    commands = ["prepare", "convert", "check", "train"] + (["evaluate"] if has_side_eval else [])
    parts = [
        "#!/usr/bin/env bash\n" + render_comment(render_header(choices, model)) + "set -euo pipefail\n",
        _render_usage(choices, model, commands),
        _render_settings(choices, model),
        "".join(render_array(group.name, group.rows) for group in groups),
        _SHARED,
        render_prepare(choices, model, catalog),
        render_convert(choices, model),
        _render_check(choices),
        _render_submit(choices, model, "train", groups),
    ]
    if has_side_eval:
        parts.append(_render_side_eval(choices, model))
    parts.append(_render_dispatch(commands))
    return "\n".join(parts)


def _render_usage(choices: Experiment, model: Model, commands: list[str]) -> str:
    convert_nodes = model.convert.nodes
    where = "one node" if convert_nodes == 1 else f"each of {convert_nodes} nodes, with CONVERT_NODE_RANK set"
    rows = {
        "prepare": "download the model and the data, and make the copies that serving and converting need",
        "convert": f"make the trainer's checkpoint; run it on {where}",
        "check": "test that everything the run reads is there",
        "train": "submit the job to the Ray cluster that is already running",
        "evaluate": "submit an evaluation of the newest checkpoint to another Ray cluster, beside the training",
    }
    listing = "".join(f"  {name:<9} {rows[name]}\n" for name in commands)
    return f"""usage() {{
  cat <<'USAGE'
usage: experiment.sh {" | ".join(commands)}

{listing}
Run it in the root of a slime checkout, or set SLIME_DIR to one. It starts no Ray node and stops no process.
RAY_DASHBOARD overrides http://127.0.0.1:8265.
USAGE
}}
"""


def _render_settings(choices: Experiment, model: Model) -> str:
    folders = choose_folders(choices, model)
    values = {
        "MODEL_SCRIPT": model.model_script,
        "MEGATRON_PATH": choices.megatron_path or "",
        "SOURCE_DIR": folders.source,
        "BF16_DIR": folders.bf16,
        "SERVING_DIR": folders.serving,
        "TRAIN_DIR": choices.train_path or "",
    }
    text = "".join(f"{name}={quote(value)}\n" for name, value in values.items())
    environment = json.dumps({"env_vars": build_environment(choices)}, indent=2)
    return text + f"RUNTIME_ENV={quote(environment)}\n"


_SHARED = """SCRATCH=()
cleanup() {
  if ((${#SCRATCH[@]})); then rm -f -- "${SCRATCH[@]}"; fi
}
trap cleanup EXIT

fail() {
  printf 'experiment.sh: %s\\n' "$1" >&2
  exit 1
}

enter_slime() {
  if [[ ! -f train.py || ! -f $MODEL_SCRIPT ]]; then
    fail "$PWD is not a slime checkout with $MODEL_SCRIPT; run from its root or set SLIME_DIR"
  fi
}

load_model_args() {
  MODEL_ARGS=()
  # shellcheck source=/dev/null
  source "$MODEL_SCRIPT"
  if ((${#MODEL_ARGS[@]} == 0)); then fail "$MODEL_SCRIPT sets no MODEL_ARGS"; fi
}

download() {
  if command -v huggingface-cli >/dev/null 2>&1; then
    huggingface-cli download "$@"
  else
    hf download "$@"
  fi
}

# make_once DIR COMMAND...: run a command that fills DIR, unless an earlier run finished it.
make_once() {
  local dir=$1
  shift
  if [[ -e $dir/.hotloop-complete ]]; then
    printf 'already made: %s\\n' "$dir"
    return
  fi
  "$@"
  mkdir -p -- "$dir"
  : >"$dir/.hotloop-complete"
}
"""


def _render_check(choices: Experiment) -> str:
    lines = [
        '  need "rollout config" "$SERVING_DIR/config.json"',
        '  need "trainer checkpoint" "$TRAIN_DIR/latest_checkpointed_iteration.txt"',
        f'  need "prompts" {quote(strip_slice(choices.data_path or ""))}',
    ]
    if choices.straw:
        lines.append(f'  need "straw declaration" {quote(choices.straw_declaration)}')
    needs = "\n".join(lines)
    return f"""MISSING=0
need() {{
  if [[ ! -f $2 ]]; then
    printf 'missing: %s: %s\\n' "$1" "$2" >&2
    MISSING=1
  fi
}}

check() {{
{needs}
  if ((MISSING)); then fail "something that the run reads is not there; prepare and convert make it"; fi
  printf 'everything that the run reads is there\\n'
}}
"""


def needs_launcher(words: list[str]) -> bool:
    """Whether a word of the vector would mean something to the shell that Ray runs the entry point in."""
    return any(not _PLAIN_WORD.fullmatch(word) for word in words)


def _render_submit(choices: Experiment, model: Model, name: str, groups: list[ArgGroup]) -> str:
    lines = [f"{name}() {{", "  enter_slime", "  load_model_args"]
    if name != "train":
        lines.insert(
            1, '  if [[ -z "${RAY_DASHBOARD:-}" ]]; then fail "set RAY_DASHBOARD to the evaluation cluster"; fi'
        )
    lines += ["  local words=(", f"    python3 {choose_driver(choices)}", '    "${MODEL_ARGS[@]}"']
    lines += [f'    "${{{group.name}[@]}}"' for group in groups]
    lines.append("  )")
    if choices.pd:
        yaml = render_sglang_yaml(build_server_groups(choices, effective_recipe(choices, model)))
        mark = choose_heredoc_mark(yaml)
        lines += [
            "  local config",
            '  config=$(mktemp "$PWD/.slime-lab.XXXXXX")',
            '  SCRATCH+=("$config")',
            f"  cat >\"$config\" <<'{mark}'",
            yaml.rstrip("\n"),
            mark,
            '  words+=(--sglang-config "$config")',
        ]
    if name == "train" and choices.rounds_more is not None:
        lines += _render_rounds_more(choices)
    entry = '"${words[@]}"'
    if needs_launcher([word for group in groups for word in group.words]):
        lines += [
            "  # Ray hands the entry point to a shell; a word here would mean something to it, so it goes as a file.",
            "  local launcher",
            '  launcher=$(mktemp "$PWD/.slime-lab.XXXXXX")',
            '  SCRATCH+=("$launcher")',
            "  { printf 'exec'; printf ' %q' \"${words[@]}\"; printf '\\n'; } >\"$launcher\"",
        ]
        entry = 'bash "$launcher"'
    lines += [
        '  ray job submit --address "${RAY_DASHBOARD:-http://127.0.0.1:8265}" \\',
        f'    --runtime-env-json "$RUNTIME_ENV" -- {entry}',
        "}",
    ]
    return "\n".join(lines) + "\n"


def _render_rounds_more(choices: Experiment) -> list[str]:
    """Return the lines that turn "k more rounds" into the absolute end that `--num-rollout` is (X06)."""
    tracker = f"{choices.resume_from}/latest_checkpointed_iteration.txt"
    return [
        f"  # {choices.rounds_more} more rounds after the newest checkpoint; of a repeated flag the last one counts.",
        "  local iteration",
        f"  iteration=$(<{quote(tracker)})",
        '  if [[ ! "$iteration" =~ ^[0-9]{1,9}$ ]]; then fail "the tracker file holds no number: $iteration"; fi',
        f'  words+=(--num-rollout "$((10#$iteration + 1 + {choices.rounds_more}))")',
    ]


def _render_side_eval(choices: Experiment, model: Model) -> str:
    alone = make_side_eval_choices(choices)
    groups = [
        ArgGroup(f"SIDE_{group.name}", tuple(row for row in group.rows if row[0] not in _SAVING))
        for group in build_train_groups(alone, model)
    ]
    arrays = "".join(render_array(group.name, group.rows) for group in groups)
    comment = render_comment(
        "Held-out evaluation beside the training: its own Ray cluster of the trainer's size, the newest checkpoint,\n"
        "no rounds. Set RAY_DASHBOARD to that cluster. Nothing of it enters the training data."
    )
    submit = _render_submit(alone, model, "evaluate", groups)
    return comment + arrays + submit


def _render_dispatch(commands: list[str]) -> str:
    cases = "".join(f"  {name}) {name} ;;\n" for name in commands)
    return f"""if (($# != 1)); then
  usage >&2
  exit 2
fi
if [[ -n "${{SLIME_DIR:-}}" ]]; then cd -- "$SLIME_DIR"; fi
case $1 in
{cases.rstrip()}
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
"""
