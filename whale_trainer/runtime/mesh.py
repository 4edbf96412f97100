"""Process groups of a plan, made once, by all ranks, in one fixed order.

Asked by rank sets: `mesh.group((0, 3))`. Every communicator that a run will use exists before its first step, so no
rank waits in the making of a group that another rank makes later.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from whale_trainer.errors import RankError
from whale_trainer.planning.plan import Plan


class Mesh:
    """This rank's place in the plan, and its process groups."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: torch.device,
        rank_sets: Iterable[tuple[int, ...]],
        edges: Iterable[tuple[int, int]],
    ) -> None:
        """`rank_sets`: ascending ranks of each collective; `edges`: (source, target) pairs that send messages."""
        self.plan = plan
        self.rank = rank
        self.device = device
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        if plan.num_ranks == 1:
            return
        if not dist.is_initialized() or dist.get_world_size() != plan.num_ranks:
            found = dist.get_world_size() if dist.is_initialized() else 1
            raise RankError(
                f"the plan is for {plan.num_ranks} ranks, but {found} were started: start one process per device"
            )
        self._groups[tuple(range(plan.num_ranks))] = dist.group.WORLD
        for ranks in sorted(set(rank_sets)):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks))
        if device.type == "cuda":
            # NCCL runs the messages of a communicator in order, both directions together: one communicator per
            # direction
            for source, target in sorted(set(edges)):
                self._channels[source, target] = dist.new_group([source, target])

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks` (in any order)."""
        return self._groups[tuple(sorted(ranks))]

    def channel(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group for messages from `source` to `target`; None where the default group does."""
        return self._channels.get((source, target))

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """`values` summed over all ranks, in place."""
        if self.plan.num_ranks > 1:
            dist.all_reduce(values)
        return values
