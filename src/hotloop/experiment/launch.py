"""The launch guide: what to do where, in order, once the files are exported. Shown, never run.

Owns: `build_launch_guide`. Steps name the node that they belong to, the `ray start` lines with their GPU counts, the
paths
that every node must see, and what external engines need.

Promises: pure; user text appears only in sentences, never inside a command. Does not do: the scripts (export/).
"""

from __future__ import annotations

from hotloop.experiment.catalog.records import Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import Layout
from hotloop.experiment.records import LaunchStep


def _list_shared_paths(experiment: Experiment) -> list[str]:
    paths = [experiment.hf_path, experiment.train_path, experiment.data_path, experiment.save_path]
    if experiment.transport != "nccl":
        paths.append(experiment.weight_dir)
    if experiment.straw:
        paths += [experiment.straw_dir, experiment.straw_declaration]
    if experiment.eval_mode != "off":
        paths.append(experiment.eval_data)
    return [path for path in paths if path]


def _name_others(count: int) -> str:
    return "node 1" if count == 2 else f"nodes 1..{count - 1}"


def build_launch_guide(experiment: Experiment, model: Model, layout: Layout) -> tuple[LaunchStep, ...]:
    """List the steps of a launch.

    Args: experiment: resolved.
    """
    per_node = layout.gpus_per_node
    nodes = -(-layout.ray_gpus // per_node)
    steps = [
        LaunchStep(
            "every node", f"These paths must be the same shared storage: {', '.join(_list_shared_paths(experiment))}."
        )
    ]
    if experiment.local_weight_dir and experiment.transport == "delta":
        steps.append(LaunchStep("every rollout node", f"On its own disk: {experiment.local_weight_dir}."))
    steps.append(LaunchStep("head node", "Download the model and the data.", "bash experiment.sh prepare"))
    convert = model.convert
    if convert.nodes == 1:
        steps.append(LaunchStep("head node", "Convert the checkpoint, once.", "bash experiment.sh convert"))
    else:
        steps.append(
            LaunchStep(
                f"{convert.nodes} nodes at the same time",
                f"Convert the checkpoint, once: rank 0 to {convert.nodes - 1}, the address is that of rank 0.",
                "CONVERT_MASTER_ADDR=ADDRESS CONVERT_NODE_RANK=RANK bash experiment.sh convert",
            )
        )
    if experiment.layout == "external":
        steps.append(
            LaunchStep(
                "outside the cluster",
                f"Start {layout.num_engines} engines of {layout.engine_gpus} GPUs and wait until they answer: "
                "the job asks "
                "each address for its server info when it starts. They are outside Ray.",
                "bash serving-reference.sh",
            )
        )
    steps.append(
        LaunchStep(
            "head node",
            f"Start Ray. In all it must offer {layout.ray_gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''}.",
            f"ray start --head --num-gpus {per_node} --disable-usage-stats",
        )
    )
    if nodes > 1:
        steps.append(
            LaunchStep(
                _name_others(nodes),
                "Join Ray; ADDRESS is the head node's.",
                f"ray start --address ADDRESS:6379 --num-gpus {per_node} --disable-usage-stats",
            )
        )
    steps.append(LaunchStep("head node", "See that every input is there.", "bash experiment.sh check"))
    if experiment.resume_from:
        steps.append(LaunchStep("head node", f"The run continues from {experiment.resume_from}."))
    else:
        steps.append(
            LaunchStep(
                "head node", f"The output folder must be new or empty: {experiment.save_path}. One run, one folder."
            )
        )
    if experiment.straw:
        steps.append(
            LaunchStep(
                "head node",
                f"The queue's run id {experiment.straw_run_id} must be new, or that of the run that is resumed.",
            )
        )
    steps.append(LaunchStep("head node", "Submit the job.", "bash experiment.sh train"))
    return tuple(steps)
