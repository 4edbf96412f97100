"""Small changes of a tiling: a cut moves by some layers or samples, two groups change places. For the last per cent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil, sqrt

from whale_trainer.planning.plan import Tile
from whale_trainer.planning.search.candidates import Candidate, Weigher
from whale_trainer.planning.shares import Interval

Tiles = tuple[Tile, ...]
MOST_ACTIONS = 4096
"""Over all simulations of one walk."""
LEAST_MOVES = 6
LEAST_GAIN = 0.002
"""Less is not worth unequal parts for equal devices."""


def improve(weigher: Weigher, candidate: Candidate, budget: int, *, keep_rows: bool = False) -> Candidate:
    """The best that a walk of improving moves finds within `budget` simulations; fewer of plans with many actions.

    `keep_rows`: replicas stay replicas, with the same samples in all their stages.
    """
    actions = 2 * len(candidate.tiles) * candidate.micro_batches
    stop = weigher.num_simulated + min(budget, max(LEAST_MOVES, MOST_ACTIONS // actions))
    best = candidate
    improved = True
    while improved and weigher.num_simulated < stop:
        improved = False
        for tiles in neighbours(best.tiles, weigher, keep_rows=keep_rows):
            if weigher.num_simulated >= stop:
                break
            found = weigher.weigh(tiles, best.micro_batches, best.schedule)
            if found is not None and found.step_s < best.step_s * (1 - LEAST_GAIN):
                best, improved = found, True
                break
    return best


def neighbours(tiles: Tiles, weigher: Weigher, *, keep_rows: bool) -> Iterator[Tiles]:
    """Tilings one move away, cuts before exchanges."""
    yield from _moved_cuts(tiles, _cuts(tiles, along_layers=True), along_layers=True)
    across = _cuts(tiles, along_layers=False)
    yield from _moved_cuts(tiles, _joined(tiles, across) if keep_rows else across, along_layers=False)
    yield from _exchanged(tiles, weigher)


Cut = tuple[frozenset[int], frozenset[int]]
"""The tiles that end at a straight cut, and those that begin at it."""


def _moved_cuts(tiles: Tiles, cuts: Iterable[Cut], *, along_layers: bool) -> Iterator[Tiles]:
    """Every straight cut, moved by one, and by a few where there is room."""
    for before, after in cuts:
        room_back = min(len(_side(tiles[i], along_layers)) for i in before) - 1
        room_on = min(len(_side(tiles[i], along_layers)) for i in after) - 1
        for distance in (1, ceil(sqrt(max(room_back, room_on)) / 2) + 1):
            for shift, room in ((distance, room_on), (-distance, room_back)):
                if distance <= room:
                    yield _shifted(tiles, before, after, shift, along_layers)


def _side(tile: Tile, along_layers: bool) -> Interval:
    return tile.layers if along_layers else tile.samples


def _joined(tiles: Tiles, cuts: Iterable[Cut]) -> Iterator[Cut]:
    """Cuts at the same sample as one."""
    joined: dict[int, Cut] = {}
    for before, after in cuts:
        at = tiles[min(before)].samples.stop
        others = joined.get(at, (frozenset(), frozenset()))
        joined[at] = (others[0] | before, others[1] | after)
    yield from joined.values()


def _cuts(tiles: Tiles, along_layers: bool) -> Iterator[Cut]:
    """All straight cuts, as long as they are."""
    ending: dict[int, list[int]] = {}
    beginning: dict[int, list[int]] = {}
    for index, tile in enumerate(tiles):
        ending.setdefault(_side(tile, along_layers).stop, []).append(index)
        beginning.setdefault(_side(tile, along_layers).start, []).append(index)
    for at in sorted(set(ending) & set(beginning)):
        waiting = sorted(ending[at])
        while waiting:
            before, after = {waiting[0]}, set[int]()
            grown = True
            while grown:
                size = len(before) + len(after)
                across = [_side(tiles[i], not along_layers) for i in before]
                after |= {i for i in beginning[at] if _touches(tiles[i], across, along_layers)}
                across = [_side(tiles[i], not along_layers) for i in after]
                before |= {i for i in ending[at] if _touches(tiles[i], across, along_layers)}
                grown = len(before) + len(after) > size
            waiting = [i for i in waiting if i not in before]
            if after:
                yield frozenset(before), frozenset(after)


def _touches(tile: Tile, across: Sequence[Interval], along_layers: bool) -> bool:
    return any(len(_side(tile, not along_layers).intersect(other)) for other in across)


def _shifted(tiles: Tiles, before: frozenset[int], after: frozenset[int], shift: int, along_layers: bool) -> Tiles:
    moved = list(tiles)
    for indices, start, stop in ((before, 0, shift), (after, shift, 0)):
        for index in indices:
            side = _side(tiles[index], along_layers)
            changed = Interval(side.start + start, side.stop + stop)
            moved[index] = (
                replace(tiles[index], layers=changed) if along_layers else replace(tiles[index], samples=changed)
            )
    return tuple(moved)


def _exchanged(tiles: Tiles, weigher: Weigher) -> Iterator[Tiles]:
    """Two tiles with unlike groups exchange them."""
    devices = weigher.cluster.devices
    likes = [tuple((devices[s.rank].kind.name, devices[s.rank].node, s.weight) for s in t.shards) for t in tiles]
    seen = set()
    for a in range(len(tiles)):
        for b in range(a + 1, len(tiles)):
            pair = (likes[a], likes[b], tiles[a].layers, tiles[b].layers, len(tiles[a].samples), len(tiles[b].samples))
            if likes[a] == likes[b] or pair in seen:
                continue
            seen.add(pair)
            changed = list(tiles)
            changed[a] = replace(tiles[a], shards=tiles[b].shards)
            changed[b] = replace(tiles[b], shards=tiles[a].shards)
            yield tuple(changed)
