"""X01: where the bytes go. Itemised memory of the worst GPU while training and while serving, and of a node's host.

Owns: `compute_memory` and the rows behind it. Training takes the pipeline stage that needs most; serving one engine
GPU; the host the kind of node that needs most. A verdict per phase: `fits`, `tight` (under 10 % left) or `over`.

Promises: pure; the rows of a phase add up to its total; every row carries its formula with the numbers in it.
Everything is an estimate with its assumptions listed, except what follows from shapes alone (weights, gradients,
optimizer, logits, KV), which is exact. Does not do: time (throughput.py), advice beyond the largest lever (repairs.py).

Source: algorithms.md 10 and 11; constants marked "our decision" there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hotloop.experiment.backends import MEGATRON, ActivationShape, Backend
from hotloop.experiment.catalog.load import find_gpu, find_model, load_catalog
from hotloop.experiment.catalog.records import Catalog, Gpu, Model, Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import Layout, compute_layout
from hotloop.experiment.parameters import LocalParams, count_stage_params
from hotloop.experiment.records import Lever, MemoryPlan, MemoryRow, MemoryTotal, Phase, Verdict
from hotloop.experiment.resolve import effective_recipe, read_slime_arg, resolve
from hotloop.experiment.serving_memory import ServingMemory, compute_serving_memory
from hotloop.units import GIB

HOST_RAM_BYTES = 1_500_000_000_000
"""Host memory of a node unless the caller knows better."""
RESIDUE_BYTES = 4 * GIB
"""Kept back on a GPU for contexts and communication buffers (our decision)."""
STAGING_BYTES = GIB
"""GPU staging of the CPU optimizer (our decision)."""
PROMPT_TOKENS = 1024
"""Assumed longest prompt; the math data's prompts are shorter (our decision)."""
TIGHT_FRAC = 0.9
HICACHE_RATIO = 2
"""Host cache over device pool, as the export writes it."""


def judge(used: int, capacity: int) -> Verdict:
    """Return `over` above the capacity, `tight` with under 10 % left, else `fits`."""
    if used > capacity:
        return "over"
    return "tight" if used > TIGHT_FRAC * capacity else "fits"


class _Case(NamedTuple):
    """Everything that the rows of one experiment are computed from."""

    experiment: Experiment
    model: Model
    recipe: Recipe
    gpu: Gpu
    layout: Layout
    backend: Backend
    serving: ServingMemory
    dp: int
    edp: int
    microbatches: int

    @property
    def is_colocated(self) -> bool:
        return self.experiment.layout == "colocate"


def count_microbatches(experiment: Experiment, recipe: Recipe, dp: int) -> int:
    """Count the microbatches of a step on one data-parallel rank when every sample is as long as allowed."""
    sampling = experiment.sampling
    rollouts = -(-sampling.num_groups * sampling.group_size // experiment.optimizer.steps_per_round)
    per_bin = max(1, recipe.max_tokens_per_gpu * recipe.cp // (PROMPT_TOKENS + experiment.response_tokens))
    return max(1, -(-rollouts // (per_bin * max(1, dp))))


def _optimizer_bytes(case: _Case, local: LocalParams) -> tuple[int, str]:
    per = case.backend.optimizer_bytes
    if not case.backend.shards_optimizer:
        return per * local.total, f"{per} x {local.total:,} parameters"
    dense_ways = case.dp * case.recipe.cp
    size = -(-per * local.dense // dense_ways) + -(-per * local.experts // case.edp)
    text = f"{per} x {local.dense:,} / (DP {case.dp} x CP {case.recipe.cp})"
    if local.experts:
        text += f" + {per} x {local.experts:,} expert parameters / EDP {case.edp}"
    return size, text


def compute_logits_bytes(tokens: int, vocab_size: int, tp: int, bytes_per_logit: int = 4) -> int:
    """Bytes of one copy of the logits on one GPU: tokens x vocab / TP x 4."""
    return -(-tokens * vocab_size // tp) * bytes_per_logit


def _logits_row(case: _Case, tokens: int) -> tuple[int, str]:
    vocab, tp, backend = case.model.arch.vocab_size, case.recipe.tp, case.backend
    one = compute_logits_bytes(tokens, vocab, tp, backend.logit_bytes)
    text = f"{tokens:,} tokens x {vocab:,} / TP {tp} x {backend.logit_bytes}"
    chunk = read_slime_arg(case.experiment, "--log-probs-chunk-size")
    if chunk is not None and chunk.isdecimal() and 0 < int(chunk) < tokens:
        part = compute_logits_bytes(int(chunk), vocab, tp, backend.logit_bytes)
        return one + (
            backend.logit_copies - 1
        ) * part, f"{text}, and {backend.logit_copies - 1} copies of {chunk} tokens"
    return one * backend.logit_copies, f"{text} x {backend.logit_copies} copies (logits, softmax, gradient)"


def _train_rows(case: _Case, stage_index: int) -> Iterator[MemoryRow]:
    layout, recipe, backend = case.layout, case.recipe, case.backend
    stage = layout.stages[stage_index]
    where = f"gpu, stage {stage_index + 1} of {len(layout.stages)}"
    local = count_stage_params(case.model.arch, recipe, stage, with_norms=backend.counts_norms)

    def row(item: str, size: int, formula: str) -> MemoryRow:
        return MemoryRow("train", where, item, size, formula)

    yield row("weights", backend.weight_bytes * local.total, f"{backend.weight_bytes} x {local.total:,} parameters")
    yield row(
        "gradients", backend.gradient_bytes * local.total, f"{backend.gradient_bytes} x {local.total:,} parameters"
    )
    size, formula = _optimizer_bytes(case, local)
    if case.experiment.cpu_adam:
        staging = min(STAGING_BYTES, size)
        yield row("optimizer staging", staging, f"the smaller of 1 GiB and {formula}; the state is on the host")
    else:
        yield row("optimizer", size, formula)
    tokens = recipe.max_tokens_per_gpu
    in_flight = min(recipe.pp - stage_index, case.microbatches)
    sequence = PROMPT_TOKENS + case.experiment.response_tokens
    shape = ActivationShape(
        case.model.arch,
        tokens,
        recipe.tp,
        stage.num_layers,
        in_flight,
        case.experiment.recompute,
        sequence,
        stage.has_head,
    )
    size, formula = backend.count_activations(shape)
    yield row("activations", size, formula)
    if stage.has_head:
        if backend.logits_of_responses_only:
            tokens = max(1, tokens // sequence) * case.experiment.response_tokens
        size, formula = _logits_row(case, tokens)
        yield row("logits", size, formula)
    yield row("residue", RESIDUE_BYTES, "4 GiB kept back for contexts and communication buffers")


def _rollout_rows(case: _Case) -> Iterator[MemoryRow]:
    where = "gpu, decode engine" if case.experiment.pd else "gpu, engine"
    for item, size, formula in case.serving.items:
        yield MemoryRow("rollout", where, item, size, formula)
    if case.is_colocated:
        yield MemoryRow("rollout", where, "residue", RESIDUE_BYTES, "4 GiB that the idle trainer keeps")


def _count_hicache_ranks(case: _Case) -> int:
    """GPUs of one node whose engines have a host cache."""
    return min(case.layout.gpus_per_node, max((g.gpus for g in case.layout.groups if g.hicache), default=0))


def _trainer_host_rows(case: _Case, where: str) -> Iterator[MemoryRow]:
    per_node = case.layout.gpus_per_node
    locals_ = [
        count_stage_params(case.model.arch, case.recipe, stage, with_norms=case.backend.counts_norms)
        for stage in case.layout.stages
    ]
    worst = max(locals_, key=lambda local: local.total)
    optimizer, formula = _optimizer_bytes(case, worst)
    if case.experiment.cpu_adam:
        yield MemoryRow("host", where, "CPU optimizer", optimizer * per_node, f"({formula}) x {per_node} GPUs")
    if case.is_colocated:
        weights, gradients = case.backend.weight_bytes, case.backend.gradient_bytes
        size = (weights + gradients) * worst.total
        text = f"({weights} + {gradients}) x {worst.total:,} parameters"
        if not case.experiment.cpu_adam:
            size += optimizer
            text += f" + {formula}"
        yield MemoryRow("host", where, "offloaded trainer", size * per_node, f"({text}) x {per_node} GPUs")
    if case.experiment.algorithm.kl_coef or case.experiment.algorithm.kl_loss_coef:
        size = case.backend.weight_bytes * worst.total * per_node
        yield MemoryRow("host", where, "reference policy", size, f"2 x {worst.total:,} parameters x {per_node} GPUs")


def _engine_host_rows(case: _Case, where: str) -> Iterator[MemoryRow]:
    per_node = case.layout.gpus_per_node
    if case.is_colocated:
        size = case.serving.weight_bytes
        yield MemoryRow("host", where, "offloaded engine weights", size * per_node, f"{size:,} x {per_node} GPUs")
    ranks = _count_hicache_ranks(case)
    if ranks:
        pool = case.serving.kv_pool_bytes
        formula = f"{HICACHE_RATIO} x KV pool {pool:,} x {ranks} ranks on a node"
        yield MemoryRow("host", where, "HiCache", HICACHE_RATIO * pool * ranks, formula)


def _host_nodes(case: _Case) -> list[list[MemoryRow]]:
    """Rows of each kind of node."""
    if not case.layout.stages:
        return [[]]
    if case.is_colocated:
        return [[*_trainer_host_rows(case, "node"), *_engine_host_rows(case, "node")]]
    trainer = list(_trainer_host_rows(case, "trainer node"))
    engine = [] if case.experiment.layout == "external" else list(_engine_host_rows(case, "rollout node"))
    return [trainer, engine]


def _sum_item(nodes: list[list[MemoryRow]], item: str) -> int:
    return sum(row.bytes for rows in nodes for row in rows if row.item == item)


def _assumptions(case: _Case) -> tuple[str, ...]:
    lines = [
        f"estimate: prompts of at most {PROMPT_TOKENS} tokens, responses of {case.experiment.response_tokens}",
        "estimate: the microbatch is full: max_tokens_per_gpu on every GPU",
        "estimate: 34 bytes per hidden value and layer for activations, as published for a dense layer with "
        "flash attention",
        "norms and biases are not counted",
    ]
    if case.model.arch.moe:
        lines.append("estimate: tokens are spread evenly over the experts")
    if case.experiment.precision in ("fp8train",):
        lines.append("estimate: FP8 copies of the trainer's weights are transient and not counted")
    if case.model.arch.is_hybrid:
        lines.append("estimate: the recurrent state is float32 unless a dtype is chosen")
    if case.experiment.eagle == "external":
        lines.append("estimate: the external draft model is not counted; its size is not known here")
    if case.experiment.cpu_adam:
        lines.append("estimate: pinned transfer copies of the CPU optimizer are not counted")
    return (*lines, *case.serving.assumptions)


def _make_case(experiment: Experiment, catalog: Catalog, backend: Backend, layout: Layout | None) -> _Case:
    model = find_model(catalog, experiment.model)
    gpu = find_gpu(catalog, experiment.gpu)
    recipe = effective_recipe(experiment, model)
    layout = layout or compute_layout(experiment, catalog, model, with_gpus=False)
    sequence = PROMPT_TOKENS + experiment.response_tokens
    serving = compute_serving_memory(experiment, model, recipe, gpu, sequence, backend)
    dp, edp = max(1, layout.dp), max(1, layout.edp)
    return _Case(
        experiment, model, recipe, gpu, layout, backend, serving, dp, edp, count_microbatches(experiment, recipe, dp)
    )


def _rows_of(case: _Case) -> tuple[tuple[MemoryRow, ...], tuple[int, ...]]:
    stages = [tuple(_train_rows(case, index)) for index in range(len(case.layout.stages))]
    sums = tuple(sum(row.bytes for row in rows) for rows in stages)
    worst = stages[sums.index(max(sums))] if sums else ()
    rollout = () if case.experiment.layout == "external" else tuple(_rollout_rows(case))
    host = max(_host_nodes(case), key=lambda rows: sum(row.bytes for row in rows))
    return (*worst, *rollout, *host), sums


def _sum_phases(case: _Case, rows: tuple[MemoryRow, ...], host_ram_bytes: int) -> tuple[MemoryTotal, ...]:
    totals = []
    phases: tuple[tuple[Phase, int], ...] = (
        ("train", case.gpu.memory_bytes),
        ("rollout", case.gpu.memory_bytes),
        ("host", host_ram_bytes),
    )
    for phase, capacity in phases:
        used = sum(row.bytes for row in rows if row.phase == phase)
        verdict = judge(used, capacity)
        if phase == "rollout" and case.experiment.layout != "external" and case.serving.requests_per_engine < 1:
            verdict = "over"
        totals.append(MemoryTotal(phase, used, capacity, verdict))
    return tuple(totals)


_ORDER: dict[Verdict, int] = {"fits": 0, "tight": 1, "over": 2}


def choose_tightest(totals: tuple[MemoryTotal, ...]) -> MemoryTotal:
    """Return the phase with the worst verdict, then the fullest. Serving counts only when it is over.

    The engine fills its static share by design, so a full serving GPU says nothing by itself.
    """
    judged = [total for total in totals if total.phase != "rollout" or total.verdict == "over"]
    return max(judged, key=lambda total: (_ORDER[total.verdict], total.bytes / total.capacity_bytes))


def _find_lever(case: _Case, totals: tuple[MemoryTotal, ...], catalog: Catalog, host_ram_bytes: int) -> Lever | None:
    """Try each edit on the tightest phase; keep the one that saves most there."""
    tightest = choose_tightest(totals)
    best: Lever | None = None
    for edit, title in list_levers(case.experiment):
        edited = resolve(case.experiment.model_copy(update=dict(edit)), catalog)
        other = _make_case(edited, catalog, case.backend, None)
        if not other.layout.is_whole:
            continue
        after = _sum_phases(other, _rows_of(other)[0], host_ram_bytes)
        saved = tightest.bytes - next(total.bytes for total in after if total.phase == tightest.phase)
        if saved > 0 and (best is None or saved > best.saves_bytes):
            best = Lever(edit, tightest.phase, saved, title)
    return best


def list_levers(experiment: Experiment) -> list[tuple[Mapping[str, Any], str]]:
    """List the edits that can lower a memory total, whatever they cost elsewhere."""
    levers: list[tuple[Mapping[str, Any], str]] = []
    if not experiment.cpu_adam:
        levers.append(({"cpu_adam": True}, "keep the optimizer on the host"))
    else:
        levers.append(({"cpu_adam": False}, "keep the optimizer on the GPUs"))
    if not experiment.recompute:
        levers.append(({"recompute": True}, "recompute activations"))
    nodes = experiment.nodes or 1
    if nodes * 2 <= 512:
        edit: dict[str, Any] = {"nodes": nodes * 2}
        levers.append((edit, f"train on {nodes * 2} nodes"))
    if experiment.layout == "colocate":
        levers.append(({"layout": "separate"}, "give the engines GPUs of their own"))
    if experiment.hicache:
        levers.append(({"hicache": False}, "turn HiCache off"))
    return levers


def compute_memory(
    experiment: Experiment,
    catalog: Catalog | None = None,
    *,
    layout: Layout | None = None,
    backend: Backend = MEGATRON,
    host_ram_bytes: int = HOST_RAM_BYTES,
    with_lever: bool = True,
) -> MemoryPlan:
    """Account for the memory of an experiment.

    Args: host_ram_bytes: of one node. with_lever: look for the largest lever too, which costs a few more accounts.
    Raises: InputError `unknown_model` or `unknown_gpu`.
    """
    catalog = catalog or load_catalog()
    experiment = resolve(experiment, catalog)
    case = _make_case(experiment, catalog, backend, layout)
    rows, stage_bytes = _rows_of(case)
    totals = _sum_phases(case, rows, host_ram_bytes)
    nodes = _host_nodes(case)
    return MemoryPlan(
        rows=rows,
        totals=totals,
        verdict=max((total.verdict for total in totals), key=_ORDER.__getitem__),
        largest_lever=_find_lever(case, totals, catalog, host_ram_bytes) if with_lever and case.layout.stages else None,
        stage_bytes=stage_bytes,
        cpu_optimizer_bytes=_sum_item(nodes, "CPU optimizer"),
        hicache_bytes=_sum_item(nodes, "HiCache"),
        kv_bytes_per_token=case.serving.kv_bytes_per_token,
        kv_capacity_tokens=case.serving.tokens_per_engine,
        requests_capacity=case.serving.requests_per_engine,
        balanced_state_ratio=case.serving.balanced_state_ratio,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=experiment.response_tokens,
        assumptions=_assumptions(case),
    )
