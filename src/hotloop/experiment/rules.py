"""The registry of rules: one function per rule, each with a stable code and the choices that it concerns.

Owns: `Facts` (all that a rule may look at), the decorators `error_rule` and `note_rule`, and `run_rules`.

Promises: a rule is a pure function Facts -> the sentences it has to say, usually none or one; it never raises and never
changes a choice. Does not do: hold any rule (checks_*.py, notes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hotloop.errors import render_message
from hotloop.experiment.catalog.records import Catalog, Gpu, Model, Recipe
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import Layout
from hotloop.experiment.records import Finding, MemoryPlan, Staleness
from hotloop.experiment.resume import ResumePlan
from hotloop.experiment.throughput import Timings


class ResumeFacts(NamedTuple):
    """What the caller found in the folder of `resume_from`. Reading it is not the planner's work."""

    latest_iteration: int | None
    """Number in the tracker file; None when the folder has no tracker."""
    before: Experiment | None = None
    """The experiment that saved it, when it is known."""


class Facts(NamedTuple):
    """Everything that a rule may look at."""

    experiment: Experiment
    """Resolved."""
    given: Experiment
    """As the user wrote it."""
    model: Model
    recipe: Recipe
    gpu: Gpu
    layout: Layout
    memory: MemoryPlan
    timings: Timings
    staleness: Staleness
    catalog: Catalog
    resume: ResumePlan | None
    resume_facts: ResumeFacts | None
    host_ram_bytes: int


class Say(NamedTuple):
    """One thing that a rule has to say, in the parts of every message."""

    where: str
    why: str
    do: str = ""
    fields: tuple[str, ...] | None = None
    """Choices concerned, where they differ from the rule's."""


RuleFunction = Callable[[Facts], Iterable[Say]]


class Rule(NamedTuple):
    """One registered rule."""

    code: str
    fields: tuple[str, ...]
    function: RuleFunction
    is_error: bool


_RULES: dict[str, Rule] = {}


def _register(code: str, fields: tuple[str, ...], is_error: bool) -> Callable[[RuleFunction], RuleFunction]:
    def keep(function: RuleFunction) -> RuleFunction:
        if code in _RULES:
            raise ValueError(f"two rules are called {code}")
        _RULES[code] = Rule(code, fields, function, is_error)
        return function

    return keep


def error_rule(code: str, *fields: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule whose findings stop an export and a run."""
    return _register(code, fields, True)


def note_rule(code: str, *fields: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule whose findings do not stop anything."""
    return _register(code, fields, False)


def list_rules() -> tuple[Rule, ...]:
    """List every registered rule, in the order in which they are run."""
    return tuple(_RULES.values())


def make_finding(code: str, say: Say, fields: tuple[str, ...]) -> Finding:
    """Turn what a rule said into a finding."""
    message = render_message(code, say.why, where=say.where, do=say.do)
    return Finding(code, message, say.fields if say.fields is not None else fields)


def run_rules(facts: Facts, *, is_error: bool) -> tuple[Finding, ...]:
    """Run every error rule, or every note rule."""
    return tuple(
        make_finding(rule.code, say, rule.fields)
        for rule in _RULES.values()
        if rule.is_error is is_error
        for say in rule.function(facts)
    )


def show(value: Any) -> str:
    """Write a value inside a message; text is quoted so that an empty one shows."""
    if isinstance(value, str):
        return f'"{value}"' if not value or any(c in value for c in " \t\n'\"") else value
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
