"""The schedule: all actions of a step in one global order, made from a plan and a batch size alone.

A schedule is a list of actions such as `2F0` (tile 2, forward, micro-batch 0) that respects every dependency. Each
rank runs its own part of the list in that order, so with sends that do not wait nothing can lock. A tile that holds no
sample of a micro-batch has no action there, on all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from whale_trainer.errors import PlanError
from whale_trainer.planning.plan import SPLIT_SCHEDULES, Plan
from whale_trainer.planning.schedule.actions import Action, Compute, Instruction, Message, Op, Receive, Send
from whale_trainer.planning.schedule.bridges import (
    Bridge,
    bridges_between,
    bridges_of,
    pair_ranks,
    warm_up,
    warm_ups,
)
from whale_trainer.planning.schedule.orders import EVALUATION, order_of
from whale_trainer.planning.shares import Interval

__all__ = [
    "Action",
    "Bridge",
    "Compute",
    "Instruction",
    "Message",
    "Op",
    "Receive",
    "Schedule",
    "Send",
    "bridges_between",
    "bridges_of",
    "build_schedule",
    "max_in_flight",
    "messages",
    "order_of",
    "pair_ranks",
    "warm_up",
    "warm_ups",
]


@dataclass(frozen=True)
class Schedule:
    """A linear extension of the dependencies between all actions of one pass over a batch."""

    plan: Plan
    batch_size: int
    training: bool
    order: tuple[Action, ...]

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """What `rank` runs, in its order."""
        tiles = set(self.plan.tiles_of(rank))
        return tuple(a for a in self.order if a.tile in tiles)

    @cached_property
    def bridged(self) -> tuple[Message, ...]:
        """Every message in the order in which the producers run, with those that a rank hands to itself."""
        tiles = self.plan.tiles
        rows = rows_of(self.plan, self.batch_size)
        back = Op.INPUT if self.plan.schedule in SPLIT_SCHEDULES else Op.BACKWARD
        neighbours: dict[tuple[int, Op], list[int]] = {}
        for bridge in bridges_of(self.plan):
            neighbours.setdefault((bridge.before, Op.FORWARD), []).append(bridge.after)
            neighbours.setdefault((bridge.after, back), []).append(bridge.before)
        found = []
        for action in self.order:
            source, micro_batch = action.tile, action.micro_batch
            for target in neighbours.get((source, action.op), ()):
                shared = rows[source][micro_batch].intersect(rows[target][micro_batch])
                if not len(shared):
                    continue
                for source_rank, target_rank in pair_ranks(tiles[source].ranks, tiles[target].ranks):
                    found.append(Message(source, target, micro_batch, action.op, source_rank, target_rank, shared))
        return tuple(found)


def rows_of(plan: Plan, batch_size: int) -> tuple[tuple[Interval, ...], ...]:
    """`plan.rows` of every tile and micro-batch, as a table."""
    micro_batches = plan.micro_batches_of(batch_size)
    return tuple(tuple(tile.samples.shifted(m.start).intersect(m) for m in micro_batches) for tile in plan.tiles)


def messages(schedule: Schedule) -> tuple[Message, ...]:
    """The messages that travel between two ranks, each once, in the order in which they are sent."""
    return tuple(m for m in schedule.bridged if not m.is_local)


def build_schedule(plan: Plan, batch_size: int, *, training: bool = True) -> Schedule:
    """The schedule that the plan names, for a batch of any size; evaluation runs the forwards only."""
    if batch_size < 1:
        raise PlanError(f"a batch of {batch_size} samples cannot be scheduled: it needs at least one")
    name = plan.schedule if training else EVALUATION
    if name in ("1f1b", "gpipe", EVALUATION):
        order = _order(plan, batch_size, name)
    else:
        # a short batch is a whole one without some actions, so that it never holds more
        rows = rows_of(plan, batch_size)
        whole = _order(plan, max(batch_size, plan.global_batch), name)
        order = [a for a in whole if a.micro_batch < len(rows[a.tile]) and len(rows[a.tile][a.micro_batch])]
    return Schedule(plan, batch_size, training, tuple(order))


def _order(plan: Plan, batch_size: int, name: str) -> list[Action]:
    counts = [sum(len(r) > 0 for r in rows) for rows in rows_of(plan, batch_size)]
    return order_of([tile.ranks for tile in plan.tiles], bridges_of(plan), counts, name, plan.lengths)


def max_in_flight(schedule: Schedule, tile: int) -> int:
    """The most micro-batches whose forward has run on the tile, and whose backward, or its first part, has not."""
    return max((flying for flying, _ in held_by(schedule, tile)), default=0)


def held_by(schedule: Schedule, tile: int) -> list[tuple[int, int]]:
    """(in flight, waiting for the gradients of weights) on a tile, after each of its actions."""
    flying = waiting = 0
    found = []
    for action in schedule.order:
        if action.tile == tile:
            flying += (action.op is Op.FORWARD) - action.op.gives_back
            waiting += (action.op is Op.INPUT) - (action.op is Op.WEIGHT)
            found.append((flying, waiting))
    return found
