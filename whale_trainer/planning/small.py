"""The best plan of a few devices: every slicing of the rectangle, on every grouping and order of the devices.

Thousands of tilings are bounded at once (numpy plays all that have the same bridges together, without shared links and
without the start-up time of sums, so that no bound is above the truth), then simulated one by one, the most promising
first, until the next bound is no better than what was found. Fine models are cut at grid lines of about equal work;
`moves.improve` then moves the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, permutations

import numpy as np
import numpy.typing as npt

from whale_trainer.cluster import Device
from whale_trainer.planning.actions import Op
from whale_trainer.planning.balance import whole_weights
from whale_trainer.planning.candidates import Candidate, Weigher
from whale_trainer.planning.plan import Shard, Tile
from whale_trainer.planning.schedule import Bridge
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulate import compiled
from whale_trainer.planning.slicing import Slicings, groupings, slicings
from whale_trainer.planning.times import Seconds

MOST_DEVICES = 4
"""Up to which the search is over all tilings; beyond, their number grows too fast."""
MOST_LINES = 8
"""Intervals of the grid, by layers and by samples."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Devices that share a tile, with the weights of its shards."""

    devices: tuple[Device, ...]
    weights: tuple[int, ...]

    @property
    def like(self) -> tuple[object, ...]:
        """Equal for groups that differ in nothing but which of several equal devices they have."""
        return tuple((d.kind.name, d.node) for d in self.devices), self.weights


@dataclass(frozen=True)
class Pace:
    """Prefix sums of a group's seconds, by [samples, layers]; only where the grid has such heights."""

    forward: Seconds
    backward: Seconds

    @classmethod
    def of(cls, weigher: Weigher, group: Group, samples: Table) -> Pace:
        heights = sorted({int(b - a) for b in samples for a in samples if b > a})
        shape = (heights[-1] + 1, len(weigher.costs.model.layers) + 1)
        forward, backward = np.zeros(shape), np.zeros(shape)
        for height in heights:
            times = weigher.times.group(group.devices, group.weights, height)
            forward[height], backward[height] = times.forward, times.backward
        return cls(forward, backward)


@dataclass(frozen=True)
class Bounded:
    """A tiling, not yet simulated."""

    bound_s: float
    tiles: tuple[Tile, ...]
    micro_batches: int
    schedule: str


def search_small(
    weigher: Weigher, variants: Sequence[tuple[int, str]], best_s: float, budget: int, most_shards: int
) -> list[Candidate]:
    """The candidates that were simulated, best first. `best_s`: what is already known to be possible.

    `variants` are (micro-batches, schedule); `most_shards` how many shards a tile of all layers may have.
    """
    bounded: list[Bounded] = []
    for micro_batches, schedule in variants:
        bounded += _bounded(weigher, micro_batches, schedule, best_s, most_shards)
    bounded.sort(key=lambda b: (b.bound_s, len(b.tiles), b.tiles, b.micro_batches, b.schedule))
    found: list[Candidate] = []
    stop = weigher.num_simulated + budget
    for entry in bounded:
        if entry.bound_s >= best_s or weigher.num_simulated >= stop:
            break
        candidate = weigher.weigh(entry.tiles, entry.micro_batches, entry.schedule)
        if candidate is not None:
            found.append(candidate)
            best_s = min(best_s, candidate.step_s)
    return sorted(found, key=lambda c: c.rank_key)


def _bounded(weigher: Weigher, micro_batches: int, schedule: str, best_s: float, most_shards: int) -> Iterator[Bounded]:
    height = -(-weigher.global_batch // micro_batches)
    samples = _lines(np.arange(height + 1, dtype=float))
    paces: dict[tuple[object, ...], Pace] = {}
    for groups in _divisions(weigher, most_shards):
        share = max(1, height // len(groups))
        work = np.sum([weigher.times.group(g.devices, g.weights, share).both for g in groups], axis=0)
        layers = _lines(work)
        if len(groups) > (len(layers) - 1) * (len(samples) - 1):
            continue
        for group in groups:
            if group.like not in paces:
                paces[group.like] = Pace.of(weigher, group, samples)
        for tilings in slicings(len(groups), len(layers) - 1, len(samples) - 1):
            grid = Grid(layers, samples, tilings)
            for order in _orders(groups):
                own = [paces[group.like] for group in order]
                yield from _bound(weigher, grid, order, own, micro_batches, schedule, best_s)


def _lines(work: Seconds) -> Table:
    """Grid lines, from 0 to the end, between which there is about equal work; all of them where they are few."""
    last = len(work) - 1
    if last <= MOST_LINES:
        return np.arange(last + 1)
    wanted = np.linspace(work[0], work[-1], MOST_LINES + 1)
    nearest = np.abs(work[None, :] - wanted[:, None]).argmin(axis=1)
    return np.unique(np.concatenate(([0], nearest, [last])))


def _divisions(weigher: Weigher, most_shards: int) -> Iterator[tuple[Group, ...]]:
    """Every choice of devices and every way to put them into groups, alike ones once."""
    devices = [d for d in weigher.cluster.devices if weigher.costs.precision.dtype in d.kind.dtypes]
    seen: set[tuple[object, ...]] = set()
    for count in range(len(devices), 0, -1):
        for chosen in combinations(range(len(devices)), count):
            for num_groups in range(count, 0, -1):
                for members in groupings(chosen, num_groups):
                    if max(map(len, members)) > most_shards:
                        continue
                    groups = tuple(_group(weigher, [devices[i] for i in group]) for group in members)
                    like = tuple(sorted((g.like for g in groups), key=repr))
                    if like not in seen:
                        seen.add(like)
                        yield groups


def _group(weigher: Weigher, devices: Sequence[Device]) -> Group:
    speeds = [d.kind.speed(weigher.costs.precision.dtype) for d in devices]
    return Group(tuple(devices), whole_weights(speeds))


def _orders(groups: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
    seen: set[tuple[object, ...]] = set()
    for order in permutations(groups):
        like = tuple(g.like for g in order)
        if like not in seen:
            seen.add(like)
            yield order


@dataclass(frozen=True)
class Grid:
    """Tilings of one kind, in layers and samples."""

    layers: Table
    samples: Table
    tilings: Slicings

    @cached_property
    def edges(self) -> tuple[Table, Table, Table, Table]:
        """First layers, layers after the last, first samples, samples after the last, by [tiling, tile]."""
        layers, samples = self.layers[self.tilings.layers], self.samples[self.tilings.samples]
        return layers[:, :, 0], layers[:, :, 1], samples[:, :, 0], samples[:, :, 1]


def _bound(
    weigher: Weigher,
    grid: Grid,
    groups: tuple[Group, ...],
    paces: Sequence[Pace],
    micro_batches: int,
    schedule: str,
    best_s: float,
) -> Iterator[Bounded]:
    """The tilings whose bound is below `best_s`."""
    starts, stops, tops, bottoms = grid.edges
    forward, backward = _durations(paces, starts, stops, bottoms - tops)
    least = weigher.global_batch // int(grid.samples[-1])
    kept = np.flatnonzero(((forward + backward) * least).max(axis=1) < best_s)
    if not len(kept):
        return
    starts, stops, tops, bottoms = starts[kept], stops[kept], tops[kept], bottoms[kept]
    forward, backward = forward[kept], backward[kept]
    edges = (starts, stops, tops, bottoms)
    bounds = _play(weigher, grid.tilings.bridges, groups, edges, forward, backward, schedule)
    for i in np.flatnonzero(bounds < best_s):
        tiles = tuple(
            Tile(
                Interval(int(starts[i, t]), int(stops[i, t])),
                Interval(int(tops[i, t]), int(bottoms[i, t])),
                tuple(Shard(d.index, w) for d, w in zip(group.devices, group.weights, strict=True)),
            )
            for t, group in enumerate(groups)
        )
        yield Bounded(float(bounds[i]), tiles, micro_batches, schedule)


def _durations(paces: Sequence[Pace], starts: Table, stops: Table, heights: Table) -> tuple[Seconds, Seconds]:
    """(forward, backward) seconds by tiling and tile."""
    forward, backward = np.zeros(starts.shape), np.zeros(starts.shape)
    for tile, pace in enumerate(paces):
        h, a, b = heights[:, tile], starts[:, tile], stops[:, tile]
        forward[:, tile] = pace.forward[h, b] - pace.forward[h, a]
        backward[:, tile] = pace.backward[h, b] - pace.backward[h, a]
    return forward, backward


def _play(
    weigher: Weigher,
    bridges: tuple[Bridge, ...],
    groups: tuple[Group, ...],
    edges: tuple[Table, Table, Table, Table],
    forward: Seconds,
    backward: Seconds,
    schedule: str,
) -> Seconds:
    """Bounds of many tilings with the same bridges: `simulate`, without what could make the step longer only."""
    starts, stops, tops, bottoms = edges
    # a short last micro-batch may leave tiles without samples: without it the bound stays below the truth
    count = weigher.global_batch // int(bottoms.max())
    program = compiled(tuple((t,) for t in range(len(groups))), bridges, (count,) * len(groups), schedule)
    crossing: list[tuple[Seconds | float, float]] = []
    for index, op in program.crossings:
        bridge = bridges[index]
        source, target = (bridge.before, bridge.after) if op is Op.FORWARD else (bridge.after, bridge.before)
        per_sample, latency = _crossing(weigher, groups[source], groups[target])
        sizes = weigher.times.boundary_bytes[stops[:, bridge.before] - 1]
        rows = np.minimum(bottoms[:, bridge.before], bottoms[:, bridge.after]) - np.maximum(
            tops[:, bridge.before], tops[:, bridge.after]
        )
        crossing.append((per_sample * sizes * rows, latency))
    num = len(starts)
    free: list[Seconds] = [np.zeros(num) for _ in groups]
    arrived: dict[int, Seconds] = {}
    begun: list[Seconds] = [np.zeros(num) for _ in groups]
    for index, action in enumerate(program.actions):
        tile = action.tile
        start = free[tile] if index not in arrived else np.maximum(free[tile], arrived.pop(index))
        duration = forward if action.op is Op.FORWARD else backward
        stop = start + duration[:, tile]
        for number, consumer in program.outputs[index]:
            busy, latency = crossing[number]
            arrival = stop + busy + latency
            arrived[consumer] = np.maximum(arrived[consumer], arrival) if consumer in arrived else arrival
        free[tile], begun[tile] = stop, start
    ends: Seconds = np.maximum.reduce(free)
    if len(groups) > 1:
        ends = np.maximum(ends, _sums(weigher, groups, starts, stops, begun))
    return ends


def _crossing(weigher: Weigher, source: Group, target: Group) -> tuple[float, float]:
    """(seconds per byte, latency) of one message between two groups on their fastest link."""
    links = [weigher.times.link(a, b) for a in source.devices for b in target.devices]
    return min(1 / link.bandwidth_bytes_per_s for link in links), min(link.latency_s for link in links)


def _sums(
    weigher: Weigher, groups: tuple[Group, ...], starts: Table, stops: Table, begun: Sequence[Seconds]
) -> Seconds:
    """When the gradient sums of each tile can end at the earliest, after the start of its last backward pass."""
    cut, whole, _ = weigher.times.gradient_bytes
    sizes = np.array(cut) + np.array(whole)
    points = np.unique(np.concatenate((starts.ravel(), stops.ravel())))
    costs = np.zeros(1 << len(groups))
    for chosen in range(1, 1 << len(groups)):
        members = [g for t, g in enumerate(groups) if chosen >> t & 1]
        if len(members) > 1:
            # of a tensor group only one shard's part is sure to pass
            devices = [g.devices[0] for g in members]
            share = min(min(g.weights) / sum(g.weights) for g in members)
            costs[chosen] = weigher.times.sum_costs(devices)[1] * share
    totals = [np.zeros(len(starts)) for _ in groups]
    for a, b in pairwise(points):
        mask = np.zeros(len(starts), dtype=np.int64)
        for t in range(len(groups)):
            mask |= ((starts[:, t] <= a) & (stops[:, t] >= b)).astype(np.int64) << t
        seconds = costs[mask] * sizes[a:b].sum()
        for t, total in enumerate(totals):
            total += np.where(mask >> t & 1, seconds, 0.0)
    ends: Seconds = np.maximum.reduce([start + total for start, total in zip(begun, totals, strict=True)])
    return ends
