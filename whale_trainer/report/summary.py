"""summary.json: what a run did, in one small file for scripts. Pure: no torch, so that a launcher can write it too."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whale_trainer.planning.plan import Plan

SCHEMA_VERSION = 1
FILE = "summary.json"


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
    exit_code: int = 0,
) -> dict[str, Any]:
    """The contents of summary.json; figures that a run does not have are null.

    `is_comparable`: the run was on the declared devices, so that the plan's prediction may stand beside `step_s`.
    """
    busy, peak = busy_fractions or {}, peak_memory_bytes or {}
    return {
        "schema_version": SCHEMA_VERSION,
        "steps": steps,
        "train_loss": train_loss,
        "val_loss": val_loss,
        "samples_per_s": samples_per_s,
        "step_s": step_s,
        "predicted_step_s": plan.predicted.step_s if is_comparable else None,
        "search_s": search_s,
        "plan_fingerprint": plan.fingerprint,
        "ranks": [
            {
                "rank": device.rank,
                "device": device.kind,
                "busy_fraction": busy.get(device.rank),
                "peak_memory_bytes": peak.get(device.rank),
                "planned_memory_bytes": device.planned_memory_bytes,
            }
            for device in plan.devices
        ],
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
