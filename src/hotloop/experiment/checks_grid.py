"""Errors of sizes that do not divide: the trainer's grids and stages, the engines, the disaggregated groups, lengths.

Owns: train_grid, expert_grid, stage_layers, engine_multiple, pd_groups, batch_steps, group_size, sample_too_long.
Source: experiment.md 4.1; slime 624b824a for who else would notice and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from hotloop.experiment.memory import PROMPT_TOKENS
from hotloop.experiment.rules import Facts, Say, error_rule

MAX_NODES = 512


def list_valid_nodes(facts: Facts, near: int) -> list[int]:
    """List up to two node counts around `near` whose GPUs fill both grids, the larger last."""
    recipe = facts.recipe
    dense = recipe.tp * recipe.cp * recipe.pp
    expert = recipe.etp * recipe.ep * recipe.pp
    common = dense * expert // gcd(dense, expert)
    step = common // gcd(common, recipe.gpus_per_node)
    below = near // step * step
    found = [count for count in (below, below + step) if 1 <= count <= MAX_NODES]
    return [count for count in found if count != near]


def _advise_nodes(facts: Facts) -> str:
    nodes = list_valid_nodes(facts, facts.layout.nodes)
    if not nodes:
        return f"No count up to {MAX_NODES} nodes divides: use smaller parallel sizes."
    return f"Use {' or '.join(str(count) for count in nodes)} node{'s' if nodes[-1] > 1 else ''}."


@error_rule("train_grid", "nodes", "model")
def check_train_grid(facts: Facts) -> Iterator[Say]:
    """Trainer GPUs fill TP x PP x CP a whole number of times."""
    recipe, layout = facts.recipe, facts.layout
    grid = recipe.tp * recipe.pp * recipe.cp
    if layout.train_gpus % grid:
        yield Say(
            f"nodes = {layout.nodes}",
            f"{layout.train_gpus} GPUs are not a multiple of TP {recipe.tp} x PP {recipe.pp} x CP {recipe.cp} = {grid} "
            f"for {facts.model.id}",
            _advise_nodes(facts),
        )


@error_rule("expert_grid", "nodes", "model")
def check_expert_grid(facts: Facts) -> Iterator[Say]:
    """Trainer GPUs fill ETP x EP x PP a whole number of times, and each rank has whole experts."""
    recipe, layout = facts.recipe, facts.layout
    grid = recipe.etp * recipe.ep * recipe.pp
    if layout.train_gpus % grid:
        yield Say(
            f"nodes = {layout.nodes}",
            f"{layout.train_gpus} GPUs are not a multiple of ETP {recipe.etp} x EP {recipe.ep} x PP {recipe.pp} "
            f"= {grid} "
            f"for {facts.model.id}",
            _advise_nodes(facts),
        )
    elif facts.model.arch.moe and facts.model.arch.experts % recipe.ep:
        yield Say(
            f"EP {recipe.ep}",
            f"{facts.model.arch.experts} experts of {facts.model.id} cannot be spread evenly over it",
            "Use an EP that divides the experts.",
        )


@error_rule("stage_layers", "model", "export.slime_args")
def check_stage_layers(facts: Facts) -> Iterator[Say]:
    """Stages hold whole layers that add up, and a sparse-index model starts each stage on an index layer."""
    recipe, arch = facts.recipe, facts.model.arch
    first, last, pp = recipe.first_stage_layers, recipe.last_stage_layers, recipe.pp
    if not facts.layout.stages:
        if pp == 1:
            why = "one pipeline stage takes no first or last layer count"
            do = "Leave both counts out, or raise PP."
        else:
            middle = pp - (first > 0) - (last > 0)
            why = (
                f"{arch.layers} layers less first {first or 'unset'} and last {last or 'unset'} do not fill "
                f"{middle} other stage{'s' if middle != 1 else ''} with the same whole number of layers"
            )
            do = "Set first and last stage layers so that the rest divides."
        yield Say(f"PP {pp} for {facts.model.id}", why, do)
        return
    if arch.index_layers:
        for stage in facts.layout.stages:
            if stage.first_layer + 1 not in arch.index_layers:
                yield Say(
                    f"stage {stage.index + 1} of {pp}",
                    f"starts on layer {stage.first_layer + 1} of {facts.model.id}, which shares the index of an "
                    "earlier "
                    "layer that lies on another stage",
                    f"Start stages on index layers: {', '.join(str(layer) for layer in arch.index_layers)}.",
                )
                return


@error_rule("engine_multiple", "rollout_gpus", "layout")
def check_engine_multiple(facts: Facts) -> Iterator[Say]:
    """A managed rollout pool is a whole number of engines."""
    layout = facts.layout
    if layout.kind == "external":
        return
    engine, pool = layout.engine_gpus, layout.rollout_gpus
    if pool % engine or pool < engine:
        where = f"nodes = {layout.nodes}" if layout.kind == "colocate" else f"rollout_gpus = {pool}"
        above = (pool // engine + 1) * engine
        below = pool // engine * engine
        options = " or ".join(str(size) for size in (below, above) if size)
        yield Say(
            where,
            f"{pool} rollout GPUs are not a multiple of the engine size {engine} of {facts.model.id}",
            f"Use {options} rollout GPUs.",
            ("nodes", "layout") if layout.kind == "colocate" else None,
        )


@error_rule("pd_groups", "prefill_gpus", "rollout_gpus", "pd")
def check_pd_groups(facts: Facts) -> Iterator[Say]:
    """Prefill is a whole number of engines and leaves at least one for decode."""
    if not facts.experiment.pd or facts.layout.kind == "external":
        return
    engine, pool = facts.layout.engine_gpus, facts.layout.rollout_gpus
    prefill = facts.experiment.prefill_gpus or engine
    where = f"prefill_gpus = {prefill}"
    if prefill % engine:
        yield Say(
            where,
            f"is not a multiple of the engine size {engine} of {facts.model.id}",
            f"Use {max(engine, prefill // engine * engine)} prefill GPUs.",
        )
    if prefill >= pool:
        yield Say(
            where,
            f"leaves no GPU for decode: the rollout pool has {pool}",
            f"Use at least {prefill // engine * engine + engine} rollout GPUs, or turn PD off.",
        )


@error_rule("group_size", "sampling.group_size", "algorithm")
def check_group_size(facts: Facts) -> Iterator[Say]:
    """A group baseline needs at least two rollouts."""
    kind, size = facts.experiment.algorithm.kind, facts.experiment.sampling.group_size
    if size < 2 and kind != "reinforce_plus_plus":
        yield Say(
            f"sampling.group_size = {size}",
            f'must be at least 2 for "{kind}", because an advantage is the reward minus the group\'s mean, so with one '
            "rollout it is always 0",
            'Set group_size to 8, or algorithm.kind to "reinforce_plus_plus".',
        )


@error_rule("batch_steps", "sampling.num_groups", "sampling.group_size", "optimizer.steps_per_round")
def check_batch_steps(facts: Facts) -> Iterator[Say]:
    """A round's rollouts are split into equal optimizer steps."""
    sampling, steps = facts.experiment.sampling, facts.experiment.optimizer.steps_per_round
    rollouts = sampling.num_groups * sampling.group_size
    if rollouts % steps:
        divisors = [size for size in range(1, steps + 1) if rollouts % size == 0]
        yield Say(
            f"optimizer.steps_per_round = {steps}",
            f"does not divide the {sampling.num_groups} x {sampling.group_size} = {rollouts} rollouts of a round; the "
            "trainer would drop the rest",
            f"Use {divisors[-1]}.",
        )


@error_rule("sample_too_long", "response_tokens", "model")
def check_sample_too_long(facts: Facts) -> Iterator[Say]:
    """The longest sample fits into one microbatch."""
    recipe = facts.recipe
    longest = PROMPT_TOKENS + facts.experiment.response_tokens
    limit = recipe.max_tokens_per_gpu * recipe.cp
    if longest > limit:
        room = limit - PROMPT_TOKENS
        do = f"Use at most {room} response tokens" if room >= 1 else "Use a larger max_tokens_per_gpu"
        yield Say(
            f"response_tokens = {facts.experiment.response_tokens}",
            f"with a prompt of {PROMPT_TOKENS} (assumed) a sample has up to {longest} tokens, more than "
            f"max_tokens_per_gpu {recipe.max_tokens_per_gpu} x CP {recipe.cp} = {limit}",
            f"{do}, or a larger CP.",
        )
