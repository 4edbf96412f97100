"""Bounds on the steps of many tilings at once, without those that certainly overfill a device.

Tilings that have the same bridges and put the same groups of devices on them differ in numbers only: numpy plays all of
them together, without shared links and with only as much of the gradient sums as is certain, so that no bound is above
the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_trainer.cluster import Device
from whale_trainer.planning.costs.cost_model import ShardCosts
from whale_trainer.planning.costs.footprints import Flow
from whale_trainer.planning.costs.memory import usable_bytes
from whale_trainer.planning.plan import Shard, Tile
from whale_trainer.planning.schedule.actions import Op
from whale_trainer.planning.schedule.schedule import Bridge, warm_ups
from whale_trainer.planning.search.candidates import Weigher
from whale_trainer.planning.search.slicing import Slicings
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.simulate import Program, compiled
from whale_trainer.planning.simulation.times import Seconds

ROOMY = 1.5
"""Where a device has that many times the memory that all layers of all samples need, tiles are not looked at."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Devices that share a tile, with the weights of its shards."""

    devices: tuple[Device, ...]
    weights: tuple[int, ...]

    @cached_property
    def like(self) -> tuple[object, ...]:
        """Equal for groups that differ in nothing but which of several equal devices they have."""
        return tuple((d.kind.name, d.node) for d in self.devices), self.weights


@dataclass(frozen=True)
class Bounded:
    """Tilings with the same bridges on the same groups, not yet simulated."""

    groups: tuple[Group, ...]
    """By tile."""
    edges: Table
    """[tilings, tiles, 4]: first layer, layer after the last, first sample, sample after the last."""
    bounds: Seconds
    """By tiling: its step takes no less."""
    micro_batches: int
    schedule: str

    def tiles(self, tiling: int) -> tuple[Tile, ...]:
        """With indices of the cluster's devices as ranks."""
        return tuple(
            Tile(
                Interval(start, stop),
                Interval(top, bottom),
                tuple(Shard(d.index, w) for d, w in zip(group.devices, group.weights, strict=True)),
            )
            for group, (start, stop, top, bottom) in zip(self.groups, self.edges[tiling].tolist(), strict=True)
        )


@dataclass(frozen=True)
class Pace:
    """A group's seconds, by [samples, layers]; only where the grid has such heights."""

    forward: Seconds
    """Prefix sums over the layers."""
    backward: Seconds
    """Prefix sums over the layers."""
    optimizer: Seconds
    """By [first line of the grid, last line]."""


@dataclass(frozen=True)
class Sums:
    """Gradient sums by the set of tiles that hold a layer: bit t for tile t of an order of groups."""

    latency_s: Seconds
    cut_s: Seconds
    """Per byte of what tensor groups cut, at least."""
    whole_s: Seconds
    """Per byte of the rest."""


@dataclass(frozen=True)
class _Moves:
    """Tilings at play: everything by [tiling, tile]."""

    lines: Table
    """[tilings, tiles, 2]: layers in lines of the grid."""
    edges: Table
    forward: Seconds
    backward: Seconds
    optimizer: Seconds

    def of(self, which: Any) -> _Moves:
        """Some of the tilings."""
        return _Moves(
            self.lines[which], self.edges[which], self.forward[which], self.backward[which], self.optimizer[which]
        )


class Grid:
    """Where tiles may begin and end, and what the tiles between these lines take; for one number of micro-batches."""

    def __init__(self, weigher: Weigher, micro_batches: int, layers: Table, samples: Table) -> None:
        self.weigher = weigher
        self.micro_batches = micro_batches
        self.layers = layers
        """Layers at the lines, from 0 to all."""
        self.samples = samples
        """Samples at the lines, from 0 to a whole micro-batch."""
        self._heights = sorted({int(b - a) for b in samples for a in samples if b > a})
        self._paces: dict[tuple[object, ...], Pace] = {}
        self._sums: dict[tuple[object, ...], Sums] = {}
        self._crossings: dict[tuple[object, ...], tuple[float, float]] = {}
        self._needs: dict[tuple[int, int], Seconds] = {}
        self._room: dict[tuple[object, ...], npt.NDArray[np.bool_] | None] = {}
        cut, whole, _ = weigher.times.gradient_bytes
        self._gradient_bytes = [np.add.reduceat(np.array(sizes), layers[:-1]) for sizes in (cut, whole)]

    def bounded(
        self, tilings: Slicings, groups: tuple[Group, ...], schedules: Sequence[str], best_s: float
    ) -> Iterator[Bounded]:
        """The tilings that may take less than `best_s`; not those that play like an earlier one of the schedules."""
        height = int(self.samples[-1])
        # a short last micro-batch may leave tiles without samples: without it the bound stays below the truth
        count = self.weigher.global_batch // height
        everything = self._moves(tilings, groups)
        busy_s = ((everything.forward + everything.backward) * count + everything.optimizer).max(axis=1)
        promising = busy_s < best_s
        if not promising.any():
            return
        played: list[Program] = []
        for schedule in schedules:
            program = compiled(
                tuple((t,) for t in range(len(groups))), tilings.bridges, (count,) * len(groups), schedule
            )
            if any(program.actions == other.actions for other in played):
                continue
            played.append(program)
            kept = np.flatnonzero(promising & self._fit(tilings, groups, schedule))
            if len(kept):
                moves = everything.of(kept)
                bounds = self._play(program, tilings.bridges, groups, moves)
                below = np.flatnonzero(bounds < best_s)
                yield Bounded(groups, moves.edges[below], bounds[below], self.micro_batches, schedule)

    def _moves(self, tilings: Slicings, groups: tuple[Group, ...]) -> _Moves:
        edges = np.concatenate((self.layers[tilings.layers], self.samples[tilings.samples]), axis=2)
        forward, backward, optimizer = (np.zeros(edges.shape[:2]) for _ in range(3))
        for tile, group in enumerate(groups):
            pace = self._pace(group)
            start, stop, top, bottom = edges[:, tile].T
            height = bottom - top
            forward[:, tile] = pace.forward[height, stop] - pace.forward[height, start]
            backward[:, tile] = pace.backward[height, stop] - pace.backward[height, start]
            first, last = tilings.layers[:, tile].T
            optimizer[:, tile] = pace.optimizer[first, last]
        return _Moves(tilings.layers, edges, forward, backward, optimizer)

    def _pace(self, group: Group) -> Pace:
        if group.like not in self._paces:
            times = self.weigher.times
            forward, backward = np.zeros((2, self._heights[-1] + 1, int(self.layers[-1]) + 1))
            for height in self._heights:
                found = times.group(group.devices, group.weights, height)
                forward[height], backward[height] = found.forward, found.backward
            optimizer = np.zeros((len(self.layers), len(self.layers)))
            for shard, device in enumerate(group.devices):
                elements = times.elements(group.weights, shard)[self.layers]
                for first, last in self._spans:
                    seconds = times.optimizer_s(device.kind, float(elements[last] - elements[first]))
                    optimizer[first, last] = max(optimizer[first, last], seconds)
            self._paces[group.like] = Pace(forward, backward, optimizer)
        return self._paces[group.like]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Every pair of lines between layers."""
        return [(first, last) for last in range(len(self.layers)) for first in range(last)]

    # --- memory ---

    def _fit(self, tilings: Slicings, groups: tuple[Group, ...], schedule: str) -> npt.NDArray[np.bool_]:
        """False where some tile alone overfills a device; what copies of gradients take comes on top."""
        fitting = np.ones(len(tilings.layers), dtype=bool)
        flying = [self.micro_batches] * len(groups)
        if schedule != "gpipe":
            depths = warm_ups([(t,) for t in range(len(groups))], tilings.bridges)
            flying = [min(self.micro_batches, depth) for depth in depths]
        for tile, (group, in_flight) in enumerate(zip(groups, flying, strict=True)):
            room = self._room_of(group, in_flight)
            if room is not None:
                (first, last), (top, bottom) = tilings.layers[:, tile].T, self.samples[tilings.samples[:, tile]].T
                fitting &= room[bottom - top, first, last]
        return fitting

    def _room_of(self, group: Group, in_flight: int) -> npt.NDArray[np.bool_] | None:
        """Whether layers between two lines fit, by [samples, first line, last line]; None where memory is no matter."""
        key = (group.like, in_flight)
        if key not in self._room:
            shards = self.weigher.costs.tile(group.weights).shards
            usable = [usable_bytes(device.kind) for device in group.devices]
            pairs = list(zip(shards, usable, strict=True))
            whole = self._flow(self._heights[-1], in_flight)
            found = None
            if any(ROOMY * shard.needs(0, int(self.layers[-1]), whole) > bytes_ for shard, bytes_ in pairs):
                found = np.logical_and.reduce([self._needs_of(shard, in_flight) <= bytes_ for shard, bytes_ in pairs])
            self._room[key] = found
        return self._room[key]

    def _needs_of(self, shard: ShardCosts, in_flight: int) -> Seconds:
        """Bytes by [samples, first line, last line]."""
        key = (id(shard), in_flight)
        if key not in self._needs:
            found = np.zeros((self._heights[-1] + 1, len(self.layers), len(self.layers)))
            lines = self.layers.tolist()
            for height in self._heights:
                flow = self._flow(height, in_flight)
                for first, last in self._spans:
                    found[height, first, last] = shard.needs(lines[first], lines[last], flow)
            self._needs[key] = found
        return self._needs[key]

    def _flow(self, height: int, in_flight: int) -> Flow:
        whole = self._heights[-1]
        micro_batches = -(-self.weigher.global_batch // whole)
        return Flow(height, min(in_flight, micro_batches), micro_batches, height == whole)

    # --- time ---

    def _play(self, program: Program, bridges: Sequence[Bridge], groups: tuple[Group, ...], moves: _Moves) -> Seconds:
        """`simulate`, without what could make the step longer only."""
        crossing = self._arrivals(program, bridges, groups, moves)
        num = len(moves.edges)
        free: list[Seconds] = [np.zeros(num) for _ in groups]
        arrived: dict[int, Seconds] = {}
        begun: list[Seconds] = [np.zeros(num) for _ in groups]
        for index, action in enumerate(program.actions):
            tile = action.tile
            start = free[tile] if index not in arrived else np.maximum(free[tile], arrived.pop(index))
            duration = moves.forward if action.op is Op.FORWARD else moves.backward
            stop = start + duration[:, tile]
            for number, consumer in program.outputs[index]:
                arrival = stop + crossing[number]
                arrived[consumer] = np.maximum(arrived[consumer], arrival) if consumer in arrived else arrival
            free[tile], begun[tile] = stop, start
        ends = np.stack(free, axis=1)
        if len(groups) > 1:
            ends = np.maximum(ends, np.stack(begun, axis=1) + self._sum_seconds(groups, moves.lines))
        found: Seconds = (ends + moves.optimizer).max(axis=1)
        return found

    def _arrivals(
        self, program: Program, bridges: Sequence[Bridge], groups: tuple[Group, ...], moves: _Moves
    ) -> list[Seconds]:
        """For each crossing of the program, by tiling the seconds from the end of an action to its arrival."""
        found = []
        for index, op in program.crossings:
            bridge = bridges[index]
            source, target = (bridge.before, bridge.after) if op is Op.FORWARD else (bridge.after, bridge.before)
            per_byte_s, latency_s = self._crossing(groups[source], groups[target])
            before, after = moves.edges[:, bridge.before], moves.edges[:, bridge.after]
            rows = np.minimum(before[:, 3], after[:, 3]) - np.maximum(before[:, 2], after[:, 2])
            found.append(per_byte_s * self.weigher.times.boundary_bytes[before[:, 1] - 1] * rows + latency_s)
        return found

    def _crossing(self, source: Group, target: Group) -> tuple[float, float]:
        """(seconds per byte, latency) of one message between two groups on their fastest link."""
        key = (source.like, target.like)
        if key not in self._crossings:
            links = [self.weigher.times.link(a, b) for a in source.devices for b in target.devices]
            per_byte_s = min(1 / link.bandwidth_bytes_per_s for link in links)
            self._crossings[key] = per_byte_s, min(link.latency_s for link in links)
        return self._crossings[key]

    def _sum_seconds(self, groups: tuple[Group, ...], lines: Table) -> Seconds:
        """Of all gradient sums in which a tile takes part, by [tiling, tile]: they run one after the other."""
        sums = self._sums_of(groups)
        at = np.arange(len(self.layers) - 1)
        holds = (lines[:, :, :1] <= at) & (at < lines[:, :, 1:])
        tiles = (holds << np.arange(len(groups))[:, None]).sum(axis=1)
        cut, whole = self._gradient_bytes
        seconds = sums.cut_s[tiles] * cut + sums.whole_s[tiles] * whole
        # layers that the same tiles hold are summed together: where the tiles change, it starts anew
        fresh = np.ones(tiles.shape, dtype=bool)
        fresh[:, 1:] = tiles[:, 1:] != tiles[:, :-1]
        seconds += np.where(fresh & (cut + whole > 0), sums.latency_s[tiles], 0.0)
        found: Seconds = np.einsum("nts,ns->nt", holds, seconds)
        return found

    def _sums_of(self, groups: tuple[Group, ...]) -> Sums:
        key = tuple(group.like for group in groups)
        if key not in self._sums:
            latency_s, cut_s, whole_s = np.zeros((3, 1 << len(groups)))
            for chosen in range(1, 1 << len(groups)):
                members = [group for t, group in enumerate(groups) if chosen >> t & 1]
                if len(members) < 2:
                    continue
                everyone = [device for group in members for device in group.devices]
                latency_s[chosen], whole_s[chosen] = self.weigher.times.sum_costs(everyone)
                # of what tensor groups cut, only what the first shards of all have in common is sure to pass
                share = min(group.weights[0] / sum(group.weights) for group in members)
                cut_s[chosen] = share * self.weigher.times.sum_costs([group.devices[0] for group in members])[1]
            self._sums[key] = Sums(latency_s, cut_s, whole_s)
        return self._sums[key]
