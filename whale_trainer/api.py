"""`make_plan`: from a module, a cluster and a strategy to a plan, in a user's own script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.describe import describe, optimizer_bytes
from whale_trainer.describe.optimizers import NamedParameters
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.planner import answer
from whale_trainer.planning.simulation.profile import Profile, check_profile, with_measured_memory
from whale_trainer.planning.strategy import StrategySpec, load_strategy
from whale_trainer.runtime.footprint import device_type_of, with_footprints


def make_plan(
    model: nn.Module,
    cluster: Cluster | dict[str, Any],
    strategy: StrategySpec | dict[str, Any],
    *,
    global_batch: int,
    example: Any = None,
    precision: str = "32-true",
    make_optimizer: Callable[[NamedParameters], Optimizer] | None = None,
    profile: Profile | None = None,
) -> Plan:
    """The plan for training `model` on `cluster` as `strategy` says.

    `cluster` and `strategy` are the sections of the YAML files, as objects or plain dicts. `example` is a batch of
    any size (as the DataLoader makes it), from which costs are derived; a model without `layers()` can do without one.
    `make_optimizer(named_parameters)` is what the run will train with, by default AdamW; its memory is planned for.
    `profile` holds measured times (`load_profile` of what mode=calibrate wrote), preferred to the catalogue's.
    Raises `ConfigError` for wrong sections, `PlanError` when no plan can do what was asked.
    """
    cluster = load_cluster(cluster) if isinstance(cluster, dict) else cluster
    strategy = load_strategy(strategy) if isinstance(strategy, dict) else strategy
    device_type = device_type_of(cluster)
    spec = describe(model, example)
    spec = with_footprints(spec, model, example, precision=precision, device_type=device_type)
    optimizer = optimizer_bytes(make_optimizer or torch.optim.AdamW, device_type=device_type)
    if profile is not None:
        check_profile(profile, spec, precision)
        cluster = with_measured_memory(cluster, profile)
    found = answer(
        spec,
        cluster,
        strategy,
        global_batch=global_batch,
        precision=precision,
        optimizer=optimizer,
        profile=profile,
    )
    return replace(found.plan, model=spec)
