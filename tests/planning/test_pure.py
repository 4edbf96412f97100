"""Planning needs no torch, Lightning, Hydra or OmegaConf: it plans in a process where none of them can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import importlib, pkgutil, sys
for name in ("torch", "lightning", "pytorch_lightning", "hydra", "omegaconf"):
    sys.modules[name] = None
import whale_trainer.cluster, whale_trainer.planning
for module in pkgutil.iter_modules(whale_trainer.planning.__path__):
    importlib.import_module(f"whale_trainer.planning.{module.name}")
from specs import cpu_cluster, gpt_spec, preset
from whale_trainer.planning.planner import build_plan
print(build_plan(gpt_spec(), cpu_cluster([2, 1]), preset("split"), global_batch=2).tiles[0].weights)
"""


def test_plans_where_torch_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 1)\n"
