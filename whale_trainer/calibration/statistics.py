"""From single times to figures that a disturbance does not move: warm-up dropped, medians, quartiles, robust lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

LEAST_WARM_UP, MOST_WARM_UP = 3, 12
AGREEMENT = 0.1
"""Two neighbouring times that differ by less end the warm-up."""
LEAST_REPEATS, MOST_REPEATS = 7, 30
ENOUGH_S, PATIENCE_S = 0.1, 0.5
"""More than the least repeats are made until they took this long together, as short times scatter more; and, where
the quartiles are far apart, until they took the longer of the two."""
FAR_APART = 0.1
SHORT_BYTES = 1 << 13
"""Messages up to this size take as long as an empty one."""


@dataclass(frozen=True)
class Statistic:
    """Median of repeated times, and the distance of their quartiles."""

    median_s: float
    spread_s: float
    repeats: int


def robust(times: Sequence[float]) -> Statistic:
    """The median and the distance of the quartiles of at least two times.

    >>> robust([1.0, 1.1, 0.9, 50.0, 1.0, 1.0, 1.0])
    Statistic(median_s=1.0, spread_s=0.1, repeats=7)
    """
    lower, _, upper = statistics.quantiles(times, n=4)
    return Statistic(statistics.median(times), round(upper - lower, 12), len(times))


def without_warm_up(times: Sequence[float]) -> Sequence[float]:
    """The times after the first ones: at least three are dropped, and all until two neighbours agree."""
    most = min(MOST_WARM_UP, len(times) - LEAST_REPEATS)
    count = LEAST_WARM_UP
    while count < most and not _agree(times[count - 1], times[count]):
        count += 1
    return times[count:]


def repeated(call: Callable[[], tuple[float, ...]]) -> tuple[Statistic, ...]:
    """Call until its times are steady, then again for the figures; one for each part that `call` gives seconds of."""
    before = sum(call())
    for count in range(2, MOST_WARM_UP + 1):
        last, before = before, sum(call())
        if count >= LEAST_WARM_UP and _agree(last, before):
            break
    found = [call() for _ in range(LEAST_REPEATS)]
    while len(found) < MOST_REPEATS:
        totals = [sum(parts) for parts in found]
        figure = robust(totals)
        is_steady = figure.spread_s <= FAR_APART * figure.median_s
        if sum(totals) >= (ENOUGH_S if is_steady else PATIENCE_S):
            break
        found.append(call())
    return tuple(robust(part) for part in zip(*found, strict=True))


def _agree(first: float, second: float) -> bool:
    return abs(first - second) <= AGREEMENT * max(first, second)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(fixed, per unit) of the line nearest to the (amount, time) points; fixed is not below 0, it rises.

    Nearest is the least sum of absolute errors relative to each time, which no single point can pull away, and in which
    short times count as much as long ones. Such a line passes through two of the points, or through one and has no
    fixed part, so all of these are tried (Bloomfield and Steiger 1983).
    """
    candidates = [(0.0, time / amount) for amount, time in points]
    for (x, y), (other_x, other_y) in combinations(points, 2):
        if x != other_x:
            slope = (other_y - y) / (other_x - x)
            candidates.append((y - slope * x, slope))
    legal = [(fixed, slope) for fixed, slope in candidates if fixed >= 0 and slope > 0]
    return min(legal, key=lambda line: sum(abs(line[0] + line[1] * x - y) / y for x, y in points))


def latency_and_rate(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds, seconds per byte) of a link from (bytes, time) points, ascending.

    The latency is the median of the short messages, of which it is all; the rate is the median over the messages that
    take at least twice as long, of what they take beyond it. Where none does, the longest one bounds the rate.
    """
    short = [time for size, time in points if size <= SHORT_BYTES] or [points[0][1]]
    latency = statistics.median(short)
    long = [(time - latency) / size for size, time in points if time >= 2 * latency and size > SHORT_BYTES]
    return latency, statistics.median(long) if long else points[-1][1] / points[-1][0]


def rounded(value: float, digits: int = 4) -> float:
    """`value` with that many significant digits: no more than a measurement has."""
    return float(f"{value:.{digits}g}")
