"""Hooks of a run: which names exist, and the refusal of those that this loop does not call.

Owns: `HOOKS`, the names of slime's hook flags without `--` and `-path`, and `check_hooks`.

Promises: a hook that is named is called or refused; a misspelt one is told apart from one that is not called yet.
Does not do: rewards of one's own (reward.kind = "python", verifiers/python.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from hotloop.errors import Problem

HOOKS = (
    "rollout-function",
    "custom-generate-function",
    "custom-rm",
    "dynamic-sampling-filter",
    "buffer-filter",
    "rollout-sample-filter",
    "rollout-all-samples-process",
    "rollout-data-postprocess",
    "rollout-sample-hook",
    "custom-reward-post-process",
    "custom-convert-samples-to-train-data",
    "custom-advantage-function",
    "custom-loss-function",
    "custom-tis-function",
    "custom-pg-loss-reducer-function",
    "custom-rollout-log",
    "custom-eval-rollout-log",
    "data-source",
    "custom-megatron-init",
    "custom-megatron-before-log-prob",
    "custom-megatron-before-train-step",
    "custom-update-weight-post-write",
)

_INSTEAD = {
    "custom-rm": 'Set reward.kind = "python" and reward.function.',
    "dynamic-sampling-filter": "sampling.drop_zero_std is DAPO's filter.",
    "custom-update-weight-post-write": "laptop.publish publishes every version.",
}


def check_hooks(hooks: Mapping[str, str]) -> list[Problem]:
    """List what is wrong with `laptop.hooks`: `unknown_hook`, or `not_yet_supported` for a hook that is not called."""
    problems: list[Problem] = []
    for name, function in hooks.items():
        where = f"laptop.hooks.{name} = {function!r}"
        plain = name.replace("_", "-").removesuffix("-path")
        if plain in HOOKS:
            why = "hotloop run does not call this hook yet"
            problems.append(Problem("not_yet_supported", why, where, _INSTEAD.get(plain, "Remove it.")))
        else:
            near = difflib.get_close_matches(plain, HOOKS, n=1)
            do = f"Did you mean {near[0]}?" if near else f"Hooks: {', '.join(HOOKS)}."
            problems.append(Problem("unknown_hook", "there is no hook of this name", where, do))
    return problems
