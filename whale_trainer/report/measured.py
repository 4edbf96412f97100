"""measured.json: the last steps of a run, span by span, for the pictures beside the prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline

SCHEMA_VERSION = 1
FILE = "measured.json"


def write_measured(run_dir: Path, steps: Sequence[Timeline]) -> Path:
    """Write the steps, the oldest first."""
    path = run_dir / FILE
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "steps": [asdict(step) for step in steps]}) + "\n")
    return path


def read_measured(run_dir: Path) -> tuple[Timeline, ...]:
    """The steps of a run folder; none where nothing was measured."""
    try:
        data = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError):
        return ()
    return tuple(
        Timeline(
            step["step_s"],
            tuple(Span(**(span | {"activity": Activity(span["activity"])})) for span in step["spans"]),
            tuple(step["busy_fractions"]),
        )
        for step in data["steps"]
    )


def typical(steps: Sequence[Timeline]) -> Timeline:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.step_s)[len(steps) // 2]


def joined(steps: Sequence[Timeline]) -> Timeline:
    """All steps one after the other; `step_s` is that of the typical one."""
    begins = accumulate((step.step_s for step in steps), initial=0.0)
    spans = [
        replace(span, start_s=span.start_s + begin, stop_s=span.stop_s + begin)
        for step, begin in zip(steps, begins, strict=False)
        for span in step.spans
    ]
    spans.sort(key=lambda span: (span.rank, span.start_s, span.stop_s))
    return replace(typical(steps), spans=tuple(spans))
