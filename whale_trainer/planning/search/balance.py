"""Whole shares for the slowest to finish as early as possible, within limits that memory sets. Pure arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf, isclose

from whale_trainer.planning.shares import apportion

SLACKS = (inf, 4.0, 3.0, 2.5, 2.0, 1.8, 1.6, 1.4, 1.3, 1.2, 1.1, 1.05, 1.0)
"""How far a shard may exceed its part of the group's free memory, tried in this order until everything fits: from
weights in proportion to speed to weights in proportion to memory."""


def water_fill(speeds: Sequence[float], caps: Sequence[float]) -> list[float] | None:
    """Parts of 1 for the least time of the slowest: `min(cap, level * speed)`; None when the caps sum to less than 1.

    >>> water_fill([2, 1, 1], [0.4, 1, 1])
    [0.4, 0.3, 0.3]
    """
    if sum(caps) < 1 - 1e-9:
        return None
    parts, rest = [0.0] * len(speeds), 1.0
    open_holders = list(range(len(speeds)))
    while open_holders:
        level = rest / sum(speeds[i] for i in open_holders)
        full = [i for i in open_holders if caps[i] < level * speeds[i]]
        if not full:
            for i in open_holders:
                parts[i] = level * speeds[i]
            break
        for i in full:
            parts[i] = caps[i]
        rest -= sum(caps[i] for i in full)
        open_holders = [i for i in open_holders if i not in full]
    return parts


def whole_weights(parts: Sequence[float], most: int = 64) -> tuple[int, ...]:
    """Small whole numbers in the proportion of `parts`: the fewest units with which nobody gets 1 % too much.

    >>> whole_weights([15.7, 9.3]), whole_weights([3.0, 3.0])
    ((5, 3), (1, 1))
    """
    total, best, least = sum(parts), (1,) * len(parts), inf
    for units in range(len(parts), max(most, len(parts)) + 1):
        weights = apportion(units, parts, minimum=1)
        excess = max(w / units / (p / total) for w, p in zip(weights, parts, strict=True))
        if excess < least and not isclose(excess, least, rel_tol=1e-9):
            best, least = tuple(weights), excess
        if least <= 1.01:
            break
    return best


def shard_weights(speeds: Sequence[float], free: Sequence[float], slack: float) -> tuple[int, ...]:
    """Weights in proportion to the speeds, none above `slack` times the device's part of the group's free memory."""
    if slack == inf:
        return whole_weights(speeds)
    room = [max(f, 1.0) for f in free]
    parts = water_fill(speeds, [slack * r / sum(room) for r in room])
    assert parts is not None
    return whole_weights(parts)


def allot(units: int, costs: Sequence[Callable[[int], float]], *, minimum: int = 0) -> list[int] | None:
    """Deal out `units` so that the largest cost is least; `costs[i](n)` never falls with n, inf where n is too much.

    Gives each further unit to whoever would be cheapest with it, which is optimal for such costs; ties go to the lower
    index. None when not all units can be placed.
    """
    if units < minimum * len(costs) or any(cost(minimum) == inf for cost in costs if minimum):
        return None
    if len(costs) == 1:
        return None if costs[0](units) == inf else [units]
    shares = [minimum] * len(costs)
    queue = [(cost(minimum + 1), index) for index, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(units - minimum * len(costs)):
        cost, index = queue[0]
        if cost == inf:
            return None
        shares[index] += 1
        heapq.heapreplace(queue, (costs[index](shares[index] + 1), index))
    return shares
