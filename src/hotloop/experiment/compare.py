"""Two experiments side by side: A is kept, B is edited.

Owns: `Comparison` (the A/B state that the page's buttons act on), `find_differences`, `compare_plans`.

Promises: everything is immutable, so a saved A cannot change under later edits of B. Differences are taken between
resolved experiments, so they show what a recipe or a dependency rule changed as well. Each side is planned and checked
on its own; what is exported is always B.

Does not do: history (the page's), links (share.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotloop.experiment.catalog.records import Catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.plan import Plan, build_plan
from hotloop.experiment.resolve import resolve


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that A and B do not share."""

    field: str
    """Dotted path, snake_case."""
    a: Any
    b: Any
    """None where the other variant of a section has no such key."""
    is_followed: bool
    """Neither side chose it: it follows from the model's recipe."""


@dataclass(frozen=True, slots=True)
class Side:
    """What a comparison shows of one side."""

    gpus: Mapping[str, int]
    verdict: str
    memory: Mapping[str, int]
    """Bytes of each phase."""
    errors: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The differences of two plans."""

    differences: tuple[Difference, ...]
    a: Side
    b: Side


@dataclass(frozen=True, slots=True)
class Comparison:
    """The A/B state. Every method returns a new one."""

    b: Experiment
    """The one that is edited and exported."""
    a: Experiment | None = None

    def save(self) -> Comparison:
        """Keep B as A (L30), replacing an A that is there (L35)."""
        return Comparison(self.b, self.b)

    def edit(self, b: Experiment) -> Comparison:
        """Put an edited B in place; A stays as it was saved."""
        return Comparison(b, self.a)

    def restore(self) -> Comparison:
        """Put A into B, as one edit (L34); without an A nothing changes."""
        return self if self.a is None else Comparison(self.a, self.a)

    def clear(self) -> Comparison:
        """Forget A; B is untouched (L35)."""
        return Comparison(self.b)


def find_differences(a: Experiment, b: Experiment, catalog: Catalog | None = None) -> tuple[Difference, ...]:
    """Return every value that differs after both are resolved, in the order of the schema (L31).

    Raises: InputError `unknown_model` when a side names a model that the catalogue does not have.
    """
    left, right = _values(resolve(a, catalog)), _values(resolve(b, catalog))
    chosen = {path for side in (a, b) for path in _chosen(side)}
    paths = list(dict.fromkeys((*left, *right)))
    return tuple(
        Difference(path, left.get(path), right.get(path), path not in chosen)
        for path in paths
        if left.get(path) != right.get(path)
    )


def _values(experiment: Experiment) -> dict[str, Any]:
    return dict(flatten(experiment.model_dump(mode="json")))


def _chosen(experiment: Experiment) -> Iterator[str]:
    for path, value in flatten(experiment.model_dump(mode="json")):
        if value is not None:
            yield path


def compare_plans(a: Plan, b: Plan, catalog: Catalog | None = None) -> Report:
    """Return the differences of two plans and what each side comes to (L32)."""
    return Report(find_differences(a.experiment, b.experiment, catalog), _describe(a), _describe(b))


def compare_experiments(a: Experiment, b: Experiment, catalog: Catalog | None = None) -> Report:
    """Plan both sides and compare them."""
    return compare_plans(build_plan(a, catalog=catalog), build_plan(b, catalog=catalog), catalog)


def _describe(plan: Plan) -> Side:
    return Side(
        gpus=plan.gpus,
        verdict=plan.verdict,
        memory={total.phase: total.bytes for total in plan.memory_plan.totals},
        errors=tuple(finding.code for finding in plan.errors),
        notes=tuple(finding.code for finding in plan.notes),
    )
