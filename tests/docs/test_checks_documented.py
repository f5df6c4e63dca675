"""Every finding of the planner has an entry in docs/reference/checks.md, and no entry is about a code that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hotloop.experiment.facts  # noqa: F401  # importing it registers every rule
from hotloop.experiment.rules import list_rules

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "checks.md"
VECTOR_RULES = ROOT / "src" / "hotloop" / "experiment"


def documented() -> set[str]:
    return set(re.findall(r"^### ([a-z][a-z0-9_]+)$", PAGE.read_text(encoding="utf-8"), flags=re.M))


def codes_in_calls(module: str, function: str) -> set[str]:
    """Literal first arguments of calls of a function in a module of the planner."""
    tree = ast.parse((VECTOR_RULES / module).read_text(encoding="utf-8"))
    return {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == function
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def known() -> set[str]:
    rules = {rule.code for rule in list_rules()}
    vector = codes_in_calls("argv_rules.py", "_find") | codes_in_calls("flags.py", "FlagProblem")
    return rules | vector | codes_in_calls("resume.py", "Problem")


def test_every_finding_has_an_entry() -> None:
    assert known() - documented() == set()


def test_every_entry_is_about_a_finding() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in VECTOR_RULES.glob("*.py"))
    assert {code for code in documented() - known() if f'"{code}"' not in source} == set()


def test_an_entry_says_more_than_its_name() -> None:
    parts = re.split(r"^### ([a-z0-9_]+)$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    for code, text in zip(parts[::2], parts[1::2], strict=True):
        assert len(text.split()) >= 4, code
