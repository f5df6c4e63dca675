"""Every error that stops an export and a run: the one list of rules that the plan evaluates.

Owns: `find_errors` and the order of the rules. The rules lie beside their kind: checks_grid (sizes), checks_choices
(contradictions), checks_text (free text), checks_budget (memory, age, resume).

Promises: all findings of one experiment together, each with a stable code that has an entry in
docs/reference/checks.md.
Does not do: rules on the final argument vector (argv_rules.py), notes (notes.py).
"""

from __future__ import annotations

from hotloop.experiment import checks_budget, checks_choices, checks_grid, checks_text
from hotloop.experiment.records import Finding
from hotloop.experiment.rules import Facts, Rule, list_rules, run_rules

RULE_MODULES = (checks_grid, checks_choices, checks_text, checks_budget)
"""Importing them registers their rules."""


def find_errors(facts: Facts) -> tuple[Finding, ...]:
    """Return every error of an experiment."""
    return run_rules(facts, is_error=True)


def list_error_rules() -> tuple[Rule, ...]:
    """List the rules whose findings are errors."""
    return tuple(rule for rule in list_rules() if rule.is_error)
