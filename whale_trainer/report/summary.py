"""summary.json: what a run did, in one small file for scripts. Pure: no torch, so that a launcher can write it too."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.paces import MOST_LATE

SCHEMA_VERSION = 1
FILE = "summary.json"


@dataclass(frozen=True)
class Emulation:
    """How well an emulated run kept its pace, over all ranks."""

    stretch: float
    """Seconds of this machine for one of the declared devices."""
    least_stretch: float
    num_actions: int
    num_late: int
    """Actions whose arithmetic took longer than the pace."""
    overhead_s: float
    """Processor time of the runtime between the actions, on this machine."""

    @property
    def late_fraction(self) -> float:
        return self.num_late / self.num_actions if self.num_actions else 0.0

    @property
    def holds(self) -> bool:
        """Whether the figures of the run may be believed."""
        return self.num_actions > 0 and self.late_fraction <= MOST_LATE

    @property
    def overhead_us(self) -> float:
        """Microseconds of the runtime's own work per action."""
        return self.overhead_s / self.num_actions * 1e6 if self.num_actions else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "stretch": self.stretch,
            "least_stretch": self.least_stretch,
            "actions": self.num_actions,
            "late_actions": self.num_late,
            "late_fraction": self.late_fraction,
            "holds": self.holds,
            "overhead_us_per_action": self.overhead_us,
        }


def make_summary(
    plan: Plan,
    *,
    steps: int = 0,
    train_loss: float | None = None,
    val_loss: float | None = None,
    samples_per_s: float | None = None,
    step_s: float | None = None,
    search_s: float | None = None,
    is_comparable: bool = False,
    busy_fractions: Mapping[int, float] | None = None,
    peak_memory_bytes: Mapping[int, int] | None = None,
    emulation: Emulation | None = None,
    exit_code: int = 0,
) -> dict[str, Any]:
    """The contents of summary.json; figures that a run does not have are null.

    `is_comparable`: the run was on the declared devices, so that the plan's prediction may stand beside `step_s`. Of an
    emulated run `step_s` and `samples_per_s` are given in seconds of this machine, and told in those of the devices.
    """
    busy, peak = busy_fractions or {}, peak_memory_bytes or {}
    stretch = 1.0 if emulation is None else emulation.stretch
    predicted = plan.predicted
    predicted_busy = predicted.busy_fractions if is_comparable else ()
    bubble = 1.0 - sum(busy.values()) / len(busy) if busy else None
    return {
        "schema_version": SCHEMA_VERSION,
        "steps": steps,
        "train_loss": train_loss,
        "val_loss": val_loss,
        "samples_per_s": None if samples_per_s is None else samples_per_s * stretch,
        "step_s": None if step_s is None else step_s / stretch,
        "predicted_step_s": predicted.step_s if is_comparable else None,
        "bubble_fraction": bubble,
        "predicted_bubble_fraction": predicted.bubble_fraction if is_comparable else None,
        "search_s": search_s,
        "plan_fingerprint": plan.fingerprint,
        "ranks": [
            {
                "rank": device.rank,
                "device": device.kind,
                "busy_fraction": busy.get(device.rank),
                "predicted_busy_fraction": predicted_busy[device.rank] if predicted_busy else None,
                "peak_memory_bytes": peak.get(device.rank),
                "planned_memory_bytes": device.planned_memory_bytes,
                "framework_bytes": device.framework_bytes,
            }
            for device in plan.devices
        ],
        "emulation": None if emulation is None else emulation.to_dict(),
        "exit": exit_code,
    }


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Write summary.json at once: a reader sees the old file or the whole new one."""
    path = Path(run_dir, FILE)
    beside = path.with_name(FILE + ".tmp")
    beside.write_text(json.dumps(_finite(dict(summary)), indent=2, allow_nan=False) + "\n")
    beside.replace(path)
    return path


def settle_summary(
    run_dir: str | os.PathLike[str], plan: Plan, exit_code: int, *, search_s: float | None = None
) -> Path:
    """Set what only the command knows in a run's summary, and write one if its ranks died before they could."""
    try:
        summary = json.loads(Path(run_dir, FILE).read_text())
    except (OSError, ValueError):
        summary = make_summary(plan)
    return write_summary(run_dir, {**summary, "search_s": search_s, "exit": exit_code})


def _finite(value: Any) -> Any:
    """`value` with null where a number is not finite, which JSON cannot say."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
