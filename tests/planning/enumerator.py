"""The best plan of a small problem by brute force, sharing nothing with the search but the cost model.

Every partition of layers x samples into at most four rectangles (built by filling the first free cell, so irregular
ones too), every choice of devices, every grouping of them and every assignment of groups to rectangles. Candidates are
simulated in the order of a lower bound, until the bound is no better than the best that was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf

import numpy as np

from whale_trainer.cluster import Cluster, Device
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.costs.footprints import Flow
from whale_trainer.planning.costs.memory import rank_memory, usable_bytes
from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.search.balance import whole_weights
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.plan_times import PlanTimes
from whale_trainer.planning.simulation.simulate import simulate
from whale_trainer.planning.simulation.times import TimeModel

Rectangle = tuple[int, int, int, int]
"""First layer, layer after the last, first sample, sample after the last."""
Group = tuple[Device, ...]


@lru_cache
def partitions(num_layers: int, height: int, most: int) -> dict[int, np.ndarray]:
    """All partitions into n rectangles, by n: [partitions, n, 4]."""
    found: dict[int, list[tuple[Rectangle, ...]]] = {n: [] for n in range(1, most + 1)}

    def fill(taken: np.ndarray, rectangles: tuple[Rectangle, ...]) -> None:
        free = np.argwhere(~taken)
        if not len(free):
            found[len(rectangles)].append(rectangles)
            return
        if len(rectangles) == most:
            return
        y, x = (int(v) for v in free[0])
        widest = x
        while widest < num_layers and not taken[y, widest]:
            widest += 1
        for right in range(x + 1, widest + 1):
            for bottom in range(y + 1, height + 1):
                if taken[y:bottom, x:right].any():
                    break
                taken[y:bottom, x:right] = True
                fill(taken, (*rectangles, (x, right, y, bottom)))
                taken[y:bottom, x:right] = False

    fill(np.zeros((height, num_layers), dtype=bool), ())
    return {n: np.array(tilings, dtype=np.int64).reshape(-1, n, 4) for n, tilings in found.items()}


def assignments(devices: Sequence[Device], num_groups: int, most_shards: int) -> Iterator[tuple[Group, ...]]:
    """Ordered groups of some of the devices; of alike ones once."""
    seen = set()

    def deal(index: int, groups: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
        if index == len(devices):
            if all(groups):
                yield groups
            return
        yield from deal(index + 1, groups)
        for i, group in enumerate(groups):
            if len(group) < most_shards:
                yield from deal(index + 1, (*groups[:i], (*group, devices[index]), *groups[i + 1 :]))

    for groups in deal(0, ((),) * num_groups):
        like = tuple(tuple((d.kind.name, d.node) for d in group) for group in groups)
        if like not in seen:
            seen.add(like)
            yield groups


class Enumerator:
    """One problem: a model on a cluster, with `micro_batches` of `height` samples."""

    def __init__(self, costs: CostModel, cluster: Cluster, micro_batches: int, height: int, most_shards: int) -> None:
        self.costs = costs
        self.cluster = cluster
        self.times = TimeModel(costs, cluster)
        self.micro_batches = micro_batches
        self.height = height
        self.most_shards = most_shards
        self.num_simulated = 0
        self._usable = {d.kind.name: usable_bytes(d.kind) for d in cluster.devices}
        self._room: dict[tuple[object, ...], bool] = {}

    def best(self, schedules: Sequence[str] = ("1f1b", "gpipe")) -> tuple[float, Plan | None]:
        """The least step time and its plan; (inf, None) when nothing fits."""
        queue = []
        most = min(4, len(self.cluster.devices))
        for num_tiles, tilings in partitions(self.costs.model.num_layers, self.height, most).items():
            for groups in assignments(self.cluster.devices, num_tiles, self.most_shards):
                for index, bound in enumerate(self._bounds(tilings, groups)):
                    queue.append((float(bound), len(queue), tilings[index], groups))
        queue.sort(key=lambda entry: entry[:2])
        best_s, best = inf, None
        for bound, _, tiling, groups in queue:
            if bound >= best_s:
                break
            rectangles = tiling.tolist()
            ways = depths(rectangles)
            for schedule in schedules:
                tiles = zip(rectangles, groups, ways, strict=True)
                if not all(self._may_fit(*tile, schedule) for tile in tiles):
                    continue
                plan = self._plan(rectangles, groups, schedule)
                if self._fits(plan):
                    self.num_simulated += 1
                    step_s = simulate(plan, PlanTimes(plan, self.times)).step_s
                    if step_s < best_s:
                        best_s, best = step_s, plan
        return best_s, best

    def _weights(self, group: Group) -> tuple[int, ...]:
        return whole_weights([d.kind.speed(self.costs.precision.dtype) for d in group])

    def _bounds(self, tilings: np.ndarray, groups: tuple[Group, ...]) -> np.ndarray:
        """For each tiling: the way to a tile, all its own passes, and the way back; and the sums that must follow."""
        count = len(groups)
        left, right, top, bottom = (tilings[:, :, i] for i in range(4))
        forward, backward = np.zeros(left.shape), np.zeros(left.shape)
        for t, group in enumerate(groups):
            for height in range(1, self.height + 1):
                rows = bottom[:, t] - top[:, t] == height
                seconds = self.times.group(group, self._weights(group), height)
                a, b = left[rows, t], right[rows, t]
                forward[rows, t] = seconds.forward[b] - seconds.forward[a]
                backward[rows, t] = seconds.backward[b] - seconds.backward[a]
        before, after = np.zeros(left.shape), np.zeros(left.shape)
        for _ in range(count - 1):
            for t in range(count):
                for u in range(count):
                    touches = (right[:, u] == left[:, t]) & (
                        np.maximum(top[:, u], top[:, t]) < np.minimum(bottom[:, u], bottom[:, t])
                    )
                    before[:, t] = np.where(
                        touches, np.maximum(before[:, t], before[:, u] + forward[:, u]), before[:, t]
                    )
                    after[:, t] = np.where(touches, np.maximum(after[:, t], after[:, u] + backward[:, u]), after[:, t])
        own = self.micro_batches * (forward + backward)
        bound = (before + own + after).max(axis=1)
        if count > 1 and all(len(g) == 1 for g in groups):
            sums = self._sums(left, right, groups)
            bound = np.maximum(bound, (before + own - backward + sums).max(axis=1))
        return bound

    def _sums(self, left: np.ndarray, right: np.ndarray, groups: tuple[Group, ...]) -> np.ndarray:
        """Seconds of the sums that each tile takes part in, without the time to start them."""
        cut, whole, _ = self.times.gradient_bytes
        total = np.zeros(left.shape)
        per_byte = {
            held: self.times.sum_costs([groups[t][0] for t in range(len(groups)) if held >> t & 1])[1]
            for held in range(1 << len(groups))
        }
        table = np.array([per_byte[held] for held in range(1 << len(groups))])
        for layer in range(self.costs.model.num_layers):
            holds = (left <= layer) & (layer < right)
            held = (holds << np.arange(len(groups))).sum(axis=1)
            total += holds * (table[held] * (cut[layer] + whole[layer]))[:, None]
        return total

    def _plan(self, rectangles: Sequence[Sequence[int]], groups: tuple[Group, ...], schedule: str) -> Plan:
        devices = sorted({d.index: d for group in groups for d in group}.values(), key=lambda d: d.index)
        rank_of = {d.index: rank for rank, d in enumerate(devices)}
        tiles = [
            Tile(
                Interval(x, to),
                Interval(y, down),
                tuple(Shard(rank_of[d.index], w) for d, w in zip(group, self._weights(group), strict=True)),
            )
            for (x, to, y, down), group in zip(rectangles, groups, strict=True)
        ]
        return Plan(
            tuple(tiles),
            self.costs.model.layer_names,
            self.micro_batches,
            self.micro_batches * self.height,
            schedule,
            tuple(PlannedDevice(r, d.kind.name, d.node, d.kind.memory_bytes) for r, d in enumerate(devices)),
        )

    def _fits(self, plan: Plan) -> bool:
        usable = (self._usable[d.kind] for d in plan.devices)
        return all(items.total <= room for items, room in zip(rank_memory(plan, self.costs), usable, strict=True))

    def _may_fit(self, rectangle: Sequence[int], group: Group, depth: int, schedule: str) -> bool:
        """Whether one tile alone leaves its devices room; what copies of gradients take comes on top."""
        left, right, top, bottom = rectangle
        key = (tuple(rectangle), tuple(d.index for d in group), depth, schedule)
        if key not in self._room:
            flying = self.micro_batches if schedule == "gpipe" else min(depth, self.micro_batches)
            flow = Flow(bottom - top, flying, self.micro_batches, bottom - top == self.height)
            shards = self.costs.tile(self._weights(group)).shards
            self._room[key] = all(
                shard.needs(left, right, flow) <= self._usable[device.kind.name]
                for shard, device in zip(shards, group, strict=True)
            )
        return self._room[key]


def depths(rectangles: Sequence[Sequence[int]]) -> list[int]:
    """For each tile the number of tiles on the longest way from it to the last layer, itself included."""
    found = [0] * len(rectangles)
    for t in sorted(range(len(rectangles)), key=lambda t: -rectangles[t][1]):
        _, right, top, bottom = rectangles[t]
        behind = [
            found[u] for u, (x, _, y, down) in enumerate(rectangles) if x == right and max(y, top) < min(down, bottom)
        ]
        found[t] = 1 + max(behind, default=0)
    return found
