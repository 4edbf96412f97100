"""The best plan of a few devices: every slicing of the rectangle, on every grouping and order of the devices.

Thousands of tilings are bounded at once (`tilings`), then simulated one by one, the most promising first, until the
next bound is no better than what was found. Fine models are cut at grid lines of about equal work; `moves.improve` then
moves the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, groupby, permutations

import numpy as np

from whale_trainer.cluster import Device
from whale_trainer.planning.plan import Tile
from whale_trainer.planning.search.balance import whole_weights
from whale_trainer.planning.search.candidates import Candidate, Weigher
from whale_trainer.planning.search.slicing import groupings, slicings
from whale_trainer.planning.search.tilings import Bounded, Grid, Group, Table
from whale_trainer.planning.simulation.times import Seconds

MOST_DEVICES = 4
"""Up to which the search is over all tilings; beyond, their number grows too fast."""
MOST_LINES = 8
"""Intervals of the grid, by layers and by samples."""


def search_small(
    weigher: Weigher, variants: Sequence[tuple[int, str]], best_s: float, budget: int, most_shards: int
) -> list[Candidate]:
    """The candidates that were simulated, best first. `best_s`: what is already known to be possible.

    `variants` are (micro-batches, schedule); `most_shards` how many shards a tile of all layers may have.
    """
    schedules: dict[int, list[str]] = {}
    for micro_batches, schedule in variants:
        schedules.setdefault(micro_batches, []).append(schedule)
    divisions = list(_divisions(weigher, most_shards))
    bounded: list[Bounded] = []
    for micro_batches, some in schedules.items():
        # gpipe never needs less memory: where both play alike, the other one stands for both
        some.sort(key=lambda schedule: schedule == "gpipe")
        bounded += _bounded(weigher, divisions, micro_batches, some, best_s)
    found: list[Candidate] = []
    stop = weigher.num_simulated + budget
    for bound_s, tiles, micro_batches, schedule in _by_bound(bounded):
        if bound_s >= best_s or weigher.num_simulated >= stop:
            break
        candidate = weigher.weigh(tiles, micro_batches, schedule)
        if candidate is not None:
            found.append(candidate)
            best_s = min(best_s, candidate.step_s)
    return sorted(found, key=lambda c: c.rank_key)


def _by_bound(bounded: Sequence[Bounded]) -> Iterator[tuple[float, tuple[Tile, ...], int, str]]:
    """(bound, tiles, micro-batches, schedule), ascending; tiles are made only as far as anybody looks."""
    if not bounded:
        return
    bounds = np.concatenate([entry.bounds for entry in bounded])
    counts = np.repeat([len(entry.groups) for entry in bounded], [len(entry.bounds) for entry in bounded])
    places = [(entry, tiling) for entry in bounded for tiling in range(len(entry.bounds))]
    order = np.lexsort((counts, bounds)).tolist()
    for (bound_s, _), alike in groupby(order, key=lambda i: (float(bounds[i]), int(counts[i]))):
        entries = [(e.tiles(tiling), e.micro_batches, e.schedule) for e, tiling in (places[i] for i in alike)]
        for entry in sorted(entries):
            yield (bound_s, *entry)


def _bounded(
    weigher: Weigher,
    divisions: Sequence[tuple[Group, ...]],
    micro_batches: int,
    schedules: Sequence[str],
    best_s: float,
) -> Iterator[Bounded]:
    height = -(-weigher.global_batch // micro_batches)
    devices = _devices(weigher)
    share = max(1, height // len(devices))
    work = np.sum([weigher.times.group((d,), (1,), share).both for d in devices], axis=0)
    grid = Grid(weigher, micro_batches, _lines(work), _lines(np.arange(height + 1, dtype=float)))
    num_layers, num_samples = len(grid.layers) - 1, len(grid.samples) - 1
    for groups in divisions:
        if len(groups) > num_layers * num_samples:
            continue
        for tilings in slicings(len(groups), num_layers, num_samples):
            for order in _orders(groups):
                yield from grid.bounded(tilings, order, schedules, best_s)


def _lines(work: Seconds) -> Table:
    """Grid lines, from 0 to the end, between which there is about equal work; all of them where they are few."""
    last = len(work) - 1
    if last <= MOST_LINES:
        return np.arange(last + 1)
    wanted = np.linspace(work[0], work[-1], MOST_LINES + 1)
    nearest = np.abs(work[None, :] - wanted[:, None]).argmin(axis=1)
    return np.unique(np.concatenate(([0], nearest, [last])))


def _devices(weigher: Weigher) -> list[Device]:
    """Those that can compute in the precision."""
    return [d for d in weigher.cluster.devices if weigher.costs.precision.dtype in d.kind.dtypes]


def _divisions(weigher: Weigher, most_shards: int) -> Iterator[tuple[Group, ...]]:
    """Every choice of devices and every way to put them into groups, alike ones once."""
    devices = _devices(weigher)
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
