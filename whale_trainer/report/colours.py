"""Colours of the page, from the palette of Okabe and Ito (2008), whose hues colour-blind readers can tell apart."""

from __future__ import annotations

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.timeline import Activity

KINDS = ("#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#0072b2", "#d55e00")
"""By device kind in order of first appearance, the hues of `table.COLOURS`; darker from the seventh kind on."""
ACTIVITIES = {
    Activity.FORWARD: "#0072b2",
    Activity.BACKWARD: "#009e73",
    Activity.INPUT: "#56b4e9",
    Activity.WEIGHT: "#f0e442",
    Activity.TRANSFER: "#cc79a7",
    Activity.SUM: "#d55e00",
    Activity.OPTIMIZER: "#8c8c8c",
}
ITEMS = ("#0072b2", "#009e73", "#cc79a7", "#8c8c8c", "#d55e00", "#f0e442", "#56b4e9", "#e69f00", "#6a51a3", "#8a8b2a")
"""By memory item, in the order of its fields."""


def kind_colours(plan: Plan) -> dict[str, str]:
    """A colour for each device kind of the plan."""
    kinds = dict.fromkeys(device.kind for device in plan.devices)
    return {kind: _shade(KINDS[i % len(KINDS)], 0.7 ** (i // len(KINDS))) for i, kind in enumerate(kinds)}


def item_colours(names: list[str]) -> dict[str, str]:
    """A colour for each memory item."""
    return {name: ITEMS[i % len(ITEMS)] for i, name in enumerate(names)}


def ink(colour: str) -> str:
    """Black or white, whichever stands out more on `colour` (WCAG 2.1: contrast of relative luminances)."""
    light = 0.2126 * _linear(colour[1:3]) + 0.7152 * _linear(colour[3:5]) + 0.0722 * _linear(colour[5:7])
    return "#000" if (light + 0.05) ** 2 > 1.05 * 0.05 else "#fff"


def _linear(digits: str) -> float:
    value = int(digits, 16) / 255
    return float(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)


def _shade(colour: str, part: float) -> str:
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * part):02x}" for i in (1, 3, 5))
