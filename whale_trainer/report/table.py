"""The plan as a rich table, coloured by device kind."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.answer import Answer
from whale_trainer.planning.picture import drawing
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.show import HEADINGS, MOST_RANKS, device_rows, figures, title

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""By device kind, in order of first appearance."""


def kind_styles(plan: Plan) -> dict[str, Style]:
    """One colour for each device kind of the plan."""
    kinds = dict.fromkeys(device.kind for device in plan.devices)
    return {kind: Style(color=COLOURS[i % len(COLOURS)]) for i, kind in enumerate(kinds)}


def answer_table(answer: Answer, model: ModelSpec) -> Group:
    """What a user reads before a run: the plan, what its step is expected to take, and what else was weighed."""
    parts: list[Group | Text] = [plan_table(answer.plan, model)]
    parts += [Text(line) for line in figures(answer)]
    return Group(*parts)


def plan_table(plan: Plan, model: ModelSpec) -> Group:
    """What a user reads of a plan: devices and their parts, the picture, what is left out and why."""
    styles = kind_styles(plan)
    rows = device_rows(plan, model)
    shown = [i for i in range(len(HEADINGS)) if any(row.cells[i] for row in rows)]
    table = Table(
        title=title(plan), title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False
    )
    for i in shown:
        table.add_column(HEADINGS[i], justify="right" if HEADINGS[i] in ("rank", "work") else "left", no_wrap=True)
    for row in rows[:MOST_RANKS]:
        table.add_row(*(row.narrow_cells[i] for i in shown), style=styles[row.device.kind])
    if len(rows) > MOST_RANKS:
        table.caption = f"… and {len(rows) - MOST_RANKS} more ranks"
    parts: list[Table | Text] = [table, Text(drawing(plan), no_wrap=True, overflow="crop")]
    if plan.left_out:
        listed = ", ".join(f"{plan.left_out.count(name)} x {name}" for name in dict.fromkeys(plan.left_out))
        parts.append(Text(f"left out: {listed}", style="dim"))
    parts += [Text(f"- {note}", style="dim") for note in plan.notes]
    return Group(*parts)
