"""Measured times as functions: piecewise linear, never falling where work grows, continued beyond the measurements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Times over amounts of work, both ascending."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """The curve through (work, time) points of ascending work.

        Times that fall where work grows are noise: neighbours are averaged until none does (pool adjacent violators,
        Barlow et al. 1972), so that no slope is negative.
        """
        return cls(tuple(float(x) for x, _ in points), _never_falling([y for _, y in points]))

    def at(self, x: float) -> float:
        """Time for `x` units of work, `x` above 0.

        Beyond the last point along the last slope that rises; before the first one along the first slope, but never
        less than in proportion to the work. So what is fixed in the first two points stays, and no time is below 0.
        """
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0] * x / xs[0]
        if x <= xs[0]:
            slope = (ys[1] - ys[0]) / (xs[1] - xs[0])
            return max(ys[0] + slope * (x - xs[0]), ys[0] * x / xs[0])
        if x >= xs[-1]:
            return ys[-1] + self._last_slope * (x - xs[-1])
        right = bisect_right(xs, x)
        left = right - 1
        return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])

    @property
    def _last_slope(self) -> float:
        lower = [i for i, y in enumerate(self.ys) if y < self.ys[-1]]
        return (self.ys[-1] - self.ys[lower[-1]]) / (self.xs[-1] - self.xs[lower[-1]]) if lower else 0.0


@dataclass(frozen=True)
class Surface:
    """(forward, backward) times over samples and part of the cut work."""

    curves: tuple[tuple[float, Curve, Curve], ...]
    """(part, forward, backward) over samples, parts ascending, 1 (uncut) the last."""
    cut_share: float
    """Part of the FLOPs that is cut; decides only where a single part was measured."""

    def at(self, samples: float, part: float) -> tuple[float, float]:
        """Times of a micro-batch of `samples` samples when `part` of the cut work is done."""
        forward = [(measured, curve.at(samples)) for measured, curve, _ in self.curves]
        backward = [(measured, curve.at(samples)) for measured, _, curve in self.curves]
        return self._at_part(forward, part), self._at_part(backward, part)

    def _at_part(self, points: Sequence[tuple[float, float]], part: float) -> float:
        """The uncut layer stands for itself: a cut one has more to do than its part, and may even take longer."""
        uncut = [time for measured, time in points if measured >= 1]
        cut = [point for point in points if point[0] < 1]
        if uncut and part >= 1:
            return uncut[0]
        if len(cut) == 1 and uncut:
            return Curve.through([*cut, (1.0, max(uncut[0], cut[0][1]))]).at(part)
        if len(cut) > 1:
            return Curve.through(cut).at(part)
        measured, time = points[0]
        return time * (1 - self.cut_share * (1 - part)) / (1 - self.cut_share * (1 - measured))


def _never_falling(values: Sequence[float]) -> tuple[float, ...]:
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean = (before * size + mean * count) / (size + count)
            count += size
        blocks.append((mean, count))
    return tuple(mean for mean, count in blocks for _ in range(count))
