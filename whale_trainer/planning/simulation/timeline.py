"""A step as it was predicted, or as it was measured: what every rank does from when to when. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activity(StrEnum):
    """What a span of time goes into."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "backward of inputs"
    """Where a schedule splits backward passes."""
    WEIGHT = "backward of weights"
    TRANSFER = "transfer"
    """Activations or gradients on their way to another rank; told on the rank that sends."""
    SUM = "gradient sum"
    OPTIMIZER = "optimizer"

    @property
    def is_compute(self) -> bool:
        return self not in (Activity.TRANSFER, Activity.SUM)


@dataclass(frozen=True)
class Span:
    """One thing that a rank does, in seconds from the start of the step."""

    rank: int
    activity: Activity
    label: str
    """An action such as `2F0`, or what travels: `2F0 to rank 3`, `sum over ranks 0, 1`."""
    start_s: float
    stop_s: float
    num_bytes: float = 0.0
    """What travels; 0 for compute."""


@dataclass(frozen=True)
class Timeline:
    """One step of a plan."""

    step_s: float
    spans: tuple[Span, ...]
    """By rank, then by start; compute of one rank never overlaps, what travels may run beside it."""
    busy_fractions: tuple[float, ...]
    """By rank, the part of the step that it computes, from 0 to 1; collectives inside a split tile count as compute."""
    bound_by: str = ""
    """What the step's critical path is mostly made of, in words."""

    @property
    def bubble_fraction(self) -> float:
        """Part of all ranks' time in which they compute nothing."""
        return 1.0 - sum(self.busy_fractions) / max(1, len(self.busy_fractions))
