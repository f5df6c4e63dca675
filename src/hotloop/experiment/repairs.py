"""Edits that clear a finding, each proved by running the checks on the edited experiment.

Owns: `find_repairs`. For every error the candidates are listed from the smallest edit up; a candidate is kept when its
error is gone and no other code has appeared. Disaggregation (PD) has its own order, L40-L43 of the specification:
grow the pool to 2 engines with 1 of prefill; move from colocate to separate; shrink prefill; turn PD off.

Promises: pure; nothing is applied; no repair touches the model, the precision, a path, an address or a device; sizes
are
multiples of the recipe's engine. What a repair cannot know is listed as remaining. Does not do: notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hotloop.errors import InputError
from hotloop.experiment.apply import apply, apply_edit
from hotloop.experiment.checks import find_errors
from hotloop.experiment.checks_grid import list_valid_nodes
from hotloop.experiment.facts import collect_errors, collect_facts
from hotloop.experiment.layout import count_gpus
from hotloop.experiment.memory import PROMPT_TOKENS
from hotloop.experiment.records import Change, Finding, Repair
from hotloop.experiment.rules import Facts

Candidate = tuple[Mapping[str, Any], str]
"""An edit and its title."""

MAX_PER_CODE = 4
"""Repairs shown for one finding; PD has four."""
BUDGETS = ("memory", "staleness")
"""Findings whose candidates are values of a few knobs, from the smallest change up."""
PROTECTED = frozenset(
    {
        "model", "precision", "hf_path", "train_path", "data_path", "save_path", "megatron_path", "weight_dir",
        "local_weight_dir", "draft_path", "straw_dir", "straw_run_id", "straw_declaration", "eval_data", "resume_from",
        "external_addrs", "rdma_device", "generate_hook", "reward_hook",
    }
)  # fmt: skip
"""Choices that no repair may change, directly or by a rule that follows."""

_FACTS_TO_SUPPLY = {"rdma_device": "pd_device", "external_addrs": "external_addrs"}
"""Choice that only the user knows -> the finding that asks for it."""


def list_pd_candidates(facts: Facts) -> Iterator[Candidate]:
    """List the edits that give a disaggregated pool what it lacks, in the order of the specification."""
    engine, pool = facts.layout.engine_gpus, facts.layout.rollout_gpus
    grown = max(2 * engine, -(-pool // engine) * engine)
    if facts.layout.kind == "separate":
        title = f"give rollout {grown} GPUs ({grown // engine} engines) and prefill {engine} (1 engine)"
        yield {"rollout_gpus": grown, "prefill_gpus": engine}, title
    if facts.layout.kind == "colocate":
        title = f"separate the engines: {2 * engine} rollout GPUs (2 engines), {engine} of them prefill"
        yield {"layout": "separate", "rollout_gpus": 2 * engine, "prefill_gpus": engine}, title
    fitting = (pool // engine - 1) * engine
    prefill = facts.experiment.prefill_gpus or engine
    if fitting >= engine and pool % engine == 0:
        shrunk = min(fitting, max(engine, prefill // engine * engine))
        yield {"prefill_gpus": shrunk}, f"shrink prefill to {shrunk} GPUs ({shrunk // engine} engines)"
    yield {"pd": False}, "turn PD off"


def _list_nodes(facts: Facts) -> Iterator[Candidate]:
    near = facts.layout.nodes
    found = list_valid_nodes(facts, near)
    for nodes in sorted(found, key=lambda count: abs(count - near)):
        yield {"nodes": nodes}, f"train on {nodes} nodes"


def _list_engine_sizes(facts: Facts) -> Iterator[Candidate]:
    engine, pool = facts.layout.engine_gpus, facts.layout.rollout_gpus
    if facts.layout.kind == "colocate":
        yield from _list_nodes(facts)
        yield {"layout": "separate", "rollout_gpus": engine}, f"separate the engines: {engine} rollout GPUs"
        return
    below = pool // engine * engine
    for size in sorted((size for size in (below, below + engine) if size), key=lambda size: abs(size - pool)):
        yield {"rollout_gpus": size}, f"use {size} rollout GPUs"


def _list_memory_edits(facts: Facts) -> Iterator[Candidate]:
    experiment = facts.experiment
    single: list[Candidate] = []
    if not experiment.recompute:
        single.append(({"recompute": True}, "recompute activations"))
    if experiment.cpu_adam:
        single.append(({"cpu_adam": False}, "keep the optimizer on the GPUs"))
    else:
        single.append(({"cpu_adam": True}, "keep the optimizer on the host"))
    if experiment.hicache:
        single.append(({"hicache": False}, "turn HiCache off"))
    if experiment.kv_dtype != "fp8" and facts.gpu.has_fp8:
        single.append(({"kv_dtype": "fp8"}, "keep KV in FP8"))
    yield from single
    if facts.memory.requests_capacity < 1:
        for value in _halve(experiment.response_tokens):
            yield {"response_tokens": value}, f"lower response_tokens to {value}"
    for index, (first, first_title) in enumerate(single):
        for second, second_title in single[index + 1 :]:
            yield {**first, **second}, f"{first_title} and {second_title}"
    nodes = facts.layout.nodes
    for factor in (2, 4, 8):
        if nodes * factor <= 512:
            yield {"nodes": nodes * factor}, f"train on {nodes * factor} nodes (DP x {factor})"
            if not experiment.recompute:
                yield {"nodes": nodes * factor, "recompute": True}, f"train on {nodes * factor} nodes and recompute"
    if facts.layout.kind == "colocate":
        yield {"layout": "separate"}, "give the engines GPUs of their own"


def _halve(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _list_staleness_edits(facts: Facts) -> Iterator[Candidate]:
    if facts.experiment.schedule == "sync":
        yield {"partial": False}, "turn partial rollouts off"
        return
    for value in _halve(facts.experiment.concurrency):
        yield {"concurrency": value}, f"lower concurrency to {value}"
    for value in _halve(facts.experiment.response_tokens):
        yield {"response_tokens": value}, f"lower response_tokens to {value}"
    yield {"schedule": "sync"}, "use the sync schedule"


def _list_shorter(facts: Facts) -> Iterator[Candidate]:
    room = facts.recipe.max_tokens_per_gpu * facts.recipe.cp - PROMPT_TOKENS
    if room >= 1:
        yield {"response_tokens": room}, f"lower response_tokens to {room}"


def _list_steps(facts: Facts) -> Iterator[Candidate]:
    rollouts = facts.experiment.sampling.num_groups * facts.experiment.sampling.group_size
    steps = next(n for n in range(facts.experiment.optimizer.steps_per_round, 0, -1) if rollouts % n == 0)
    yield {"optimizer.steps_per_round": steps}, f"split a round into {steps} optimizer steps"


def _list_rounds(facts: Facts) -> Iterator[Candidate]:
    if facts.resume is not None:
        end = facts.resume.first_round + 1
        yield {"rounds": end}, f"set rounds to {end}, which runs one more round"


def _fixed(*candidates: Candidate) -> Callable[[Facts], Iterator[Candidate]]:
    return lambda facts: iter(candidates)


_TO_SEPARATE: Candidate = ({"layout": "separate"}, "give the engines GPUs of their own")
_TO_SYNC: Candidate = ({"schedule": "sync"}, "use the sync schedule")
_TO_NCCL: Candidate = ({"transport": "nccl"}, "hand weights over in GPU memory")
_PD_OFF: Candidate = ({"pd": False}, "turn PD off")

CANDIDATES: Mapping[str, Callable[[Facts], Iterator[Candidate]]] = {
    "train_grid": _list_nodes,
    "expert_grid": _list_nodes,
    "engine_multiple": _list_engine_sizes,
    "pd_groups": list_pd_candidates,
    "memory": _list_memory_edits,
    "staleness": _list_staleness_edits,
    "sample_too_long": _list_shorter,
    "batch_steps": _list_steps,
    "resume_runs_nothing": _list_rounds,
    "group_size": _fixed(({"sampling.group_size": 8}, "use groups of 8")),
    "colocate_async": _fixed(_TO_SEPARATE, _TO_SYNC),
    "colocate_transport": _fixed(_TO_NCCL, _TO_SEPARATE),
    "delta_colocate": _fixed(_TO_NCCL, _TO_SEPARATE),
    "r3_dense": _fixed(({"r3": False}, "turn R3 off")),
    "deterministic_async": _fixed(_TO_SYNC, ({"deterministic": False}, "turn deterministic off")),
    "mask_partial": _fixed(({"mask_prefix": False}, "turn prefix masking off"), ({"partial": True}, "turn partial on")),
    "eagle_no_mtp": _fixed(({"eagle": "off"}, "turn EAGLE off")),
    "external_pd": _fixed(_PD_OFF),
    "ssm_ratio": _fixed(({"ssm_ratio": None}, "leave the ratio to SGLang")),
    "gpu_precision": _fixed(({"kv_dtype": "auto"}, "keep KV in BF16")),
    "not_in_target": _fixed(
        ({"slime_target": "v0.4.0"}, "export for slime v0.4.0"),
        ({"sc": False}, "turn score centering off"),
        ({"straw": False}, "turn the persistent queue off"),
        ({"sc": False, "straw": False}, "turn score centering and the persistent queue off"),
    ),
    "sc_conflict": _fixed(({"sc": False}, "turn score centering off")),
    "eval": _fixed(({"eval_mode": "side"}, "evaluate in a second job"), ({"eval_mode": "off"}, "turn evaluation off")),
    "resume": _fixed(({"rounds_more": None}, "leave rounds_more empty")),
    "temperature": _fixed(({"sampling.temperature": 1.0}, "sample at temperature 1")),
    "kl_both": _fixed(
        ({"algorithm.kl_coef": 0.0}, "keep the KL term in the loss"),
        ({"algorithm.kl_loss_coef": 0.0}, "keep the KL term in the reward"),
    ),
    "normalize_advantages": _fixed(({"algorithm.normalize_advantages": True}, "normalise the advantages")),
    "over_sampling": _fixed(({"sampling.over_sampling": None}, "submit as many groups as are kept")),
}
"""Finding -> its candidates, smallest first."""


def _list_remaining(codes: frozenset[str]) -> tuple[str, ...]:
    return tuple(choice for choice, code in _FACTS_TO_SUPPLY.items() if code in codes)


class _Outcome(NamedTuple):
    """An experiment after an edit, and the errors that it has."""

    changes: tuple[Change, ...]
    codes: frozenset[str]
    gpus: Mapping[str, int]


class _Trials:
    """Edits applied to copies of one experiment, each at most once although several errors propose it."""

    def __init__(self, facts: Facts, errors: tuple[Finding, ...]) -> None:
        self._facts = facts
        self._known = {error.code for error in errors}
        self._num_errors = len(errors)
        self._after: dict[str, tuple[Facts, set[str]] | None] = {}
        self._outcomes: dict[str, _Outcome | None] = {}

    def clears(self, code: str, edit: Mapping[str, Any]) -> _Outcome | None:
        """Return what an edit leads to when `code` is gone and nothing new has come, else None.

        The rules of the choices cost a fraction of those of the argument vector and decide most edits: they go first.
        """
        key = repr(sorted(edit.items()))
        if key not in self._after:
            self._after[key] = self._run_choice_rules(edit)
        after = self._after[key]
        if after is None or code in after[1] or not after[1] <= self._known:
            return None
        if key not in self._outcomes:
            self._outcomes[key] = self._run_every_rule(edit, after[0])
        outcome = self._outcomes[key]
        return None if outcome is None or code in outcome.codes else outcome

    def _run_choice_rules(self, edit: Mapping[str, Any]) -> tuple[Facts, set[str]] | None:
        facts = self._facts
        try:
            edited = apply(facts.given, edit, facts.catalog)
        except InputError:
            # The schema refuses the size: there is no such repair.
            return None
        after = collect_facts(edited, facts.catalog, facts.resume_facts, facts.host_ram_bytes, in_full=False)
        return after, {error.code for error in find_errors(after)}

    def _run_every_rule(self, edit: Mapping[str, Any], after: Facts) -> _Outcome | None:
        errors = collect_errors(after)
        codes = frozenset(error.code for error in errors)
        if not codes <= self._known or len(errors) >= self._num_errors:
            return None
        applied = apply_edit(self._facts.given, edit, self._facts.catalog)
        changes = (*applied.edited, *applied.followed)
        if any(change.field in PROTECTED for change in changes):
            return None
        return _Outcome(changes, codes, count_gpus(after.layout))


def find_repairs(facts: Facts, errors: tuple[Finding, ...]) -> tuple[Repair, ...]:
    """Return the proved repairs of every error, a few for each code, the smallest first."""
    codes = tuple(dict.fromkeys(error.code for error in errors))
    trials = _Trials(facts, errors)
    repairs: list[Repair] = []
    for code in codes:
        kept: list[Mapping[str, Any]] = []
        for edit, title in CANDIDATES.get(code, _fixed())(facts):
            if len(kept) == MAX_PER_CODE:
                break
            # The first value of a knob that helps a budget is its smallest change, and an edit that also turns other
            # knobs does more than it must.
            if code in BUDGETS and any(set(smaller) <= set(edit) for smaller in kept):
                continue
            outcome = trials.clears(code, edit)
            if outcome is None:
                continue
            kept.append(edit)
            repairs.append(
                Repair(
                    code=code,
                    title=title,
                    edit=dict(edit),
                    changes=outcome.changes,
                    clears=tuple(name for name in codes if name not in outcome.codes),
                    gpus_after=outcome.gpus,
                    remaining=_list_remaining(outcome.codes),
                )
            )
    return tuple(repairs)
