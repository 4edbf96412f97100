"""Whole shares of indivisible work for devices of unequal speed.

Pure arithmetic, used for samples, tensor dims and layers alike. The one rule for cutting a dim lives here, so that the
planner, the runtime and the checkpoint agree on every boundary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from whale_trainer.errors import PlanError
from whale_trainer.model_spec import Cut, SplitDim


class Interval(NamedTuple):
    """Positions `start <= i < stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: Interval) -> Interval:
        """The positions in both; an empty interval (stop = start) when there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def contains(self, other: Interval) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def scaled(self, factor: int) -> Interval:
        return Interval(self.start * factor, self.stop * factor)

    def shifted(self, offset: int) -> Interval:
        return Interval(self.start + offset, self.stop + offset)


def apportion(units: int, speeds: Sequence[float], *, minimum: int = 0) -> list[int]:
    """Split `units` so that the slowest holder finishes as early as integers allow.

    Gives `minimum` to each, then each further unit to whoever would finish it first. Ties go to the lower index, so the
    result is deterministic. Raises `PlanError` when there are fewer units than the minimum needs.

    >>> apportion(32, [15.7, 15.7, 9.3, 9.3])      # two V100, two P100, fp32 TFLOP/s
    [10, 10, 6, 6]
    >>> apportion(2, [9, 1], minimum=1)
    [1, 1]
    """
    if units < minimum * len(speeds):
        raise PlanError(f"{units} units cannot be shared by {len(speeds)} holders with at least {minimum} each")
    # nobody ends with less than the whole part of this (the rule keeps the lower quota); 1 less for rounding
    total, rest = sum(speeds), units - minimum * len(speeds)
    shares = [max(minimum, int(rest * speed / total) - 1) if total > 0 else minimum for speed in speeds]
    queue = [((shares[index] + 1) / speed, index) for index, speed in enumerate(speeds) if speed > 0]
    heapq.heapify(queue)
    for _ in range(units - sum(shares)):
        _, index = queue[0]
        shares[index] += 1
        heapq.heapreplace(queue, ((shares[index] + 1) / speeds[index], index))
    return shares


def intervals(shares: Sequence[int]) -> tuple[Interval, ...]:
    """Consecutive intervals of the given lengths, from 0."""
    return tuple(Interval(a, b) for a, b in pairwise(accumulate(shares, initial=0)))


@lru_cache(maxsize=4096)
def cut_units(split: SplitDim, weights: tuple[int, ...]) -> tuple[Interval, ...]:
    """Units of `split` for each shard of a tensor group; query heads where the dim is heads.

    With at least as many kv heads as shards, heads move with their whole kv group, so that no kv head is shared; with
    fewer, query heads are dealt out and neighbours share a kv head. Raises `PlanError` when a shard would be empty.
    """
    if len(weights) == 1:
        return (Interval(0, split.units),)
    if split.units < len(weights):
        raise PlanError(f"{split.units} {split.name} cannot be cut over {len(weights)} ranks: each needs at least one")
    if split.num_kv_heads is not None and split.num_kv_heads >= len(weights):
        group = split.units // split.num_kv_heads
        return tuple(i.scaled(group) for i in intervals(apportion(split.num_kv_heads, weights, minimum=1)))
    return intervals(apportion(split.units, weights, minimum=1))


def kv_units(split: SplitDim, heads: Interval) -> Interval:
    """The kv heads that the query heads of one shard attend with."""
    assert split.num_kv_heads is not None
    group = split.units // split.num_kv_heads
    return Interval(heads.start // group, -(-heads.stop // group))


KV_HEADS = "kv heads"


def kv_dim(split: SplitDim) -> SplitDim | None:
    """The dim that keys and values follow, where several heads share one of them."""
    if split.num_kv_heads is None or split.num_kv_heads == split.units:
        return None
    return SplitDim(KV_HEADS, split.num_kv_heads)


def kv_part(split: SplitDim, heads: Interval) -> float:
    """Part of all keys and values that a shard with these heads holds; repeated for its heads where it has to."""
    assert split.num_kv_heads is not None
    group, kv = split.units // split.num_kv_heads, kv_units(split, heads)
    held = [len(heads.intersect(Interval(u, u + 1).scaled(group))) for u in range(*kv)]
    return (len(kv) if len(set(held)) == 1 else len(heads)) / split.num_kv_heads


def cut_elements(cut: Cut, weights: tuple[int, ...], shard: int) -> Interval:
    """Elements along `cut.dim` of a parameter that shard number `shard` of the group holds."""
    units = cut_units(cut.split, weights)[shard]
    if cut.is_kv:
        units = kv_units(cut.split, units)
    return units.scaled(cut.elements_per_unit)
