"""Process groups of a plan, made once, by all ranks, in one fixed order.

Tensor groups and gradient sums have communicators of their own even where their ranks are the same: a sum may start
at any time within a backward pass. Every communicator that a run will use exists before its first step, so no
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
        *,
        tensor_groups: Iterable[tuple[int, ...]] = (),
        sum_groups: Iterable[tuple[int, ...]] = (),
        edges: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Ranks of split tiles and of gradient sums; (source, target) pairs that send messages."""
        self.plan = plan
        self.rank = rank
        self.device = device
        self._tensor: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._sums: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        if plan.num_ranks == 1:
            return
        if not dist.is_initialized() or dist.get_world_size() != plan.num_ranks:
            found = dist.get_world_size() if dist.is_initialized() else 1
            raise RankError(
                f"the plan is for {plan.num_ranks} ranks, but {found} were started: start one process per device"
            )
        for groups, rank_sets in ((self._tensor, tensor_groups), (self._sums, sum_groups)):
            for ranks in sorted({tuple(sorted(r)) for r in rank_sets}):
                if len(ranks) > 1:
                    groups[ranks] = dist.new_group(list(ranks))
        if device.type == "cuda":
            # NCCL runs a communicator's messages in order, both directions together: one communicator per direction
            for source, target in sorted(set(edges)):
                self._channels[source, target] = dist.new_group([source, target])

    def tensor_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group in which the shards of a tile meet."""
        return self._tensor[tuple(sorted(ranks))]

    def sum_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group over which gradients are summed."""
        return self._sums[tuple(sorted(ranks))]

    @property
    def sums_wait(self) -> bool:
        """True where gradient sums must not start before the last action.

        NCCL kernels of several communicators need one order on all their ranks, which sums in the midst of a tensor
        group's collectives do not have. Gloo has no such limit.
        """
        in_tensor_group = any(len(self.plan.tiles[t].shards) > 1 for t in self.plan.tiles_of(self.rank))
        return self.device.type == "cuda" and in_tensor_group

    def channel(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group for messages from `source` to `target`; None where the default group does."""
        return self._channels.get((source, target))

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """`values` summed over all ranks, in place."""
        if self.plan.num_ranks > 1:
            dist.all_reduce(values)
        return values
