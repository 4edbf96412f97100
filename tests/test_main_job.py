"""The README's first command with its default steps. Long, so left out by default: pytest -m slow."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = Path(__file__).parent.parent / "train.py"
BYTE_PAIRS_NATS = 2.45
"""About what a table of byte pairs reaches on this text."""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_main_job_learns_and_is_that_of_one_device(tmp_path: Path) -> None:
    begin = time.monotonic()
    arguments = ["strategy=hybrid", "cluster=v100_p100", "hydra.run.dir=many"]
    subprocess.run([sys.executable, str(TRAIN), *arguments], cwd=tmp_path, check=True, timeout=240)
    assert time.monotonic() - begin < 240
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert summary["val_loss"] < BYTE_PAIRS_NATS
    plan = json.loads((tmp_path / "many" / "plan.json").read_text())
    assert len(plan["devices"]) == 8
    assert len({tuple(t["layers"]) for t in plan["tiles"]}) == 2
    assert len({tuple(t["samples"]) for t in plan["tiles"]}) == 2
    nodes = {d["rank"]: d["node"] for d in plan["devices"]}
    assert all(len(t["shards"]) == 2 and len({nodes[s["rank"]] for s in t["shards"]}) == 1 for t in plan["tiles"])
    first = ["strategy=single", "hydra.run.dir=one", "trainer.max_steps=20", "logger=none"]
    subprocess.run([sys.executable, str(TRAIN), *first], cwd=tmp_path, check=True, timeout=100)
    losses = [read_losses(tmp_path / name)[:5] for name in ("many", "one")]
    assert losses[0][0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def read_losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]
