"""Cutting consecutive layers into stages for groups of devices, in the order and at the places that are best.

The search is exact: over all orders of the groups and all cuts, the slowest stage takes as little time as the devices'
memory allows. A state is how many groups of each type are used up; all that matters of it is how far the layers reach.
With very many states the groups keep the order of their types, and only the cuts are searched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isclose, prod
from typing import NamedTuple

from whale_trainer.planning.costs import TileCosts
from whale_trainer.planning.shares import Interval

MOST_STATES = 3000


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
        self._rows = [
            [self.costs.slowest(a, b, self.speeds) for b in range(a + 1, stop + 1)] for a in range(start, stop)
        ]

    def time(self, layers: Interval) -> float:
        """Seconds of one sample, forward and backward, on the group's slowest device."""
        return self._rows[layers.start - self.layers.start][len(layers) - 1]

    def limit(self, start: int, samples: int, in_flight: int) -> int:
        """The furthest layer up to which a stage from `start` fits in memory; `start` when nothing does."""
        if self.free is None:
            return self.layers.stop
        key = (start, samples, in_flight)
        if key not in self._limits:
            low, high = start, self.layers.stop
            while low < high:
                middle = (low + high + 1) // 2
                if self.costs.fits(start, middle, self.free, samples, in_flight):
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
        num_stages = sum(self.counts)
        is_ordered = prod(count + 1 for count in self.counts) > MOST_STATES
        start, stop = self.layers
        origin = tuple(0 for _ in self.counts)
        frontier = {origin: start}
        came: dict[tuple[int, ...], int] = {}
        for position in range(num_stages):
            following: dict[tuple[int, ...], int] = {}
            for used, at in frontier.items():
                for kind, table in enumerate(self.tables):
                    if used[kind] == self.counts[kind]:
                        continue
                    to = table.reach(at, limit_s, self.samples, self.in_flight(position))
                    to = min(to, stop - (num_stages - 1 - position))
                    state = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    if to > at and to > following.get(state, start):
                        following[state], came[state] = to, kind
                    if is_ordered:
                        break
            frontier = following
        if frontier.get(self.counts) != stop:
            return None
        order = []
        state = self.counts
        while state != origin:
            kind = came[state]
            order.append(kind)
            state = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
        return self._chain(tuple(reversed(order)), limit_s)

    def _chain(self, order: tuple[int, ...], limit_s: float) -> Chain:
        """The cuts that go as far as they may, stage by stage."""
        at, stop = self.layers
        layers = []
        for position, kind in enumerate(order):
            to = self.tables[kind].reach(at, limit_s, self.samples, self.in_flight(position))
            layers.append(Interval(at, min(to, stop - (len(order) - 1 - position))))
            at = layers[-1].stop
        slowest = max(self.tables[kind].time(part) for kind, part in zip(order, layers, strict=True))
        return Chain(order, tuple(layers), slowest)

    def fits(self, chain: Chain) -> bool:
        """Whether the chain's stages fit in memory with this number of samples."""
        return all(
            self.tables[kind].limit(part.start, self.samples, self.in_flight(position)) >= part.stop
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
