"""From an experiment to the facts that rules look at, and from facts to findings.

Owns: `collect_facts`, `collect_errors`, `collect_notes`, `plan_resume`: the steps that plan.py shows and repairs.py
repeats on every candidate.

Promises: pure. Does not do: decide what a plan contains (plan.py).
"""

from __future__ import annotations

from hotloop.experiment.argv_rules import check_argv, note_argv
from hotloop.experiment.catalog.load import find_gpu, find_model
from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.checks import find_errors
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import compute_layout
from hotloop.experiment.memory import HOST_RAM_BYTES, compute_memory
from hotloop.experiment.notes import find_notes
from hotloop.experiment.records import Finding
from hotloop.experiment.resolve import effective_recipe, resolve
from hotloop.experiment.resume import ResumePlan, compute_end_for_more, compute_resume
from hotloop.experiment.rules import Facts, ResumeFacts
from hotloop.experiment.staleness import predict_staleness
from hotloop.experiment.throughput import compute_timings

SAVE_INTERVAL = 20
"""Rounds between saves that the export writes; 1 with the persistent queue."""


def plan_resume(experiment: Experiment, facts: ResumeFacts | None) -> ResumePlan | None:
    """Compute what a resumed run does; None without a folder, or when nobody read it.

    Args: experiment: resolved.
    """
    if not experiment.resume_from or facts is None:
        return None
    end = experiment.rounds
    if experiment.rounds_more is not None:
        first = 0 if facts.latest_iteration is None else facts.latest_iteration + 1
        end = compute_end_for_more(first, experiment.rounds_more)
    sampling = experiment.sampling
    per_round = sampling.num_groups * sampling.group_size
    return compute_resume(
        facts.latest_iteration,
        end,
        interval=1 if experiment.straw else SAVE_INTERVAL,
        num_groups=sampling.num_groups,
        group_size=sampling.group_size,
        global_batch=max(1, per_round // experiment.optimizer.steps_per_round),
    )


def collect_facts(
    experiment: Experiment,
    catalog: Catalog,
    resume: ResumeFacts | None = None,
    host_ram_bytes: int = HOST_RAM_BYTES,
    *,
    in_full: bool = True,
) -> Facts:
    """Compute everything that rules look at.

    Args: in_full: with per-GPU records and the largest lever, which no rule decides by.
    Raises: InputError `unknown_model` or `unknown_gpu`.
    """
    model = find_model(catalog, experiment.model)
    gpu = find_gpu(catalog, experiment.gpu)
    resolved = resolve(experiment, catalog)
    recipe = effective_recipe(resolved, model)
    layout = compute_layout(resolved, catalog, model, with_gpus=in_full)
    memory = compute_memory(resolved, catalog, layout=layout, host_ram_bytes=host_ram_bytes, with_lever=in_full)
    timings = compute_timings(resolved, model, recipe, gpu, layout, memory)
    return Facts(
        experiment=resolved,
        given=experiment,
        model=model,
        recipe=recipe,
        gpu=gpu,
        layout=layout,
        memory=memory,
        timings=timings,
        staleness=predict_staleness(resolved, layout, timings),
        catalog=catalog,
        resume=plan_resume(resolved, resume),
        resume_facts=resume,
        host_ram_bytes=host_ram_bytes,
    )


_RESTATED = (
    ("external_pd", "pd_groups", ""),
    ("external_addrs", "flag_arity", "--rollout-external-engine-addrs"),
    ("not_in_target", "flag_value", "--rollout-data-transport"),
)
"""(error of the choices, error of the vector, how its message begins): the second says the first again."""


def _is_restated(finding: Finding, known: set[str]) -> bool:
    return finding.code in known or any(
        choice in known and finding.code == code and finding.message.startswith(start)
        for choice, code, start in _RESTATED
    )


def collect_errors(facts: Facts) -> tuple[Finding, ...]:
    """Return the errors of the choices, then those of the argument vector that the choices did not already give."""
    errors = find_errors(facts)
    known = {error.code for error in errors}
    if facts.model.rollout_only:
        return errors
    found = check_argv(facts.experiment, facts.model, facts.gpu)
    return (*errors, *(finding for finding in found if not _is_restated(finding, known)))


def collect_notes(facts: Facts) -> tuple[Finding, ...]:
    """Return the notes of the choices, then those of the argument vector."""
    notes = find_notes(facts)
    known = {note.code for note in notes}
    if facts.model.rollout_only:
        return notes
    more = (finding for finding in note_argv(facts.experiment, facts.model, facts.gpu) if finding.code not in known)
    return (*notes, *more)
