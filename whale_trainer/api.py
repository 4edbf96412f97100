"""`make_plan`: from a module, a cluster and a strategy to a plan, in a user's own script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.describe import describe
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.planner import answer
from whale_trainer.planning.profile import Profile, check_profile, with_measured_memory
from whale_trainer.planning.strategy import StrategySpec, load_strategy


def make_plan(
    model: nn.Module,
    cluster: Cluster | dict[str, Any],
    strategy: StrategySpec | dict[str, Any],
    *,
    global_batch: int,
    example: Any = None,
    precision: str = "32-true",
    profile: Profile | None = None,
) -> Plan:
    """The plan for training `model` on `cluster` as `strategy` says.

    `cluster` and `strategy` are the sections of the YAML files, as objects or plain dicts. `example` is a batch of
    any size (as the DataLoader makes it), from which costs are derived; a model without `layers()` can do without one.
    `profile` holds measured times (`load_profile` of what mode=calibrate wrote), preferred to the catalogue's.
    Raises `ConfigError` for wrong sections, `PlanError` when no plan can do what was asked.
    """
    cluster = load_cluster(cluster) if isinstance(cluster, dict) else cluster
    strategy = load_strategy(strategy) if isinstance(strategy, dict) else strategy
    spec = describe(model, example)
    if profile is not None:
        check_profile(profile, spec, precision)
        cluster = with_measured_memory(cluster, profile)
    found = answer(spec, cluster, strategy, global_batch=global_batch, precision=precision, profile=profile)
    return replace(found.plan, model=spec)
