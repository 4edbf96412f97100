"""Train one model on mixed GPUs: `make_plan` decides each device's part, `WhaleStrategy` runs it under Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whale_trainer.api import make_plan as make_plan
    from whale_trainer.errors import CheckpointError as CheckpointError
    from whale_trainer.errors import ConfigError as ConfigError
    from whale_trainer.errors import PlanError as PlanError
    from whale_trainer.errors import RankError as RankError
    from whale_trainer.planning.plan import Plan as Plan
    from whale_trainer.strategy import WhaleStrategy as WhaleStrategy
    from whale_trainer.trainer.module import TrainingModule as TrainingModule

_EXPORTS = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Plan": "planning.plan",
    "PlanError": "errors",
    "RankError": "errors",
    "TrainingModule": "trainer.module",
    "WhaleStrategy": "strategy",
    "make_plan": "api",
}
"""Public names and their modules; loaded when asked for, so that planning loads neither torch nor Lightning."""

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
