"""Prediction beside measurement, as plain text and as figures for loggers. Pure: reads a plan and its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from whale_trainer.planning.costs.memory import size
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.paces import MOST_LATE

MOST_ROWS = 16
"""Ranks that are told one by one."""


def comparison_lines(plan: Plan, summary: Mapping[str, Any]) -> Iterator[str]:
    """What was predicted and what was measured, in a few lines; nothing where there was no step."""
    step_s = summary["step_s"]
    if step_s is None:
        return
    predicted_s = summary["predicted_step_s"]
    if predicted_s is None:
        planned = plan.predicted.step_s
        told = "" if planned is None else f" (predicted for the declared devices: {_milliseconds(planned)})"
        yield (
            f"measured {_milliseconds(step_s)} a step on this machine's CPU, not comparable with the declared devices"
            f"{told}; emulate=true runs at their pace"
        )
        return
    emulation = summary["emulation"]
    bubbles = [_percent(summary[key]) for key in ("predicted_bubble_fraction", "bubble_fraction")]
    yield (
        f"step: predicted {_milliseconds(predicted_s)}, measured {_milliseconds(step_s)} "
        f"({step_s / predicted_s - 1:+.1%}); time without compute: predicted {bubbles[0]}, measured {bubbles[1]}"
    )
    yield from _table(summary["ranks"])
    if emulation is not None:
        late = f"{emulation['late_actions']} of {emulation['actions']} actions late ({emulation['late_fraction']:.1%})"
        yield (
            f"emulated, {emulation['stretch']:,.4g} s here for one of the devices: {late}, "
            f"{emulation['overhead_us_per_action']:.0f} us of the runtime per action"
        )
        if not emulation["holds"]:
            yield (
                f"These figures do not hold: more than {MOST_LATE:.0%} of the actions were late, as when something "
                "else uses this machine, or there were too few steps; run again when it is quiet."
            )


def _table(ranks: list[Mapping[str, Any]]) -> Iterator[str]:
    width = max(len(rank["device"]) for rank in ranks)
    rows: list[tuple[str, ...]] = [
        ("rank", f"{'device':<{width}}", "busy: predicted", "measured", "memory: planned", "  measured")
    ]
    for rank in ranks[:MOST_ROWS]:
        busy = [_percent(rank[key]) for key in ("predicted_busy_fraction", "busy_fraction")]
        memory = ["?" if value is None else size(value) for value in (_planned(rank), rank["peak_memory_bytes"])]
        rows.append((str(rank["rank"]), f"{rank['device']:<{width}}", *busy, *memory))
    for row in rows:
        yield "  " + "  ".join(f"{cell:>{len(heading)}}" for cell, heading in zip(row, rows[0], strict=True))
    if len(ranks) > MOST_ROWS:
        yield f"  and {len(ranks) - MOST_ROWS} more ranks in summary.json"


def comparison_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The same for W&B and its like, by name; what a run does not have is left out."""
    figures = {
        "measured/step_s": summary["step_s"],
        "predicted/step_s": summary["predicted_step_s"],
        "measured/bubble_fraction": summary["bubble_fraction"],
        "predicted/bubble_fraction": summary["predicted_bubble_fraction"],
    }
    for rank in summary["ranks"]:
        number = rank["rank"]
        figures[f"measured/busy_fraction/rank{number}"] = rank["busy_fraction"]
        figures[f"predicted/busy_fraction/rank{number}"] = rank["predicted_busy_fraction"]
        figures[f"measured/memory_bytes/rank{number}"] = rank["peak_memory_bytes"]
        figures[f"predicted/memory_bytes/rank{number}"] = _planned(rank)
    return {name: float(value) for name, value in figures.items() if value is not None}


def _planned(rank: Mapping[str, Any]) -> int | None:
    """Planned bytes of tensors: what the framework takes before is in no measurement."""
    planned: int | None = rank["planned_memory_bytes"]
    return None if planned is None else planned - rank["framework_bytes"]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
