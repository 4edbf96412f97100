"""Learning-rate schedules by optimizer step, for `scheduler._target_` in the config."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


def warmup_cosine(
    optimizer: Optimizer, num_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LRScheduler:
    """Up in a line over `warmup_steps`, then down half a cosine to `final_fraction` of the rate at `num_steps`.

    A run shorter than the warm-up ends on the way up.
    """
    from torch.optim.lr_scheduler import LambdaLR

    if warmup_steps < 0:
        raise ValueError(f"warmup_steps {warmup_steps} is below 0")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction {final_fraction} is not between 0 and 1")
    factor = functools.partial(
        warmup_cosine_factor, num_steps=num_steps, warmup_steps=warmup_steps, final_fraction=final_fraction
    )
    return LambdaLR(optimizer, factor)


def warmup_cosine_factor(step: int, *, num_steps: int, warmup_steps: int, final_fraction: float) -> float:
    """What the rate is multiplied by at a step, counted from 0; the first step of a warm-up is not at zero.

    >>> [round(warmup_cosine_factor(s, num_steps=6, warmup_steps=2, final_fraction=0.0), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if step >= num_steps:
        return final_fraction
    done = (step - warmup_steps) / (num_steps - warmup_steps)
    return final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * done)) / 2
