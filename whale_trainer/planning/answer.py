"""What the planner answers: the plan with all that speaks for it."""

from __future__ import annotations

from dataclasses import dataclass

from whale_trainer.planning.costs.cost_model import MemoryItems
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.timeline import Timeline


@dataclass(frozen=True)
class Alternative:
    """Another plan that was weighed, and what it would cost."""

    description: str
    """`2 replicas x 2 stages x split 2, 8 micro-batches, 1f1b`."""
    step_s: float


@dataclass(frozen=True)
class Answer:
    """The plan, its predicted step, its memory, and what else was weighed."""

    plan: Plan
    timeline: Timeline
    memory: tuple[MemoryItems, ...]
    """By rank, item by item."""
    usable_bytes: tuple[int, ...]
    """By rank, what all items together may fill of the device's memory."""
    alternatives: tuple[Alternative, ...] = ()
    """The best other plans, the fastest first."""
    num_simulated: int = 0
    """Plans that were simulated on the way."""
    search_s: float = 0.0
