"""The paper's own balancing (Whale, USENIX ATC'22, section 3.3), as a base line: `balance: whale`.

Loads follow the devices' single-precision peak FLOP/s; Algorithm 1 then shifts load from devices whose memory
overflows to the least busy of the others; earlier stages of a pipeline get the devices with more memory. The paper
leaves open what counts as a successful shift, how loads become whole and how stages stay contiguous; here a shift is as
much as the one needs and the other can take, whole units go to the largest remainders, and layers move from stage to
stage through their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

from whale_trainer.cluster import Device
from whale_trainer.planning.search.balance import whole_weights
from whale_trainer.planning.search.groups import Group
from whale_trainer.planning.search.replicas import Layout, Setting, Stage
from whale_trainer.planning.shares import Interval


def shift_loads(
    loads: Sequence[int], speeds: Sequence[float], usage: Callable[[int, int], float], minimum: int = 1
) -> list[int] | None:
    """Algorithm 1 on whole loads: from the fullest device that overflows to the least busy one, until all fit.

    `usage(i, load)` is the part of device i's memory that `load` units take. None when load is left over that nobody
    can take.
    """
    loads = list(loads)
    full = [i for i, load in enumerate(loads) if usage(i, load) > 1]
    free = [i for i in range(len(loads)) if i not in full]
    while full and free:
        peak = max(full, key=lambda i: (usage(i, loads[i]), -i))
        valley = min(free, key=lambda i: (loads[i] / speeds[i], usage(i, loads[i]), i))
        while usage(peak, loads[peak]) > 1 and loads[peak] > minimum and usage(valley, loads[valley] + 1) <= 1:
            loads[peak] -= 1
            loads[valley] += 1
        if usage(peak, loads[peak]) <= 1:
            full.remove(peak)
        elif loads[peak] <= minimum:
            return None
        else:
            free.remove(valley)
    return None if full else loads


def largest_remainders(units: int, parts: Sequence[float], minimum: int = 1) -> list[int]:
    """Whole shares nearest to `units` x `parts`, each at least `minimum`."""
    exact = [units * p / sum(parts) for p in parts]
    shares = [max(minimum, int(x)) for x in exact]
    order = sorted(range(len(parts)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in order[: max(0, units - sum(shares))]:
        shares[i] += 1
    while sum(shares) > units:
        shares[max(range(len(shares)), key=lambda i: (shares[i] - exact[i], i))] -= 1
    return shares


def peak_speed(device: Device) -> float:
    """Single-precision FLOP/s of the data sheet, as the paper takes them."""
    return device.kind.peak_flops["fp32"]


def whale_layout(setting: Setting, layers: Interval, groups: Sequence[Group], num_stages: int) -> Layout | None:
    """Replicas of `num_stages` groups each, balanced as in the paper; None when Algorithm 1 ends with an overflow."""
    num_replicas = len(groups) // num_stages
    if setting.height < num_replicas or len(layers) < num_stages:
        return None
    by_memory = sorted(groups, key=lambda g: (-min(d.kind.memory_bytes for d in g.devices), g.first))
    by_memory = by_memory[: num_replicas * num_stages]
    grid = [by_memory[s * num_replicas : (s + 1) * num_replicas] for s in range(num_stages)]
    speeds = [sum(peak_speed(d) for g in stage for d in g.devices) for stage in grid]
    shares = largest_remainders(setting.height, [_replica_speed(grid, r) for r in range(num_replicas)])
    cuts = _cut_layers(setting, layers, grid, speeds, shares)
    if cuts is None:
        return None
    found = shift_loads(
        shares,
        [_replica_speed(grid, r) for r in range(num_replicas)],
        lambda r, n: max(_usage(setting, grid[s][r], cuts[s], n, s, num_stages) for s in range(num_stages)),
    )
    if found is None:
        return None
    replicas = tuple(
        tuple(Stage(cuts[s], grid[s][r], _weights(grid[s][r])) for s in range(num_stages)) for r in range(num_replicas)
    )
    pace_s = 0.0
    for replica, n in zip(replicas, found, strict=True):
        spent = []
        for stage in replica:
            seconds = setting.seconds(stage.group.devices, stage.weights, n)
            spent.append(float(seconds[stage.layers.stop] - seconds[stage.layers.start]))
        slots = setting.micro_batches
        pace_s = max(pace_s, (max(spent) * (slots - 1) + sum(spent)) / slots)
    return Layout(replicas, tuple(found), pace_s)


def _replica_speed(grid: Sequence[Sequence[Group]], replica: int) -> float:
    """A pipeline is as fast as its slowest stage allows; stages have work in proportion, so their speeds add up."""
    return sum(peak_speed(d) for stage in grid for d in stage[replica].devices)


def _weights(group: Group) -> tuple[int, ...]:
    return whole_weights([peak_speed(d) for d in group.devices])


def _cut_layers(
    setting: Setting, layers: Interval, grid: Sequence[Sequence[Group]], speeds: Sequence[float], shares: Sequence[int]
) -> list[Interval] | None:
    """Contiguous stages with FLOPs in proportion to their speed, then moved while one overflows."""
    flops = [setting.costs.model.layers[i].forward_flops for i in range(*layers)]
    sums = list(accumulate(flops, initial=0.0))
    wanted = list(accumulate(speeds, initial=0.0))
    edges = [0]
    for s in range(1, len(grid)):
        target = sums[-1] * wanted[s] / wanted[-1]
        low, high = edges[-1] + 1, len(flops) - (len(grid) - s)
        edges.append(min(range(low, high + 1), key=lambda e: (abs(sums[e] - target), e)))
    edges.append(len(flops))

    def usage(stage: int, length: int) -> float:
        start = layers.start + edges[stage]
        part = Interval(start, start + length)
        used = (_usage(setting, group, part, n, stage, len(grid)) for group, n in zip(grid[stage], shares, strict=True))
        return inf if part.stop > layers.stop else max(used)

    for _ in range(len(flops) * len(grid)):
        lengths = [b - a for a, b in pairwise(edges)]
        used = [usage(s, length) for s, length in enumerate(lengths)]
        full = [s for s, u in enumerate(used) if u > 1]
        if not full:
            return [Interval(layers.start + a, layers.start + b) for a, b in pairwise(edges)]
        peak = max(full, key=lambda s: (used[s], -s))
        free = [s for s in range(len(grid)) if s not in full]
        if not free or lengths[peak] == 1:
            return None
        valley = min(free, key=lambda s: (lengths[s] / speeds[s], used[s], s))
        # one layer goes over every edge between the two
        for edge in range(min(peak, valley) + 1, max(peak, valley) + 1):
            edges[edge] += -1 if peak < valley else 1
    return None


def _usage(setting: Setting, group: Group, layers: Interval, samples: int, stage: int, num_stages: int) -> float:
    """The fullest device's part of its memory."""
    if setting.free is None:
        return 0.0
    shards = setting.costs.tile(_weights(group)).shards
    flying = setting.in_flight(stage, num_stages, 0)
    return max(
        shard.memory(layers.start, layers.stop, samples, flying, setting.micro_batches) / max(1.0, setting.free(device))
        for shard, device in zip(shards, group.devices, strict=True)
    )
