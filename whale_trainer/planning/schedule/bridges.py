"""Where tiles meet: the bridges of a plan, who sends to whom over them, and how far each tile is from the loss."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from whale_trainer.planning.plan import Plan, Tile


@dataclass(frozen=True)
class Bridge:
    """`before` ends at the layer where `after` begins, and they share samples."""

    before: int
    after: int


def bridges_of(plan: Plan) -> tuple[Bridge, ...]:
    """All bridges of a plan, by tile numbers ascending."""
    return bridges_between(plan.tiles)


def bridges_between(tiles: Sequence[Tile]) -> tuple[Bridge, ...]:
    """All bridges between these tiles, by their numbers ascending."""
    starting: dict[int, list[int]] = {}
    for index, tile in enumerate(tiles):
        starting.setdefault(tile.layers.start, []).append(index)
    sorted_by_samples = {layer: sorted(indices, key=lambda i: tiles[i].samples) for layer, indices in starting.items()}
    begins = {layer: [tiles[i].samples.start for i in indices] for layer, indices in sorted_by_samples.items()}
    found = []
    for a, before in enumerate(tiles):
        layer = before.layers.stop
        if layer not in starting:
            continue
        # tiles that begin at one layer do not overlap, so the last one that begins above is the first that can touch
        place = max(0, bisect_right(begins[layer], before.samples.start) - 1)
        for b in sorted_by_samples[layer][place:]:
            if tiles[b].samples.start >= before.samples.stop:
                break
            if len(before.samples.intersect(tiles[b].samples)):
                found.append(Bridge(a, b))
    return tuple(sorted(found, key=lambda bridge: (bridge.before, bridge.after)))


def pair_ranks(sources: Sequence[int], targets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Who sends to each rank of a tile: itself where it has the tensor already, else the senders in even turns.

    >>> pair_ranks([0, 1], [2, 3, 4, 1])
    ((0, 2), (0, 3), (1, 4), (1, 1))
    """
    p, q = len(sources), len(targets)
    return tuple((rank if rank in sources else sources[j * p // q], rank) for j, rank in enumerate(targets))


def warm_up(plan: Plan) -> tuple[int, ...]:
    """For each tile the forwards that 1F1B runs before the first backward; also the most micro-batches in flight.

    The tiles on the longest bridge path from the tile to the loss, both ends counted: S - s on stage s of S. Neighbours
    on a path that share a rank count once: they never run at the same time, and one more micro-batch would only cost
    memory.
    """
    return warm_ups([tile.ranks for tile in plan.tiles], bridges_of(plan))


def warm_ups(ranks: Sequence[Sequence[int]], bridges: Sequence[Bridge]) -> tuple[int, ...]:
    """`warm_up` of tiles given by their ranks and bridges."""
    after: list[list[int]] = [[] for _ in ranks]
    waiting = [0] * len(ranks)
    before: list[list[int]] = [[] for _ in ranks]
    for bridge in bridges:
        after[bridge.before].append(bridge.after)
        before[bridge.after].append(bridge.before)
        waiting[bridge.before] += 1
    depth = [1] * len(ranks)
    ready = [t for t, count in enumerate(waiting) if not count]
    while ready:
        tile = ready.pop()
        depth[tile] = max((depth[t] + set(ranks[tile]).isdisjoint(ranks[t]) for t in after[tile]), default=1)
        for previous in before[tile]:
            waiting[previous] -= 1
            if not waiting[previous]:
                ready.append(previous)
    return tuple(depth)


def longest_paths(ranks: Sequence[Sequence[int]], bridges: Sequence[Bridge]) -> tuple[int, ...]:
    """For each tile the tiles on the longest bridge path through it, from the first layer to the loss.

    Counted as in `warm_ups`: on a straight pipeline the number of its stages, for every tile.
    """
    turned = [Bridge(b.after, b.before) for b in bridges]
    pairs = zip(warm_ups(ranks, bridges), warm_ups(ranks, turned), strict=True)
    return tuple(after + before - 1 for after, before in pairs)


def joined(ranks: Sequence[Sequence[int]], bridges: Sequence[Bridge]) -> list[tuple[int, ...]]:
    """The tiles that bridges and common ranks join, ascending: replicas are parts that know nothing of each other."""
    parent = list(range(len(ranks)))

    def root(tile: int) -> int:
        while parent[tile] != tile:
            parent[tile] = parent[parent[tile]]
            tile = parent[tile]
        return tile

    first_of: dict[int, int] = {}
    for tile, members in enumerate(ranks):
        for rank in members:
            parent[root(tile)] = root(first_of.setdefault(rank, tile))
    for bridge in bridges:
        parent[root(bridge.before)] = root(bridge.after)
    parts: dict[int, list[int]] = {}
    for tile in range(len(ranks)):
        parts.setdefault(root(tile), []).append(tile)
    return [tuple(members) for members in parts.values()]
