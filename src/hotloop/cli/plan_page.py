"""The plan as a page of text: layout drawing, memory bars, findings, estimates, launch guide.

Owns: `print_plan`, and the pure functions that lay out its parts (`draw_layout`, `draw_bar`). User text is escaped, so
that nothing in a path is read as markup or obeyed by the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from hotloop.units import format_bytes

if TYPE_CHECKING:
    from hotloop.experiment.layout import GpuRecord, Layout
    from hotloop.experiment.plan import Plan
    from hotloop.experiment.records import Estimate, MemoryRow

LETTERS = {"train": "T", "colocated": "C", "rollout": "R", "prefill": "P", "decode": "D"}
NAMES = {
    "train": "trains",
    "colocated": "trains and serves in turn",
    "rollout": "serves",
    "prefill": "prefills",
    "decode": "decodes",
}
STYLES = {"T": "blue", "C": "magenta", "R": "green", "P": "yellow", "D": "cyan", ".": "dim"}
BAR_WIDTH = 44
VERDICT_STYLES = {"fits": "green", "tight": "yellow", "over": "red"}


def escape(text: str) -> str:
    """Show user text as it is: not as markup, and a control character as its code, since terminals obey those."""
    return escape_markup("".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text))


def print_plan(plan: Plan, console: Console) -> None:
    """Write the page."""
    choices = plan.resolved
    console.rule(f"[bold]{escape(choices.model)}[/] on {choices.gpu}")
    console.print(
        f"{choices.layout}, {choices.schedule}, {choices.precision}, correction {choices.correction}, "
        f"{choices.rounds} rounds of {choices.sampling.num_groups} x {choices.sampling.group_size} rollouts"
    )
    _print_layout(plan.layout, console)
    _print_memory(plan, console)
    _print_findings(plan, console)
    _print_estimates(plan.estimates, console)
    if plan.resume is not None:
        console.print("\n[bold]Resume[/]")
        console.print(escape(_render_resume(plan)))
    _print_launch(plan, console)


def _print_layout(layout: Layout, console: Console) -> None:
    console.print("\n[bold]Layout[/]")
    console.print(
        f"trainer {layout.train_gpus} GPUs = TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp or '?'}, "
        f"experts EP {layout.ep} x ETP {layout.etp} x EDP {layout.edp or '?'} x PP {layout.pp}"
    )
    if layout.stages:
        sizes = " + ".join(str(stage.num_layers) for stage in layout.stages)
        console.print(f"layers by stage: {sizes}")
    for group in layout.groups:
        extra = "".join(f", {name}" for name, on in (("HiCache", group.hicache), ("EAGLE", group.eagle)) if on)
        console.print(
            f"{group.role} engines: {group.num_engines} x {layout.engine_gpus} GPUs = {group.gpus}{extra}",
            highlight=False,
        )
    console.print(f"Ray must offer {layout.ray_gpus} GPUs; {layout.external_gpus} external GPUs are outside Ray")
    for line in draw_layout(layout):
        console.print(line)


def draw_layout(layout: Layout) -> list[str]:
    """Draw nodes as rows of one letter per GPU; nodes that look alike share a row. Rich markup."""
    if not layout.gpus:
        return ["(the sizes do not divide, so there is nothing to draw)"]
    nodes: dict[int, list[GpuRecord]] = {}
    for gpu in layout.gpus:
        nodes.setdefault(gpu.node, []).append(gpu)
    runs: list[tuple[int, int, str, str]] = []
    for number, gpus in nodes.items():
        letters = _draw_node(gpus, layout.gpus_per_node)
        stages = _render_range("stage", [gpu.pp for gpu in gpus if gpu.pp >= 0])
        if runs and runs[-1][1] == number - 1 and runs[-1][2:] == (letters, stages):
            runs[-1] = (runs[-1][0], number, letters, stages)
        else:
            runs.append((number, number, letters, stages))
    lines = []
    for first, last, letters, stages in runs:
        name = f"node {first}" if first == last else f"nodes {first}..{last}"
        painted = " ".join(f"[{STYLES[letter]}]{letter}[/]" for letter in letters)
        lines.append(f"  {name:<14} {painted}  {stages}".rstrip())
    used = [role for role in LETTERS if any(gpu.role == role for gpu in layout.gpus)]
    lines.append("  " + ", ".join(f"{LETTERS[role]} {NAMES[role]}" for role in used))
    return lines


def _draw_node(gpus: Sequence[GpuRecord], per_node: int) -> str:
    by_index = {gpu.slot: LETTERS[gpu.role] for gpu in gpus}
    return "".join(by_index.get(index, ".") for index in range(per_node))


def _render_range(name: str, numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    if not found:
        return ""
    return f"{name} {found[0]}" if len(found) == 1 else f"{name}s {found[0]}..{found[-1]}"


def draw_bar(used: int, capacity: int, width: int = BAR_WIDTH) -> str:
    """Draw how full something is. A bar that is over its capacity is drawn full and ends in `!`."""
    if capacity <= 0:
        return "!" * width if used > 0 else "." * width
    filled = min(width, round(width * used / capacity))
    return "#" * filled + "." * (width - filled) + ("!" if used > capacity else "")


def _print_memory(plan: Plan, console: Console) -> None:
    verdict = plan.verdict
    console.print(f"\n[bold]Memory[/] (estimate, worst GPU): [{VERDICT_STYLES[verdict]}]{verdict}[/]")
    for total in plan.memory_plan.totals:
        style = VERDICT_STYLES[total.verdict]
        console.print(
            f"  {total.phase:<8} [{style}]{draw_bar(total.bytes, total.capacity_bytes)}[/] "
            f"{format_bytes(total.bytes)} of {format_bytes(total.capacity_bytes)}",
            highlight=False,
        )
        console.print(f"           {escape(_render_items([row for row in plan.memory if row.phase == total.phase]))}")
    if plan.largest_lever is not None:
        lever = plan.largest_lever
        console.print(
            f"  largest lever: {escape(lever.title)}, {format_bytes(lever.saves_bytes)} less in {lever.phase}"
        )
    for assumption in plan.memory_plan.assumptions:
        console.print(f"  assumes {escape(assumption)}", style="dim")


def _render_items(rows: Sequence[MemoryRow]) -> str:
    largest = sorted(rows, key=lambda row: -row.bytes)
    shown = [f"{row.item} {format_bytes(row.bytes)}" for row in largest[:5] if row.bytes]
    rest = sum(row.bytes for row in largest[5:])
    return ", ".join(shown + ([f"rest {format_bytes(rest)}"] if rest else []))


def _print_findings(plan: Plan, console: Console) -> None:
    console.print(f"\n[bold]Errors[/] {len(plan.errors)}, [bold]notes[/] {len(plan.notes)}")
    for error in plan.errors:
        console.print(f"  [red]error[/] {escape(error.message)}", highlight=False)
    for note in plan.notes:
        console.print(f"  [yellow]note[/]  {escape(note.message)}", highlight=False)
    for repair in plan.repairs:
        console.print(f"  [green]repair[/] {escape(repair.code)}: {escape(repair.title)}", highlight=False)


def _print_estimates(estimates: Sequence[Estimate], console: Console) -> None:
    if not estimates:
        return
    console.print("\n[bold]Estimates[/] (each with its assumptions in --json)")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    for estimate in estimates:
        table.add_row(escape(estimate.name), f"{estimate.value:,.4g}", escape(estimate.unit))
    console.print(table)


def _render_resume(plan: Plan) -> str:
    resume = plan.resume
    render = getattr(resume, "render", None)
    return f"  {render()}" if callable(render) else f"  {resume}"


def _print_launch(plan: Plan, console: Console) -> None:
    console.print("\n[bold]Launch[/] (shown, never run)")
    for number, step in enumerate(plan.launch, start=1):
        console.print(f"  {number}. [bold]{escape(step.where)}[/]: {escape(step.what)}", highlight=False)
        if step.command:
            console.print(f"     $ {escape(step.command)}", style="cyan", highlight=False, soft_wrap=True)
