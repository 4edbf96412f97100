"""Cutting consecutive layers into stages for groups of devices, in the order and at the places that are best.

The search is exact: over all orders of the groups and all cuts, the slowest stage takes as little time as the devices'
memory allows. A state is how many groups of each type are used up; for each state and each layer at which its stages
can end, the least time of the slowest of them is known. With very many states the groups keep the order of their types,
and only the cuts are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from whale_trainer.planning.costs.cost_model import TileCosts
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.times import Seconds

MOST_STATES = 300
"""States up to which all orders of the groups are searched; 8 + 8 devices of two kinds have 81."""


LIMITS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
"""Of the slowest stage, against the least that is possible."""
SLOTS_THAT_RULE = 8
"""With so many micro-batches for each stage the slowest stage is nearly all that counts."""
LEVELLING = 1e-3


class Chain(NamedTuple):
    """Stages in their order: the group type and the layers of each, and the seconds of the slowest for one sample."""

    order: tuple[int, ...]
    layers: tuple[Interval, ...]
    slowest_s: float


@dataclass
class StageTable:
    """How long one type of group takes for any layers, and how far its memory reaches from each layer.

    `seconds` are prefix sums over all layers of the model, forward and backward, for one sample; `free` is None where
    memory is no limit.
    """

    costs: TileCosts
    seconds: Seconds
    free: tuple[float, ...] | None
    layers: Interval
    _limits: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _masked: dict[tuple[int, int], Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start, stop = self.layers
        self._rooms = self.costs.distinct(self.free) if self.free is not None else []
        ends = self.seconds[start : stop + 1]
        times = ends[None, :] - ends[:, None]
        times[np.tril_indices(len(ends))] = inf
        self.times = times
        """Seconds of a stage from one layer (row) to another (column), both counted from the first; inf where empty."""

    def time(self, layers: Interval) -> float:
        """Seconds of one sample, forward and backward."""
        return float(self.seconds[layers.stop] - self.seconds[layers.start])

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

    def _limits_of(self, samples: int, in_flight: int) -> list[int]:
        """`limit` of each layer; as a rule one layer less at the start lets a stage reach further."""
        if self.fits(self.layers, samples, in_flight):
            return [self.layers.stop] * (len(self.layers) + 1)
        found: list[int] = []
        for layer in range(self.layers.start, self.layers.stop + 1):
            reached = max(found[-1], layer) if found else layer
            if reached > layer and not self.fits(Interval(layer, reached), samples, in_flight):
                reached = self.limit(layer, samples, in_flight)
            else:
                while reached < self.layers.stop and self.fits(Interval(layer, reached + 1), samples, in_flight):
                    reached += 1
            found.append(reached)
        return found

    def within_memory(self, samples: int, in_flight: int) -> Seconds:
        """`times`, with inf for stages that do not fit."""
        if self.free is None:
            return self.times
        key = (samples, in_flight)
        if key not in self._masked:
            start, stop = self.layers
            limits = np.array(self._limits_of(samples, in_flight)) - start
            columns = np.arange(stop - start + 1)
            self._masked[key] = np.where(columns[None, :] <= limits[:, None], self.times, inf)
        return self._masked[key]


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

    slots: int = 0
    """Micro-batches of a step; 0 where only the slowest stage counts."""

    def best(self) -> Chain | None:
        """The chain with the least time of a step; None when no chain fits in memory.

        A pipeline of `slots` micro-batches takes the slowest stage's time for each but the first, and all stages' time
        for that one. So a slower slowest stage may pay where the sum falls: some limits above the least are tried.
        Within a limit, stages are as equal as they can be.
        """
        fastest = self._least(lambda before, times: np.maximum(before[:, None], times))
        if fastest is None:
            return None
        found = []
        for factor in LIMITS if 0 < self.slots < SLOTS_THAT_RULE * sum(self.counts) > SLOTS_THAT_RULE else LIMITS[:1]:
            limit_s = fastest.slowest_s * factor * (1 + 1e-12)
            chain = self._least(partial(_sum_within, limit_s))
            assert chain is not None
            found.append(chain)
        return min(found, key=self.pace_s)

    def pace_s(self, chain: Chain) -> float:
        """Seconds of a step by the number of slots."""
        if not self.slots:
            return chain.slowest_s
        total = sum(self.tables[kind].time(part) for kind, part in zip(chain.order, chain.layers, strict=True))
        return (chain.slowest_s * (self.slots - 1) + total) / self.slots

    def _least(self, joined: Callable[[Seconds, Seconds], Seconds]) -> Chain | None:
        """The chain with the least value, where `joined` gives those of one more stage for all starts and ends."""
        none = (0,) * len(self.counts)
        start = np.full(len(self.layers) + 1, inf)
        start[0] = 0.0
        values = {none: start}
        # by state and end: the type and the first layer of the last stage
        ways: dict[tuple[int, ...], tuple[Seconds, Seconds]] = {}
        for state in self._states():
            least = np.full(len(self.layers) + 1, inf)
            kinds, starts = np.zeros(len(least), dtype=int), np.zeros(len(least), dtype=int)
            for kind, table in enumerate(self.tables):
                before = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
                if before not in values:
                    continue
                times = table.within_memory(self.samples, self.in_flight(sum(before)))
                found = joined(values[before], times)
                # of values that differ by rounding only, the first
                first = (found <= found.min(axis=0) * (1 + 1e-12)).argmax(axis=0)
                value = found[first, np.arange(len(least))]
                better = value < least * (1 - 1e-12)
                least[better], kinds[better], starts[better] = value[better], kind, first[better]
            values[state], ways[state] = least, (kinds, starts)
        if values[self.counts][-1] == inf:
            return None
        return self._chain(ways)

    def _states(self) -> Iterator[tuple[int, ...]]:
        """All states but the empty one, each after those that it grows from."""
        if prod(count + 1 for count in self.counts) <= MOST_STATES:
            states = product(*(range(count + 1) for count in self.counts))
            next(states)
            yield from states
            return
        state = [0] * len(self.counts)
        for kind, count in enumerate(self.counts):
            for _ in range(count):
                state[kind] += 1
                yield tuple(state)

    def _chain(self, ways: dict[tuple[int, ...], tuple[Seconds, Seconds]]) -> Chain:
        state, at = self.counts, len(self.layers)
        order, layers = list[int](), list[Interval]()
        while any(state):
            kinds, starts = ways[state]
            kind, first = int(kinds[at]), int(starts[at])
            order.append(kind)
            layers.append(Interval(first, at).shifted(self.layers.start))
            state, at = (*state[:kind], state[kind] - 1, *state[kind + 1 :]), first
        order.reverse()
        layers.reverse()
        slowest = max(self.tables[kind].time(part) for kind, part in zip(order, layers, strict=True))
        return Chain(tuple(order), tuple(layers), slowest)

    def fits(self, chain: Chain) -> bool:
        """Whether the chain's stages fit in memory with this number of samples."""
        return all(
            self.tables[kind].fits(part, self.samples, self.in_flight(position))
            for position, (kind, part) in enumerate(zip(chain.order, chain.layers, strict=True))
        )


def _sum_within(limit_s: float, before: Seconds, times: Seconds) -> Seconds:
    """The sum of the stages' times, none above the limit; of equal sums that with the least squares."""
    allowed = np.where(times <= limit_s, times, inf)
    return before[:, None] + allowed + LEVELLING * allowed**2 / limit_s
