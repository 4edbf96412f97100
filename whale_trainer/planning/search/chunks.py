"""Pipelines that go over the same groups several times: each stage's layers in several chunks, for `interleaved`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from whale_trainer.cluster import Device
from whale_trainer.planning.search.replicas import Layout, Stage
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.times import Seconds

SecondsOf = Callable[[tuple[Device, ...], tuple[int, ...], int], Seconds]
"""Prefix sums over the layers of what a group takes for a number of samples."""


def in_chunks(layout: Layout, chunks: int, placement: str, seconds: SecondsOf) -> Layout:
    """The layout with `chunks` intervals of layers for each group, in turns (`loop`) or back and forth (`v`).

    The intervals take equally long on their groups, as far as whole layers allow.
    """
    if chunks == 1:
        return layout
    replicas = tuple(
        _replica(stages, samples, chunks, placement, seconds)
        for stages, samples in zip(layout.replicas, layout.samples, strict=True)
    )
    return replace(layout, replicas=replicas)


def _replica(
    stages: Sequence[Stage], samples: int, chunks: int, placement: str, seconds: SecondsOf
) -> tuple[Stage, ...]:
    visited = [
        stage for chunk in range(chunks) for stage in (reversed(stages) if placement == "v" and chunk % 2 else stages)
    ]
    layers = Interval(stages[0].layers.start, stages[-1].layers.stop)
    times = [seconds(s.group.devices, s.weights, samples)[layers.start : layers.stop + 1] for s in visited]
    parts = _equal_parts(times)
    return tuple(replace(s, layers=p.shifted(layers.start)) for s, p in zip(visited, parts, strict=True))


def _equal_parts(times: Sequence[Seconds]) -> list[Interval]:
    """Consecutive intervals, none empty, of which the slowest takes the least time; `times` are prefix sums, one for
    each interval.

    Of equally good cuts the one whose squares sum to least, so that no interval is much shorter than it could be.
    """
    size = len(times[0])
    start = np.full(size, inf)
    start[0] = 0.0
    slowest = _cut(times, start, np.maximum)[0]
    limit = slowest[-1] * (1 + 1e-12)

    def within(before: Seconds, each: Seconds) -> Seconds:
        found: Seconds = np.where(each <= limit, before + each**2, inf)
        return found

    _, ways = _cut(times, start, within)
    stop, ends = size - 1, [size - 1]
    for way in reversed(ways):
        stop = int(way[stop])
        ends.append(stop)
    ends.reverse()
    return [Interval(a, b) for a, b in pairwise(ends)]


def _cut(
    times: Sequence[Seconds], start: Seconds, joined: Callable[[Seconds, Seconds], Seconds]
) -> tuple[Seconds, list[Seconds]]:
    """The least value of all intervals by their end, and for each interval by its end where it begins."""
    values, ways = start, []
    for prefix in times:
        each = prefix[None, :] - prefix[:, None]
        each[np.tril_indices(len(prefix))] = inf
        found = joined(values[:, None], each)
        ways.append(found.argmin(axis=0))
        values = found.min(axis=0)
    return values, ways
