"""Errors of free text: paths, addresses, hooks, names. Every message shows the text that was found.

Owns: path_empty, hook_form, external_addrs, disk_dir, delta_local, pd_device, straw_fields, ssm_ratio.
Source: experiment.md 4.1.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from hotloop.experiment.layout import parse_external_addrs
from hotloop.experiment.rules import Facts, Say, error_rule, show

_HOOK = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_REQUIRED_PATHS = ("hf_path", "train_path", "data_path", "save_path", "megatron_path")


@error_rule("path_empty", *_REQUIRED_PATHS)
def check_path_empty(facts: Facts) -> Iterator[Say]:
    """Every path that the job reads or writes is given."""
    for name in _REQUIRED_PATHS:
        if not (getattr(facts.experiment, name) or "").strip():
            yield Say(f'{name} = ""', "the job cannot start without it", f"Set {name}.", (name,))


@error_rule("hook_form", "generate_hook", "reward_hook", "task")
def check_hook_form(facts: Facts) -> Iterator[Say]:
    """A custom task names both hooks as dotted functions."""
    if facts.experiment.task != "custom":
        return
    for name, example in (("generate_hook", "my_task.generate"), ("reward_hook", "my_task.reward")):
        text = getattr(facts.experiment, name)
        if not _HOOK.fullmatch(text):
            yield Say(
                f"{name} = {show(text)}",
                f"a custom task needs a dotted path to a function, such as {example}",
                f"Set {name} to module.function.",
                (name, "task"),
            )


def is_host_port(text: str) -> bool:
    """Tell whether a word is `host:port` with a name, an IPv4 address, or an IPv6 address in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= 65535:
        return False
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return False
        return True
    return bool(_HOST.fullmatch(host))


@error_rule("external_addrs", "external_addrs", "layout")
def check_external_addrs(facts: Facts) -> Iterator[Say]:
    """External engines are a list of host:port."""
    if facts.experiment.layout != "external":
        return
    words = parse_external_addrs(facts.experiment.external_addrs)
    form = "host:port, separated by spaces; IPv6 in brackets; plain http only"
    if not words:
        yield Say('external_addrs = ""', "the external layout needs the engines' addresses", f"Write {form}.")
    wrong = [word for word in words if not is_host_port(word)]
    if wrong:
        yield Say(f"external_addrs: {show(wrong[0])}", "is not an address of an engine", f"Write {form}.")


@error_rule("disk_dir", "weight_dir", "transport")
def check_disk_dir(facts: Facts) -> Iterator[Say]:
    """Weights that travel by file need a shared folder."""
    if facts.experiment.transport != "nccl" and not facts.experiment.weight_dir.strip():
        yield Say(
            'weight_dir = ""',
            f"transport {facts.experiment.transport} writes weights into a folder that trainer and engines share",
            "Set weight_dir to a path that every node sees.",
        )


@error_rule("delta_local", "local_weight_dir", "transport")
def check_delta_local(facts: Facts) -> Iterator[Say]:
    """A delta is applied to a copy on each engine's own disk."""
    if facts.experiment.transport == "delta" and not facts.experiment.local_weight_dir.strip():
        yield Say(
            'local_weight_dir = ""',
            "a delta is applied to the weights before it, which each engine node keeps on its own disk",
            "Set local_weight_dir to a path on a local disk.",
        )


@error_rule("pd_device", "rdma_device", "pd")
def check_pd_device(facts: Facts) -> Iterator[Say]:
    """Disaggregated KV travels over a named RDMA device."""
    if facts.experiment.pd and not facts.experiment.rdma_device.strip():
        yield Say(
            'rdma_device = ""',
            "prefill sends its KV to decode over an RDMA device, and its name differs between clusters",
            "Set rdma_device to what ibv_devices lists on the nodes, such as mlx5_0.",
        )


@error_rule("straw_fields", "straw_dir", "straw_run_id", "straw_declaration", "straw")
def check_straw_fields(facts: Facts) -> Iterator[Say]:
    """The persistent queue needs an absolute folder, a run id and a storage declaration."""
    experiment = facts.experiment
    if not experiment.straw:
        return
    for name in ("straw_dir", "straw_declaration"):
        text = getattr(experiment, name)
        if not text.startswith("/"):
            yield Say(
                f"{name} = {show(text)}",
                "the persistent queue takes absolute paths only",
                f"Set {name} to a path that starts with /.",
                (name, "straw"),
            )
    if not _RUN_ID.fullmatch(experiment.straw_run_id):
        yield Say(
            f"straw_run_id = {show(experiment.straw_run_id)}",
            "a run id has 1 to 64 letters, digits, dots, dashes or underscores",
            "Set straw_run_id to a new name for this run.",
            ("straw_run_id", "straw"),
        )


@error_rule("ssm_ratio", "ssm_ratio")
def check_ssm_ratio(facts: Facts) -> Iterator[Say]:
    """State over KV is a positive ratio."""
    ratio = facts.experiment.ssm_ratio
    if ratio is not None and not ratio > 0:
        yield Say(
            f"ssm_ratio = {ratio:g}",
            "the share of recurrent state to KV cache must be above 0",
            "Leave it empty, or set it near the balanced value of the estimates.",
        )
