"""Whether torch can compute on a device that a user named.

Owns: the answer, as a reason or nothing. `python -m hotloop.engines.torch.device NAME` prints it, for a process that
must not load torch itself.
Does not do: placing anything there.
"""

from __future__ import annotations

import sys

import torch


def find_device_fault(name: str) -> str:
    """Say why torch cannot use a device; empty when it can."""
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        return "is not the name of a device"
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return "the engine runs on cpu and on cuda"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"torch sees {count} CUDA GPUs, counted from 0"
    return ""


if __name__ == "__main__":
    print(find_device_fault(sys.argv[1]))
