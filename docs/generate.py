"""Write the reference pages that follow from the code: `python docs/generate.py`; `--check` fails on a difference.

Owns: docs/reference/cli.md (from the click commands), docs/reference/experiment.md (from the schema's fields and the
strings under them) and the file tree of README.md (from module docstrings).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hotloop"
TREE_BEGIN, TREE_END = "<!-- tree: begin -->", "<!-- tree: end -->"


def render_cli() -> str:
    """Describe every command, argument and option."""
    from hotloop.cli.main import COMMANDS, root

    lines = ["# Command line", "", "Written by `python docs/generate.py`; change the commands, not this page.", ""]
    lines += [
        "Exit codes: 0 fine, 1 the run failed, 2 bad input, 3 the environment lacks something, 130 interrupted.",
        "",
    ]
    context = click.Context(root, info_name="hotloop")
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        lines += [f"## hotloop {name}", "", COMMANDS[name], ""]
        lines += _describe(command, f"hotloop {name}", context)
    return "\n".join(lines).rstrip() + "\n"


def _describe(command: click.Command, path: str, parent: click.Context) -> list[str]:
    context = click.Context(command, info_name=path.split()[-1], parent=parent)
    lines: list[str] = []
    if command.help:
        lines += [" ".join(command.help.split()), ""]
    rows = []
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Argument):
            rows.append((f"`{parameter.make_metavar(context)}`", "argument"))
        elif isinstance(parameter, click.Option) and "--help" not in parameter.opts:
            record = parameter.get_help_record(context)
            if record:
                rows.append((f"`{record[0]}`", record[1]))
    if rows:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| {name.replace('|', chr(92) + '|')} | {text.replace('|', '/')} |" for name, text in rows] + [""]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            lines += [f"### {path} {name}", "", *_describe(child, f"{path} {name}", context)]
    return lines


def render_experiment() -> str:
    """Describe every key of an experiment file."""
    lines = ["# Experiment file", "", "Written by `python docs/generate.py`; change the schema, not this page.", ""]
    lines += [
        "TOML or JSON. Keys are snake_case; camelCase is read too. An empty value (`None`) follows the model's recipe.",
        "",
    ]
    for module in ("choices", "sections"):
        tree = ast.parse((SOURCE / "experiment" / f"{module}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Section":
                lines += _describe_record(node)
    return "\n".join(lines).rstrip() + "\n"


def _describe_record(node: ast.ClassDef) -> list[str]:
    docstring = (ast.get_docstring(node) or "").splitlines()[0]
    lines = [f"## {node.name}", "", docstring, "", "| key | type and default | meaning |", "|---|---|---|"]
    for position, statement in enumerate(node.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        following = node.body[position + 1] if position + 1 < len(node.body) else None
        meaning = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meaning = " ".join(str(following.value.value).split())
        kind = ast.unparse(statement.annotation)
        default = ast.unparse(statement.value) if statement.value is not None else "required"
        default = default.replace(".model_construct()", "()")  # A section of defaults, whichever way it is built.
        cell = f"`{kind} = {default}`".replace("|", chr(92) + "|")
        lines.append(f"| `{statement.target.id}` | {cell} | {meaning.replace('|', '/')} |")
    return [*lines, ""]


def render_tree() -> str:
    """One line per module: its path and the first sentence of its docstring."""
    lines = ["```"]
    for path in _modules():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = docstring.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")
        if first:
            lines.append(f"{path.relative_to(ROOT / 'src')!s:<46} {first}")
    return "\n".join([*lines, "```"])


def _modules() -> Iterator[Path]:
    return iter(sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"))


def render_readme(text: str) -> str:
    """Replace the file tree between its two marks."""
    before, _, rest = text.partition(TREE_BEGIN)
    _, _, after = rest.partition(TREE_END)
    return f"{before}{TREE_BEGIN}\n{render_tree()}\n{TREE_END}{after}"


def main() -> int:
    """Write the pages, or with `--check` name those that differ and return 1."""
    readme = ROOT / "README.md"
    pages = {
        ROOT / "docs" / "reference" / "cli.md": render_cli(),
        ROOT / "docs" / "reference" / "experiment.md": render_experiment(),
        readme: render_readme(readme.read_text()),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
