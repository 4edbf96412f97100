"""Plain configs for tests: a small whole one, and copies of it with edits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf"
DROPPED = object()
"""As the new value of a key: the key is taken out."""


def small_config() -> dict[str, Any]:
    """A whole config that needs no file: two CPU devices, a small model and data set of the tests."""
    return {
        "mode": "fit",
        "seed": 0,
        "global_batch": 4,
        "emulate": False,
        "timeout_s": 30,
        "ckpt_path": None,
        "strategy": {"micro_batches": 1, "scopes": [{"layers": "*", "replicate": "auto"}]},
        "cluster": {"nodes": [{"name": "here", "devices": {"CPU": 2}}]},
        "model": {"_target_": "config_targets.Net", "width": 4},
        "data": {
            "train": {"_target_": "config_targets.Rows", "num_rows": 8},
            "validation": {"_target_": "config_targets.Rows"},
            "shuffle": True,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.95]},
        "scheduler": {"_target_": "whale_trainer.schedules.warmup_cosine", "warmup_steps": 2},
        "trainer": {"max_steps": 5, "precision": "32-true"},
        "logger": {"kind": "csv"},
        "callbacks": {"watcher": {"_target_": "config_targets.Watcher", "every": 2}},
        "checkpoint": {"every_n_steps": None, "save_top_k": 1, "monitor": None},
    }


def edited(plain: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with other values at dotted paths; steps that are numbers are positions in lists."""
    found = copy.deepcopy(dict(plain))
    for path, value in edits.items():
        *parents, last = path.split(".")
        owner: Any = found
        for step in parents:
            owner = owner[int(step)] if isinstance(owner, list) else owner.setdefault(step, {})
        key: Any = int(last) if isinstance(owner, list) else last
        if value is DROPPED:
            del owner[key]
        else:
            owner[key] = value
    return found


def composed(*overrides: str) -> dict[str, Any]:
    """What Hydra makes of the shipped files and these overrides, as plain data; values left open stay `???`."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose("config", overrides=list(overrides))
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
