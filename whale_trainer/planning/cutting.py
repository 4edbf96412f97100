"""Cutting consecutive layers into stages for groups of devices, in the order and at the places that are best.

The search is exact: over all orders of the groups and all cuts, the slowest stage takes as little time as the devices'
memory allows. A state is how many groups of each type are used up; each state keeps the layers at which it can end (not
the furthest only: a slow group may be unable to take the layer that comes next). With very many states the groups keep
the order of their types, and only the cuts are searched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isclose, prod
from typing import NamedTuple

from whale_trainer.planning.costs import TileCosts
from whale_trainer.planning.shares import Interval

MOST_STATES = 300
"""States up to which all orders of the groups are searched; 8 + 8 devices of two kinds have 81."""


class Chain(NamedTuple):
    """Stages in their order: the group type and the layers of each, and the seconds of the slowest for one sample."""

    order: tuple[int, ...]
    layers: tuple[Interval, ...]
    slowest_s: float


@dataclass
class StageTable:
    """How far one type of group gets from any layer, by time and by memory; `free` is None where memory is no limit."""

    costs: TileCosts
    speeds: tuple[float, ...]
    free: tuple[float, ...] | None
    layers: Interval
    _rows: list[list[float]] = field(default_factory=list)
    _limits: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start, stop = self.layers
        self._rooms = self.costs.distinct(self.free) if self.free is not None else []
        paces = [(shard.flops, speed) for shard, speed in self.costs.distinct(self.speeds)]
        self._rows = [
            [max((flops[b] - flops[a]) / speed for flops, speed in paces) for b in range(a + 1, stop + 1)]
            for a in range(start, stop)
        ]

    def time(self, layers: Interval) -> float:
        """Seconds of one sample, forward and backward, on the group's slowest device."""
        return self._rows[layers.start - self.layers.start][len(layers) - 1]

    def fits(self, layers: Interval, samples: int, in_flight: int) -> bool:
        """Whether each shard's part fits in the bytes that are free on its device."""
        start, stop = layers
        return all(shard.memory(start, stop, samples, in_flight) <= room for shard, room in self._rooms)

    def limit(self, start: int, samples: int, in_flight: int) -> int:
        """The furthest layer up to which a stage from `start` fits in memory; `start` when nothing does."""
        if self.free is None:
            return self.layers.stop
        key = (start, samples, in_flight)
        if key not in self._limits:
            low, high = start, self.layers.stop
            while low < high:
                middle = (low + high + 1) // 2
                if self.fits(Interval(start, middle), samples, in_flight):
                    low = middle
                else:
                    high = middle - 1
            self._limits[key] = low
        return self._limits[key]

    def reach(self, start: int, within_s: float, samples: int, in_flight: int) -> int:
        by_time = start + bisect_right(self._rows[start - self.layers.start], within_s)
        return min(by_time, self.limit(start, samples, in_flight))


@dataclass(frozen=True)
class Cutting:
    """One question: `counts[t]` groups of each type in `tables`, for `samples` of a micro-batch."""

    tables: Sequence[StageTable]
    counts: tuple[int, ...]
    samples: int
    in_flight: Callable[[int], int]
    """Micro-batches whose activations the stage at a position holds at once."""

    @property
    def layers(self) -> Interval:
        return self.tables[0].layers

    def best(self) -> Chain | None:
        """The chain with the least time of its slowest stage; None when no chain fits in memory."""
        chain = self._within(inf)
        if chain is None:
            return None
        low = 0.0
        while chain.slowest_s - low > 1e-9 * chain.slowest_s:
            middle = (low + chain.slowest_s) / 2
            better = self._within(middle)
            if better is None:
                low = middle
            else:
                chain = better
        return chain

    def _within(self, limit_s: float) -> Chain | None:
        """Some chain whose stages all take at most `limit_s`."""
        frontiers = self._frontiers(limit_s)
        at = self.layers.stop
        if at not in frontiers[-1].get(self.counts, ()):
            return None
        state, order, layers = self.counts, list[int](), list[Interval]()
        for position in reversed(range(len(frontiers) - 1)):
            state, kind, before = self._step_back(frontiers[position], state, at, position, limit_s)
            order.append(kind)
            layers.append(Interval(before, at))
            at = before
        order.reverse()
        layers.reverse()
        slowest = max(self.tables[kind].time(part) for kind, part in zip(order, layers, strict=True))
        return Chain(tuple(order), tuple(layers), slowest)

    def _frontiers(self, limit_s: float) -> list[dict[tuple[int, ...], set[int]]]:
        """For each number of stages, the layers at which they can end, by the groups that they use up."""
        num_stages = sum(self.counts)
        is_ordered = prod(count + 1 for count in self.counts) > MOST_STATES
        frontiers = [{tuple(0 for _ in self.counts): {self.layers.start}}]
        for position in range(num_stages):
            following: dict[tuple[int, ...], set[int]] = {}
            last = self.layers.stop - (num_stages - 1 - position)
            for used, ends in frontiers[-1].items():
                for kind, table in enumerate(self.tables):
                    if used[kind] == self.counts[kind]:
                        continue
                    state = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    found = following.setdefault(state, set())
                    for at in ends:
                        to = table.reach(at, limit_s, self.samples, self.in_flight(position))
                        found.update(range(at + 1, min(to, last) + 1))
                    if is_ordered:
                        break
            frontiers.append(following)
        return frontiers

    def _step_back(
        self, frontier: dict[tuple[int, ...], set[int]], state: tuple[int, ...], at: int, position: int, limit_s: float
    ) -> tuple[tuple[int, ...], int, int]:
        """The last stage of a chain that ends at layer `at`: the state before it, its type, and where it starts."""
        for kind, table in enumerate(self.tables):
            before = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
            for start in sorted(frontier.get(before, ())):
                if start < at <= table.reach(start, limit_s, self.samples, self.in_flight(position)):
                    return before, kind, start
        raise AssertionError("a frontier without a way back")

    def fits(self, chain: Chain) -> bool:
        """Whether the chain's stages fit in memory with this number of samples."""
        return all(
            self.tables[kind].fits(part, self.samples, self.in_flight(position))
            for position, (kind, part) in enumerate(zip(chain.order, chain.layers, strict=True))
        )

    def levelled(self, chain: Chain) -> Chain:
        """The same order and slowest stage, with the other stages as equal in time as they can be."""
        start, stop = self.layers
        limit_s = chain.slowest_s * (1 + 1e-12)
        # best[b] = least sum of squared times with the stages so far ending at layer b, and the cuts that give it
        best: dict[int, tuple[float, tuple[Interval, ...]]] = {start: (0.0, ())}
        for position, kind in enumerate(chain.order):
            table, following = self.tables[kind], dict[int, tuple[float, tuple[Interval, ...]]]()
            last = stop - (len(chain.order) - 1 - position)
            for at, (total, cuts) in best.items():
                far = min(table.reach(at, limit_s, self.samples, self.in_flight(position)), last) if at < stop else at
                for to in range(at + 1, far + 1):
                    value = total + table.time(Interval(at, to)) ** 2
                    known = following.get(to)
                    if known is None or (value < known[0] and not isclose(value, known[0], rel_tol=1e-12)):
                        following[to] = (value, (*cuts, Interval(at, to)))
            best = following
        return chain._replace(layers=best[stop][1])
