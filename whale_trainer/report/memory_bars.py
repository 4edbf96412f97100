"""Memory of each rank as SVG: what the plan puts on it, item by item, against what its device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from whale_trainer.planning.answer import Answer
from whale_trainer.planning.costs.cost_model import MemoryItems
from whale_trainer.planning.costs.memory import size
from whale_trainer.planning.show import MOST_RANKS
from whale_trainer.report.colours import item_colours, kind_colours
from whale_trainer.report.markup import Markup, joined, tag
from whale_trainer.report.step_rows import ROOMY
from whale_trainer.report.tiling import swatch

UNITS = 1000


def memory_bars(answer: Answer) -> Markup:
    """A bar for each rank, all on one scale of bytes, with lines at what can be used and at what the device has."""
    ranks, hint = _ranks(answer)
    devices = answer.plan.devices
    scale = max(max(devices[r].memory_bytes, answer.memory[r].total) for r in ranks)
    items = {f.name: f.name.replace("_", " ") for f in fields(MemoryItems)}
    colours = item_colours(list(items))
    used = [name for name in items if any(getattr(answer.memory[r], name) > 0 for r in ranks)]
    legend = tag(
        "ul",
        *(tag("li", swatch(colours[name]), items[name], data_legend_item=name) for name in used),
        tag("li", tag("i", class_="line usable"), "usable"),
        tag("li", tag("i", class_="line capacity"), "capacity"),
        class_="legend",
    )
    rows = [_row(answer, rank, used, colours, scale) for rank in ranks]
    return joined(
        legend,
        tag("div", *rows, class_="memory dense" if len(rows) > ROOMY else "memory"),
        tag("p", hint, class_="hint") if hint else Markup(""),
    )


def _ranks(answer: Answer) -> tuple[list[int], str]:
    """The ranks with a bar, and in words which these are of a large plan: one of each sort, or the fullest."""
    devices = answer.plan.devices
    first: dict[object, int] = {}
    for rank, device in enumerate(devices):
        sort = (device.kind, device.memory_bytes, answer.memory[rank], answer.usable_bytes[rank])
        first.setdefault(sort if len(devices) > MOST_RANKS else rank, rank)
    sorts = list(first.values())
    if len(sorts) == len(devices) <= MOST_RANKS:
        return sorts, ""
    drawn = sorted(sorted(sorts, key=lambda r: (-_part(answer, r), r))[:MOST_RANKS])
    which = "each other holds the same as one of these" if len(drawn) == len(sorts) else "the fullest"
    return drawn, f"{len(drawn)} of {len(devices)} ranks are drawn, {which}."


def _part(answer: Answer, rank: int) -> float:
    return answer.memory[rank].total / max(1, answer.usable_bytes[rank])


def _row(answer: Answer, rank: int, used: Sequence[str], colours: dict[str, str], scale: int) -> Markup:
    device, items, usable = answer.plan.devices[rank], answer.memory[rank], answer.usable_bytes[rank]
    unit = UNITS / scale
    bars, at = [], 0.0
    for name in used:
        value = float(getattr(items, name))
        if value > 0:
            bars.append(
                tag(
                    "rect",
                    x=at * unit,
                    y=2,
                    width=value * unit,
                    height=16,
                    fill=colours[name],
                    data_item=name,
                    data_bytes=round(value),
                )
            )
        at += value
    marks = [
        tag("line", class_=name, x1=value * unit, x2=value * unit, y1=0, y2=20)
        for name, value in (("usable", usable), ("capacity", device.memory_bytes))
    ]
    track = tag("rect", class_="track", y=2, width=device.memory_bytes * unit, height=16)
    part = _part(answer, rank)
    lines = [
        f"rank {rank}: {device.kind} on {device.node}",
        *(f"{name.replace('_', ' ')} {size(getattr(items, name))}" for name in used if getattr(items, name) > 0),
        f"together {size(items.total)} of {size(usable)} usable, {size(device.memory_bytes)} in all",
    ]
    fill = kind_colours(answer.plan)[device.kind]
    return tag(
        "div",
        tag("span", swatch(fill), tag("b", str(rank)), tag("span", device.kind, class_="more"), class_="name"),
        tag("svg", track, *bars, *marks, viewBox=f"0 0 {UNITS} 20", preserveAspectRatio="none", aria_hidden="true"),
        tag(
            "span",
            tag("b", f"{part:.0%}" if part >= 0.01 or not part else "< 1%"),
            f" {size(items.total)} of {size(usable)}",
            class_="of over" if part > 1 else "of",
        ),
        class_="row",
        data_memory=rank,
        data_planned=items.total,
        data_usable=usable,
        data_capacity=device.memory_bytes,
        data_tip="\n".join(lines),
    )
