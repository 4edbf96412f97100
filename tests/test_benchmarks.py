"""Benchmarks run as commands, in their short form; figures of time are not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent


def run_short(name: str, folder: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--short"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"outputs/benchmark-{name}.json" in ended.stdout
    found: dict[str, Any] = json.loads((folder / "outputs" / f"benchmark-{name}.json").read_text())
    assert {"python", "torch", "cores"} <= found["environment"].keys()
    return found


def test_heterogeneous(tmp_path: Path) -> None:
    (row,) = run_short("heterogeneous", tmp_path)["rows"]
    assert row["gain"]["pairs"] == 2
    assert row["simulated_gain"] > 1
    assert row["predicted_step_s"]["hardware"] <= row["predicted_step_s"]["whale"]
    assert row["step_s"]["even"] > 0
    assert row["cpu_s_per_step"]["hardware"] > 0


def test_prediction(tmp_path: Path) -> None:
    (row,) = run_short("prediction", tmp_path)["rows"]
    assert row["ranks"] == 2
    assert row["error"] == pytest.approx(row["predicted_step_s"] / row["step_s"] - 1)
    assert all(0.9 < part <= 1 for part in row["memory"])
