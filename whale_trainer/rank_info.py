"""Where a rank stands: what the launcher tells each process about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RankInfo:
    """This process's rank in the plan, its place on its machine, and the device that it drives."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
