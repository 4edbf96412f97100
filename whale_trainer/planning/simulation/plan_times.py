"""The times of one plan's tiles, bridges and gradient sums, from the time model of its cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from whale_trainer.cluster import Device
from whale_trainer.planning.pieces import BUCKET_BYTES, FIRST_BUCKET_BYTES
from whale_trainer.planning.plan import Lengths, Plan
from whale_trainer.planning.schedule.actions import Op
from whale_trainer.planning.schedule.schedule import Bridge, pair_ranks
from whale_trainer.planning.simulation.simulate import Crossing, GradientSum, parts_of
from whale_trainer.planning.simulation.times import Seconds, TimeModel

LONGEST = 1000
"""Units of the longest action that `fitted` is made for."""


def _units(seconds: float, unit_s: float) -> int:
    return max(1, round(seconds / unit_s))


class PlanTimes:
    """What `simulate` asks for, for a plan on the cluster of `model`."""

    def __init__(self, plan: Plan, model: TimeModel) -> None:
        self.plan = plan
        self.model = model
        kinds = {d.kind.name: d.kind for d in model.cluster.devices}
        made: dict[tuple[str, str], Device] = {}
        self.devices: list[Device] = []
        for planned in plan.devices:
            key = (planned.kind, planned.node)
            if key not in made:
                made[key] = Device(index=planned.rank, kind=kinds[planned.kind], node=planned.node)
            self.devices.append(made[key])
        self._crossings: dict[Hashable, Crossing] = {}

    def _group(self, tile: int) -> tuple[Device, ...]:
        return tuple(self.devices[r] for r in self.plan.tiles[tile].ranks)

    def pass_s(self, tile: int, samples: int) -> tuple[float, float]:
        part = self.plan.tiles[tile]
        times = self.model.group(self._group(tile), part.weights, samples)
        start, stop = part.layers
        return float(times.forward[stop] - times.forward[start]), float(times.backward[stop] - times.backward[start])

    def weight_part(self, tile: int) -> float:
        part = self.plan.tiles[tile]
        times = self.model.group(self._group(tile), part.weights, len(part.samples))
        start, stop = part.layers
        whole = float(times.backward[stop] - times.backward[start])
        return float(times.weights[stop] - times.weights[start]) / whole if whole else 0.5

    def lengths(self) -> tuple[Lengths, ...]:
        """Lengths of the tiles' actions in whole units, of which the longest has `LONGEST`."""
        seconds = []
        for index, tile in enumerate(self.plan.tiles):
            forward, backward = self.pass_s(index, len(tile.samples))
            weights = backward * self.weight_part(index)
            seconds.append((forward, backward - weights, weights))
        unit = max(map(max, seconds)) / LONGEST or 1.0
        return tuple((_units(f, unit), _units(i, unit), _units(w, unit)) for f, i, w in seconds)

    def backward_part(self, tile: int, layer: int) -> float:
        part = self.plan.tiles[tile]
        seconds = self.model.group(self._group(tile), part.weights, len(part.samples)).backward
        start, stop = part.layers
        whole = float(seconds[stop] - seconds[start])
        return float(seconds[stop] - seconds[max(layer, start)]) / whole if whole else 1.0

    def sums_overlap(self, tile: int) -> bool:
        # on GPUs the sums of a tensor group wait, so that all ranks start their kernels in one order
        return len(self.plan.tiles[tile].shards) == 1 or not self._group(tile)[0].kind.is_gpu

    def crossing(self, bridge: Bridge, op: Op, samples: int) -> Crossing | None:
        """The messages of a bridge as one transfer: as long as its fullest port is busy."""
        tiles = self.plan.tiles
        source, target = (bridge.before, bridge.after) if op is Op.FORWARD else (bridge.after, bridge.before)
        num_bytes = float(self.model.boundary_bytes[tiles[bridge.before].layers.stop - 1]) * samples
        ports: dict[Hashable, float] = defaultdict(float)
        latency = 0.0
        for sender, receiver in pair_ranks(tiles[source].ranks, tiles[target].ranks):
            if sender == receiver:
                continue
            first, second = self.devices[sender], self.devices[receiver]
            link = self.model.link(first, second)
            latency = max(latency, link.latency_s)
            seconds = num_bytes / link.bandwidth_bytes_per_s
            if first.node == second.node:
                ports["device out", sender] += seconds
                ports["device in", receiver] += seconds
            else:
                ports["node out", first.node] += seconds * self._sharers.get(("node out", first.node), 1)
                ports["node in", second.node] += seconds * self._sharers.get(("node in", second.node), 1)
        if not ports:
            return None
        return Crossing(max(ports.values()), latency, tuple(ports), num_bytes)

    @cached_property
    def _sharers(self) -> dict[Hashable, int]:
        """How many parts of the plan send through each node's network port: each gets an equal share of it."""
        users: dict[Hashable, set[int]] = defaultdict(set)
        for number, (_, bridges) in enumerate(parts_of(self.plan)):
            for bridge in bridges:
                before = {self.devices[r].node for r in self.plan.tiles[bridge.before].ranks}
                after = {self.devices[r].node for r in self.plan.tiles[bridge.after].ranks}
                if before == after and len(before) == 1:
                    continue
                for node in before | after:
                    users["node out", node].add(number)
                    users["node in", node].add(number)
        return {port: len(parts) for port, parts in users.items()}

    # --- gradient sums ---

    def sums(self) -> Sequence[GradientSum]:
        """One list for all ranks, from the last layers to the first, in buckets; then what several layers share."""
        cut, whole, tied = self.model.gradient_bytes
        found = []
        for start, stop, tiles in reversed(self._bands):
            latency_s, cut_s, whole_s = self._band_costs(tiles)
            if not (cut_s or whole_s):
                continue
            limit, pending = float(FIRST_BUCKET_BYTES), 0.0
            seconds = 0.0
            for layer in range(stop - 1, start - 1, -1):
                seconds += cut[layer] * cut_s + whole[layer] * whole_s
                pending += cut[layer] + whole[layer]
                if pending and (pending >= limit or layer == start):
                    found.append(self._sum(tiles, layer, latency_s + seconds, pending))
                    limit, pending, seconds = float(BUCKET_BYTES), 0.0, 0.0
        for layers, is_cut, num_bytes in tied:
            holders: dict[int, None] = {}
            for start, stop, tiles in self._bands:
                if any(start <= layer < stop for layer in layers):
                    holders.update(dict.fromkeys(tiles))
            members = tuple(sorted(holders))
            latency_s, cut_s, whole_s = self._band_costs(members)
            if cut_s or whole_s:
                seconds = latency_s + num_bytes * (cut_s if is_cut else whole_s)
                found.append(self._sum(members, min(layers), seconds, num_bytes))
        return found

    def _sum(self, tiles: tuple[int, ...], layer: int, seconds: float, num_bytes: float) -> GradientSum:
        name = self.plan.layer_names[layer]
        return GradientSum(tiles, layer, seconds, num_bytes, f"sum of gradients down to {name}")

    @cached_property
    def _bands(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first layer, layer after the last, tiles) of layers that the same tiles hold."""
        points = sorted({point for tile in self.plan.tiles for point in tile.layers})
        starts: dict[int, list[int]] = defaultdict(list)
        for index, tile in enumerate(self.plan.tiles):
            starts[tile.layers.start].append(index)
        bands = []
        open_tiles: list[int] = []
        for start, stop in pairwise(points):
            open_tiles = [t for t in open_tiles if self.plan.tiles[t].layers.stop > start] + starts[start]
            bands.append((start, stop, tuple(sorted(open_tiles))))
        return bands

    def _band_costs(self, tiles: tuple[int, ...]) -> tuple[float, float, float]:
        """(seconds to start, seconds per byte of what is cut, of what every rank holds) of a sum over these tiles.

        What is cut falls into segments between the cut points of all tiles; a rank sums its segments one after the
        other, ranks of a tensor group at the same time through one port.
        """
        everyone = list(dict.fromkeys(r for t in tiles for r in self.plan.tiles[t].ranks))
        latency_s, whole_s = self.model.sum_costs([self.devices[r] for r in everyone])
        widest = max(len(self.plan.tiles[t].shards) for t in tiles)
        if widest == 1:
            return latency_s, whole_s, whole_s
        reaches = [self._reaches(t) for t in tiles]
        points = sorted({point for reach in reaches for point in reach})
        spent: dict[int, float] = defaultdict(float)
        known: dict[tuple[int, ...], float] = {}
        for a, b in pairwise(points):
            if b - a < 1e-12:
                continue
            ranks = []
            for tile, reach in zip(tiles, reaches, strict=True):
                shard = next(i for i, edge in enumerate(reach[1:]) if a < edge - 1e-12)
                ranks.append(self.plan.tiles[tile].ranks[shard])
            members = tuple(dict.fromkeys(ranks))
            if members not in known:
                known[members] = self.model.sum_costs([self.devices[r] for r in members], sharers=widest)[1]
            for rank in members:
                spent[rank] += (b - a) * known[members]
        return latency_s, max(spent.values(), default=0.0), whole_s

    def _reaches(self, tile: int) -> tuple[float, ...]:
        """Cut points of a tile's shards, from 0 to 1."""
        weights = self.plan.tiles[tile].weights
        total = sum(weights)
        return tuple(x / total for x in accumulate(weights, initial=0))

    # --- optimizer ---

    def optimizer_s(self, tile: int) -> float:
        held = {t for r in self.plan.tiles[tile].ranks for t in self._tiles_of[r]}
        return max(
            self.model.optimizer_s(
                self.devices[rank].kind,
                sum(self._elements(t, self.plan.tiles[t].shard_of(rank)) for t in held if t in self._tiles_of[rank]),
            )
            for rank in self.plan.tiles[tile].ranks
        )

    @cached_property
    def _tiles_of(self) -> list[list[int]]:
        held: list[list[int]] = [[] for _ in self.devices]
        for index, tile in enumerate(self.plan.tiles):
            for rank in tile.ranks:
                held[rank].append(index)
        return held

    def _elements(self, tile: int, shard: int) -> float:
        part = self.plan.tiles[tile]
        elements: Seconds = self.model.elements(part.weights, shard)
        return float(elements[part.layers.stop] - elements[part.layers.start])
