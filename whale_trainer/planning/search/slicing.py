"""Every way to cut a rectangle of layers x samples into a few tiles by cuts from edge to edge, again and again.

A slicing is a tree: a cut along the layers makes stages, one along the samples makes replicas, and each part may be
cut again (Otten 1982). Up to four tiles every tiling is one: the smallest that is not, the pinwheel, has five.
Positions are counted on a grid; which grid line is which layer or sample is the caller's affair, so that one list
serves all models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from whale_trainer.planning.schedule.schedule import Bridge

Numbers = npt.NDArray[np.int64]
Rectangle = tuple[int, int, int, int]
"""First layer, layer after the last, first sample, sample after the last."""


@dataclass(frozen=True)
class Slicings:
    """Tilings that have the same bridges, by the grid lines of their tiles."""

    bridges: tuple[Bridge, ...]
    layers: Numbers
    """[tilings, tiles, 2]"""
    samples: Numbers
    """[tilings, tiles, 2]"""


@lru_cache(maxsize=64)
def slicings(num_tiles: int, num_layers: int, num_samples: int) -> tuple[Slicings, ...]:
    """All tilings of the grid into `num_tiles` tiles, grouped by their bridges; tiles in a fixed order."""
    found: dict[tuple[Bridge, ...], dict[tuple[Rectangle, ...], None]] = {}
    for tiles in _cut((0, num_layers, 0, num_samples), num_tiles):
        ordered = tuple(sorted(tiles))
        found.setdefault(_bridges(ordered), {})[ordered] = None
    groups = []
    for bridges, tilings in found.items():
        table = np.array(list(tilings), dtype=np.int64)
        groups.append(Slicings(bridges, table[:, :, :2], table[:, :, 2:]))
    return tuple(groups)


def _cut(area: Rectangle, num_tiles: int) -> Iterator[tuple[Rectangle, ...]]:
    """Tilings of the area by slicing; some come more than once."""
    if num_tiles == 1:
        yield (area,)
        return
    left, right, top, bottom = area
    for first in range(1, num_tiles):
        for at in range(left + 1, right):
            for a in _cut((left, at, top, bottom), first):
                for b in _cut((at, right, top, bottom), num_tiles - first):
                    yield a + b
        for at in range(top + 1, bottom):
            for a in _cut((left, right, top, at), first):
                for b in _cut((left, right, at, bottom), num_tiles - first):
                    yield a + b


def _bridges(tiles: tuple[Rectangle, ...]) -> tuple[Bridge, ...]:
    return tuple(
        Bridge(a, b)
        for a, (_, stop, top, bottom) in enumerate(tiles)
        for b, (start, _, other_top, other_bottom) in enumerate(tiles)
        if stop == start and max(top, other_top) < min(bottom, other_bottom)
    )


def groupings(members: tuple[int, ...], num_groups: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to put `members` into `num_groups` groups, none empty; groups by their first member.

    >>> list(groupings((0, 1, 2), 2))
    [((0,), (1, 2)), ((0, 1), (2,)), ((0, 2), (1,))]
    """
    if num_groups == 1:
        yield (members,)
        return
    first, rest = members[0], members[1:]
    for size in range(len(rest) - num_groups + 2):
        for others in combinations(rest, size):
            left = tuple(m for m in rest if m not in others)
            for tail in groupings(left, num_groups - 1):
                yield ((first, *others), *tail)
