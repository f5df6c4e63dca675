"""What the repository says of itself is true: references match the code, budgets hold, nothing private is named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hotloop"
MAX_LINES = 600
JOINING_FILES = {"loop/controller.py", "service/gateway.py", "lab/server.py", "cli/main.py"}
MAX_JOINING_LINES = 300
ERROR_CLASSES = re.compile(r"(Error|Problem|VersionNotReady|ReplicaLost)$")


def tracked_files() -> list[Path]:
    """Every file of the repository that git knows or would add."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def source_modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def raised_codes() -> dict[str, str]:
    """Error code -> the module that makes it, read from calls such as `InputError("code", ...)`."""
    found: dict[str, str] = {}
    for path in source_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            code = first.value if isinstance(first, ast.Constant) else None
            if ERROR_CLASSES.search(name) and isinstance(code, str) and re.fullmatch(r"[a-z][a-z0-9_]+", code):
                found.setdefault(code, str(path.relative_to(ROOT)))
    return found


def documented_codes() -> set[str]:
    pages = [*(ROOT / "docs" / "reference" / "errors").glob("*.md"), ROOT / "docs" / "reference" / "checks.md"]
    text = "\n".join(page.read_text() for page in pages if page.exists())
    return set(re.findall(r"^#{2,4} `?([a-z][a-z0-9_]+)`?\s*$", text, flags=re.M))


def test_generated_pages_match_the_code() -> None:
    outcome = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_error_code_says_how_to_recover() -> None:
    missing = {code: where for code, where in raised_codes().items() if code not in documented_codes()}
    assert not missing


def test_no_module_needs_a_scroll_bar_to_explain() -> None:
    long = {}
    for path in source_modules():
        lines = len(path.read_text().splitlines())
        name = str(path.relative_to(SOURCE))
        limit = MAX_JOINING_LINES if name in JOINING_FILES else MAX_LINES
        if lines > limit:
            long[name] = lines
    assert not long


def test_every_module_says_what_it_owns() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in source_modules()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_no_module_hides_a_missing_noun() -> None:
    names = [
        path for path in tracked_files() if re.fullmatch(r"(utils?|helpers?|common|misc|manager)\.(py|ts)", path.name)
    ]
    assert not names


@pytest.mark.parametrize(
    "pattern",
    [
        r"pypi\." + "org",
        "python" + "hosted",
        "npmjs" + r"\.org",
        r"registry\." + "npm",
        "deb" + r"\.debian",
        "/wor" + "k/",
        "/roo" + "t/(?!Megatron-LM|slime)",
    ],
)
def test_nothing_names_a_registry_or_a_machine(pattern: str) -> None:
    found = []
    for path in tracked_files():
        if path.suffix in {".png", ".safetensors", ".zst", ".ico"}:
            continue
        if re.search(pattern, path.read_text(errors="replace")):
            found.append(str(path.relative_to(ROOT)))
    assert not found


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    head = text[:4000]
    assert "make demo" in head and "make test" in head


def test_every_command_of_the_readme_exists() -> None:
    from hotloop.cli.main import COMMANDS, _module_exists

    text = (ROOT / "README.md").read_text()
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.S):
        for command in re.findall(r"\bhotloop ([a-z][a-z-]*)", block):
            assert command in COMMANDS and _module_exists(command), command
        for target in re.findall(r"\bmake ([a-z]+)", block):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M), target
        for example in re.findall(r"\b((?:examples|benchmarks|experiments)/[\w./-]+)", block):
            assert (ROOT / example).exists(), example


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken
