"""The launch guide: which command on which node, in order. Shown, never run.

Owns: `launch_guide`, which the plan calls, and `render_publish_commands` (E13).

Promises: pure; every `ray start` line has the GPU count of its node, and the counts sum to the GPUs that the job needs
in Ray. Paths, addresses and device names are the user's own or named as still missing, never invented.
"""

from __future__ import annotations

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog, Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.prepare import choose_folders
from hotloop.experiment.export.serving import count_engine_nodes
from hotloop.experiment.export.shell import quote
from hotloop.experiment.export.slime import publishes, strip_slice, uses_own_reward
from hotloop.experiment.layout import Layout, parse_external_addrs
from hotloop.experiment.records import LaunchStep
from hotloop.experiment.resolve import resolve
from hotloop.experiment.sections import PythonReward

EVERY_NODE = "every node"
ANY_NODE = "one node"
HEAD = "head node"
OUTSIDE = "outside the cluster"

BASE_IDENTITY = "weight_v000000"
"""slime's first sync only sets the base; its first written version, weight_v000001, is a delta to this."""


def launch_guide(experiment: Experiment, layout: Layout, catalog: Catalog | None = None) -> list[LaunchStep]:
    """Return what to do, from an empty cluster to a running job."""
    catalog = catalog or load_catalog()
    choices = resolve(experiment, catalog)
    model = find_model(catalog, choices.model)
    steps = [*_shared_steps(choices, model)]
    steps += _fresh_steps(choices)
    steps.append(LaunchStep(ANY_NODE, "Download the model and the data.", "bash experiment.sh prepare"))
    steps += _convert_steps(model)
    steps.append(LaunchStep(EVERY_NODE, "Test that everything the run reads is there.", "bash experiment.sh check"))
    if choices.layout == "external":
        steps += _external_steps(choices, model)
    steps += _ray_steps(choices, layout)
    if publishes(choices):
        what = "Publish the base that the run's first delta builds on, and name it as startup snapshot."
        steps.append(LaunchStep(ANY_NODE, what, render_publish_commands(choices)[0]))
    what = "Submit the job, from the root of the slime checkout."
    steps.append(LaunchStep(HEAD, what, "bash experiment.sh train"))
    if choices.eval_mode == "side":
        what = (
            f"Evaluate the newest checkpoint beside the training: a second Ray cluster of {layout.train_gpus} GPUs; "
            "repeat it when a checkpoint is saved."
        )
        command = 'RAY_DASHBOARD="http://$EVAL_HEAD_ADDR:8265" bash experiment.sh evaluate'
        steps.append(LaunchStep("head node of the evaluation cluster", what, command))
    return steps


def _shared_steps(choices: Experiment, model: Model) -> list[LaunchStep]:
    folders = choose_folders(choices, model)
    shared = [folders.serving, choices.train_path or "", strip_slice(choices.data_path or ""), choices.save_path or ""]
    if choices.transport != "nccl":
        shared.append(choices.weight_dir)
    if choices.straw:
        shared += [choices.straw_dir, choices.straw_declaration]
    listing = ", ".join(path for path in dict.fromkeys(shared) if path)
    steps = [
        LaunchStep(EVERY_NODE, f"Mount shared storage so that these are the same files everywhere: {listing}."),
        LaunchStep(
            EVERY_NODE,
            "Have the same slime checkout and Megatron at the same paths, and start Ray from the root of that "
            "checkout: the job's relative paths are read there.",
        ),
    ]
    modules = _user_modules(choices)
    if modules:
        what = f"Make {', '.join(modules)} importable: installed, or as a file in the root of the slime checkout."
        steps.append(LaunchStep(EVERY_NODE, what))
    if uses_own_reward(choices) or publishes(choices):
        what = "Install this package into the environment of the job: it scores or publishes there."
        steps.append(LaunchStep(EVERY_NODE, what, "python -c 'import hotloop.integrations.slime'"))
    if choices.transport == "delta":
        where = choices.local_weight_dir or "local_weight_dir, which is still empty"
        steps.append(
            LaunchStep("every node with an engine", f"Give the parent's bytes a local disk, not a shared one: {where}.")
        )
    if choices.pd:
        device = choices.rdma_device
        what = (
            "Name the RDMA device in rdma_device; it is still empty." if not device else f"Have RDMA device {device}."
        )
        steps.append(LaunchStep("every node with an engine", what, "ls /sys/class/infiniband"))
    return steps


def _user_modules(choices: Experiment) -> list[str]:
    """Return the modules that hold the user's own functions."""
    dotted = [choices.generate_hook, choices.reward_hook] if choices.task == "custom" else []
    if isinstance(choices.reward, PythonReward) and choices.task == "math":
        dotted.append(choices.reward.function)
    return list(dict.fromkeys(path.rpartition(".")[0] for path in dotted if "." in path))


def _fresh_steps(choices: Experiment) -> list[LaunchStep]:
    steps = []
    save = choices.save_path or ""
    if choices.resume_from:
        what = f"Resume: {choices.resume_from} must hold latest_checkpointed_iteration.txt."
        steps.append(
            LaunchStep(ANY_NODE, what, f"cat {quote(choices.resume_from + '/latest_checkpointed_iteration.txt')}")
        )
    elif save:
        what = "Choose a fresh output folder: an old checkpoint in it would be overwritten. This must print nothing."
        steps.append(LaunchStep(ANY_NODE, what, f"ls -A -- {quote(save)} 2>/dev/null"))
    if choices.straw:
        run_id = choices.straw_run_id or "still empty"
        what = f"Choose a run id that the queue has not seen (straw_run_id, {run_id}); the same id only to resume."
        steps.append(LaunchStep(ANY_NODE, what))
    if publishes(choices):
        what = "Choose a fresh bucket prefix: versions are named weight_v000001, weight_v000002, ... in every run."
        steps.append(LaunchStep(ANY_NODE, what, render_publish_commands(choices)[1]))
    if choices.transport == "delta" and choices.weight_dir:
        what = f"slime deletes {choices.weight_dir} when the job starts: nothing else may lie in it."
        steps.append(LaunchStep(ANY_NODE, what, f"ls -A -- {quote(choices.weight_dir)} 2>/dev/null"))
    return steps


def _convert_steps(model: Model) -> list[LaunchStep]:
    nodes = model.convert.nodes
    if nodes == 1:
        return [LaunchStep(ANY_NODE, "Make the trainer's checkpoint.", "bash experiment.sh convert")]
    steps = []
    for rank in range(nodes):
        what = f"Make the trainer's checkpoint, all {nodes} nodes at the same time."
        command = f'CONVERT_MASTER_ADDR="$NODE0_ADDR" CONVERT_NODE_RANK={rank} bash experiment.sh convert'
        steps.append(LaunchStep(f"node {rank}", what, command))
    return steps


def _external_steps(choices: Experiment, model: Model) -> list[LaunchStep]:
    addrs = parse_external_addrs(choices.external_addrs)
    count = len(addrs) or 1
    nodes = count_engine_nodes(choices, model)
    span = f", each on {nodes} nodes with SERVE_NODE_RANK 0..{nodes - 1}" if nodes > 1 else ""
    what = (
        f"Start {count} SGLang {'engine' if count == 1 else 'engines'}{span}, and wait until each answers: the job "
        "asks every address for its size while it parses its arguments. They are no part of Ray, need slime's SGLang "
        f"patch, and must see the model and {choices.weight_dir or 'weight_dir (still empty)'} under the same paths."
    )
    steps = [LaunchStep(OUTSIDE, what, "bash serving-reference.sh")]
    for addr in addrs:
        url = addr if addr.startswith("http://") else f"http://{addr}"
        steps.append(LaunchStep(HEAD, "This engine must answer.", f"curl -fsS {quote(url + '/health')}"))
    if not addrs:
        steps.append(LaunchStep(OUTSIDE, "Name the engines in external_addrs as host:port; it is still empty."))
    return steps


def _ray_steps(choices: Experiment, layout: Layout) -> list[LaunchStep]:
    counts = split_ray_gpus(layout)
    head, workers = counts[0], counts[1:]
    steps = [
        LaunchStep(
            HEAD,
            f"Start Ray's head with its {head} GPUs.",
            f'ray start --head --node-ip-address "$HEAD_ADDR" --num-gpus {head} --disable-usage-stats '
            "--dashboard-host 0.0.0.0 --dashboard-port 8265",
        )
    ]
    runs: list[tuple[int, int, int]] = []
    for number, gpus in enumerate(workers, start=1):
        if runs and runs[-1][2] == gpus:
            runs[-1] = (runs[-1][0], number, gpus)
        else:
            runs.append((number, number, gpus))
    for first, last, gpus in runs:
        where = f"node {first}" if first == last else f"each of nodes {first}..{last}"
        command = f'ray start --address "$HEAD_ADDR:6379" --num-gpus {gpus} --disable-usage-stats'
        steps.append(LaunchStep(where, f"Join Ray with {gpus} GPUs.", command))
    what = f"Ray must show {layout.ray_gpus} GPUs on {len(counts)} nodes."
    if choices.layout == "separate":
        what += f" {layout.train_gpus} train and {layout.rollout_gpus} serve."
    steps.append(LaunchStep(HEAD, what, "ray status"))
    return steps


def split_ray_gpus(layout: Layout) -> list[int]:
    """Return the GPUs that each Ray node offers; the last one may be part of a node. They sum to `layout.ray_gpus`."""
    whole, rest = divmod(layout.ray_gpus, layout.gpus_per_node)
    return [layout.gpus_per_node] * whole + ([rest] if rest else [])


def render_publish_commands(choices: Experiment) -> list[str]:
    """Return the `hotloop publish` lines of a run that publishes: the base before it, a check and an anchor after."""
    bucket = quote(choices.export.publish)
    base = f"hotloop publish full --dir {quote(choices.hf_path or '')} --bucket {bucket}"
    return [
        f"{base} --identity {BASE_IDENTITY} --policy-version 0 --startup",
        f"hotloop publish list --bucket {bucket}",
        f"hotloop publish verify --bucket {bucket}",
    ]
