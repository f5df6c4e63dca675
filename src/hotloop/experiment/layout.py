"""Where every process sits: nodes, GPUs, roles and ranks that follow from the choices.

Owns: `Layout` and `compute_layout`. The trainer fills nodes x 8 GPUs, rank order tp-cp-ep-dp-pp (TP fastest), experts
on their own grid etp-ep-edp-pp over the same ranks. Engines take the rollout pool in rank order, prefill first.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp          dense grid
    rank = ((pp * EDP + edp) * EP + ep) * ETP + etp      expert grid, the same ranks

Promises: pure and total: sizes that do not divide give a layout with `is_whole` false and no per-GPU records, never an
exception; the findings are checks_grid.py's. Does not do: bytes (memory.py).

Source: rank order slime 624b824a (algorithms.md 10); stages Megatron's uneven first and last stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.catalog.records import Arch, Catalog, Model, Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.records import to_plain
from hotloop.experiment.resolve import effective_recipe, resolve


class GpuRecord(NamedTuple):
    """One GPU. A coordinate is -1 where the GPU has no trainer rank."""

    node: int
    slot: int
    """Position on its node."""
    role: str
    """`train`, `colocated`, `rollout`, `prefill`, `decode`."""
    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    edp: int
    engine: int
    """Engine that serves on it, counted over the whole pool; -1 for none."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage."""

    index: int
    first_layer: int
    """0-based."""
    num_layers: int
    num_dense: int
    """Layers with a dense feed-forward."""
    num_moe: int
    num_attention: int
    """Layers with full attention; the rest are recurrent."""
    has_embedding: bool
    has_head: bool


class EngineGroup(NamedTuple):
    """Engines with the same settings."""

    role: str
    """`regular`, `prefill` or `decode`."""
    num_engines: int
    gpus: int
    hicache: bool
    eagle: bool


class Layout(NamedTuple):
    """Sizes, stages, engines and per-GPU records."""

    kind: str
    nodes: int
    gpus_per_node: int
    train_gpus: int
    rollout_gpus: int
    """GPUs that serve, whoever owns them."""
    ray_gpus: int
    """GPUs that Ray must offer; external engines are outside Ray."""
    external_gpus: int
    tp: int
    pp: int
    cp: int
    dp: int
    """0 when the grid does not divide."""
    ep: int
    etp: int
    edp: int
    """Replicas of an expert; 0 when the expert grid does not divide."""
    cp_layout: str
    max_tokens_per_gpu: int
    stages: tuple[Stage, ...]
    engine_gpus: int
    engine_dp: int
    engine_ep: int
    num_engines: int
    groups: tuple[EngineGroup, ...]
    producers: str
    """`driver`, or `distributed` for async with a persistent queue (D09)."""
    gpus: tuple[GpuRecord, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the dense grid, the expert grid and the stages all divide."""
        return self.dp > 0 and self.edp > 0 and bool(self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values; one list of numbers for each GPU, with the names beside them."""
        plain: dict[str, Any] = to_plain(_without_gpus(self))
        plain["gpu_fields"] = list(GpuRecord._fields)
        plain["gpus"] = [list(gpu) for gpu in self.gpus]
        plain["is_whole"] = self.is_whole
        return plain


def _without_gpus(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in Layout._fields if name != "gpus"}


def compute_stages(arch: Arch, recipe: Recipe) -> tuple[Stage, ...]:
    """Cut the layers into pipeline stages; empty when they cannot be cut as asked.

    Formula: middle = (layers - first - last) / (PP - stages that were given a count), in whole layers, each at least 1.
    """
    given = (recipe.first_stage_layers, recipe.last_stage_layers)
    if recipe.pp == 1:
        counts = [arch.layers]
        if any(given):
            return ()
    else:
        num_middle = recipe.pp - sum(1 for size in given if size)
        left = arch.layers - sum(given)
        if num_middle == 0:
            if left:
                return ()
            middle = 0
        else:
            if left <= 0 or left % num_middle:
                return ()
            middle = left // num_middle
        counts = [middle] * recipe.pp
        counts[0] = given[0] or middle
        counts[-1] = given[1] or middle
    stages = []
    first = 0
    for index, size in enumerate(counts):
        last = first + size
        dense = max(0, min(arch.dense_layers, last) - first) if arch.moe else size
        attention = size
        if arch.is_hybrid:
            every = arch.full_attention_interval or 4
            attention = last // every - first // every
        stages.append(Stage(index, first, size, dense, size - dense, attention, index == 0, index == len(counts) - 1))
        first = last
    return tuple(stages)


def compute_zigzag_chunks(length: int, cp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each CP rank its token ranges [start, end) of a sequence.

    Formula: 2 cp chunks of ceil(length / 2 cp); rank r has chunks r and 2 cp - 1 - r, so that causal work is equal.
    Source: slime 624b824a (algorithms.md 10).
    """
    if cp == 1:
        return (((0, length),),)
    size = -(-length // (2 * cp))

    def cut(chunk: int) -> tuple[int, int]:
        return (min(chunk * size, length), min((chunk + 1) * size, length))

    return tuple((cut(rank), cut(2 * cp - 1 - rank)) for rank in range(cp))


def compute_allgather_chunks(length: int, cp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each CP rank its one contiguous range; keys and values are gathered."""
    size = -(-length // cp)
    return tuple(((min(rank * size, length), min((rank + 1) * size, length)),) for rank in range(cp))


def count_causal_pairs(ranges: tuple[tuple[int, int], ...]) -> int:
    """Count (query, key) pairs of causal attention whose query lies in the ranges."""
    return sum(position + 1 for start, end in ranges for position in range(start, end))


def parse_external_addrs(text: str) -> list[str]:
    """Split the list of external engines at spaces and commas; a leading http:// is dropped."""
    return [word.removeprefix("http://").rstrip("/") for word in text.replace(",", " ").split()]


def _compute_groups(experiment: Experiment, engine_gpus: int, pool: int) -> tuple[EngineGroup, ...]:
    eagle = experiment.eagle != "off"
    if not experiment.pd:
        return (EngineGroup("regular", pool // engine_gpus, pool, experiment.hicache, eagle),)
    prefill = min(experiment.prefill_gpus or engine_gpus, pool)
    decode = pool - prefill
    return (
        EngineGroup("prefill", prefill // engine_gpus, prefill, experiment.hicache, eagle),
        EngineGroup("decode", decode // engine_gpus, decode, False, eagle),
    )


def _make_records(
    experiment: Experiment, recipe: Recipe, dp: int, edp: int, groups: tuple[EngineGroup, ...]
) -> tuple[GpuRecord, ...]:
    per_node = recipe.gpus_per_node
    train = (experiment.nodes or 0) * per_node
    is_colocated = experiment.layout == "colocate"
    engine_of: list[tuple[str, int]] = []
    engine = 0
    for group in groups:
        role = "rollout" if group.role == "regular" else group.role
        for _ in range(group.num_engines):
            engine_of.extend([(role, engine)] * recipe.engine_gpus)
            engine += 1
        engine_of.extend([(role, -1)] * (group.gpus - group.num_engines * recipe.engine_gpus))
    tp, cp, pp, ep, etp = recipe.tp, recipe.cp, recipe.pp, recipe.ep, recipe.etp
    per_stage = train // pp
    records = []
    for rank in range(train):
        stage, in_stage = divmod(rank, per_stage)
        role = "train"
        serves = -1
        if is_colocated and rank < len(engine_of):
            group_role, serves = engine_of[rank]
            role = "colocated" if group_role == "rollout" else group_role
        records.append(
            GpuRecord(
                rank // per_node,
                rank % per_node,
                role,
                rank,
                in_stage % tp,
                in_stage // tp % cp,
                in_stage // (tp * cp) % dp,
                stage,
                in_stage // etp % ep,
                in_stage // (etp * ep) % edp,
                serves,
            )
        )
    if not is_colocated:
        for position, (role, serves) in enumerate(engine_of):
            place = train + position
            records.append(GpuRecord(place // per_node, place % per_node, role, -1, -1, -1, -1, -1, -1, -1, serves))
    return tuple(records)


def compute_layout(
    experiment: Experiment, catalog: Catalog | None = None, model: Model | None = None, *, with_gpus: bool = True
) -> Layout:
    """Place an experiment on nodes and GPUs.

    Args: with_gpus: make the per-GPU records too; a search over many layouts does not need them.
    Raises: InputError `unknown_model` when the model is not in the catalogue.
    """
    catalog = catalog or load_catalog()
    experiment = resolve(experiment, catalog)
    model = model or find_model(catalog, experiment.model)
    recipe = effective_recipe(experiment, model)
    nodes = experiment.nodes or recipe.nodes
    train = nodes * recipe.gpus_per_node
    grid = recipe.tp * recipe.cp * recipe.pp
    expert_grid = recipe.etp * recipe.ep * recipe.pp
    dp = train // grid if train % grid == 0 else 0
    edp = train // expert_grid if train % expert_grid == 0 else 0
    pool = train if experiment.layout == "colocate" else experiment.rollout_gpus or train
    groups = _compute_groups(experiment, recipe.engine_gpus, pool)
    stages = compute_stages(model.arch, recipe)
    is_external = experiment.layout == "external"
    ray = train + (pool if experiment.layout == "separate" else 0)
    records: tuple[GpuRecord, ...] = ()
    if with_gpus and dp and edp:
        records = _make_records(experiment, recipe, dp, edp, () if is_external else groups)
    return Layout(
        kind=experiment.layout,
        nodes=nodes,
        gpus_per_node=recipe.gpus_per_node,
        train_gpus=train,
        rollout_gpus=pool,
        ray_gpus=ray,
        external_gpus=pool if is_external else 0,
        tp=recipe.tp,
        pp=recipe.pp,
        cp=recipe.cp,
        dp=dp,
        ep=recipe.ep,
        etp=recipe.etp,
        edp=edp,
        cp_layout=recipe.cp_layout,
        max_tokens_per_gpu=recipe.max_tokens_per_gpu,
        stages=stages,
        engine_gpus=recipe.engine_gpus,
        engine_dp=recipe.engine_dp,
        engine_ep=recipe.engine_ep,
        num_engines=sum(group.num_engines for group in groups),
        groups=groups,
        producers="distributed" if experiment.straw and experiment.schedule == "async" else "driver",
        gpus=records,
    )


def count_gpus(layout: Layout) -> dict[str, int]:
    """Count GPUs by what they do."""
    by_role = {group.role: group.gpus for group in layout.groups}
    return {
        "train": layout.train_gpus,
        "rollout": layout.rollout_gpus,
        "prefill": by_role.get("prefill", 0),
        "decode": by_role.get("decode", 0),
        "external": layout.external_gpus,
        "ray": layout.ray_gpus,
        "per_node": layout.gpus_per_node,
    }
