"""Whole shares and weights: worked examples, invariants, and never worse than brute force."""

from __future__ import annotations

from itertools import product
from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_trainer.planning.search.balance import SLACKS, allot, shard_weights, water_fill, whole_weights
from whale_trainer.planning.shares import apportion

SPEEDS = st.lists(st.floats(0.5, 20), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        ([1.0, 1.0, 1.0], (1, 1, 1)),
        ([15.7, 9.3], (5, 3)),
        ([2.0, 1.0], (2, 1)),
        ([5.0, 3.0, 2.0], (5, 3, 2)),
        ([1000.0, 1.0], (63, 1)),
    ],
)
def test_whole_weights_are_small_and_in_proportion(parts: list[float], weights: tuple[int, ...]) -> None:
    assert whole_weights(parts) == weights


@given(SPEEDS)
def test_whole_weights_never_give_anyone_a_tenth_too_much(speeds: list[float]) -> None:
    weights = whole_weights(speeds, most=256)
    assert min(weights) >= 1
    shares = [w / sum(weights) for w in weights]
    assert max(share / (s / sum(speeds)) for share, s in zip(shares, speeds, strict=True)) < 1.1


def test_water_fill_lifts_the_others_when_one_is_full() -> None:
    assert water_fill([2, 1, 1], [0.4, 1, 1]) == pytest.approx([0.4, 0.3, 0.3])
    assert water_fill([1, 1], [0.3, 0.5]) is None


@given(SPEEDS.flatmap(lambda s: st.tuples(st.just(s), st.lists(st.floats(0.05, 1), min_size=len(s), max_size=len(s)))))
def test_water_fill_is_the_least_makespan_under_the_caps(case: tuple[list[float], list[float]]) -> None:
    speeds, caps = case
    parts = water_fill(speeds, caps)
    if parts is None:
        assert sum(caps) < 1
        return
    assert isclose(sum(parts), 1, rel_tol=1e-6)
    assert all(p <= c + 1e-9 for p, c in zip(parts, caps, strict=True))
    # whoever is below its cap is as busy as the busiest: no work can be moved from the busiest to it
    level = max(p / s for p, s in zip(parts, speeds, strict=True))
    assert all(
        isclose(p, c, abs_tol=1e-9) or isclose(p / s, level) for p, c, s in zip(parts, caps, speeds, strict=True)
    )


def test_shard_weights_go_from_speed_to_memory() -> None:
    assert shard_weights([2.0, 1.0], [1.0, 3.0], inf) == (2, 1)
    assert shard_weights([2.0, 1.0], [1.0, 3.0], 1.0) == (1, 3)
    firsts = [w[0] / sum(w) for w in (shard_weights([2.0, 1.0], [1.0, 3.0], slack) for slack in SLACKS)]
    assert firsts == sorted(firsts, reverse=True)


@given(st.integers(0, 12), SPEEDS)
def test_allot_without_caps_is_apportion(units: int, speeds: list[float]) -> None:
    costs = [lambda n, s=s: n / s for s in speeds]
    assert allot(units, costs) == apportion(units, speeds)


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.floats(0.5, 9), st.integers(0, 7)), min_size=1, max_size=3),
    st.integers(0, 1),
)
def test_allot_equals_brute_force(units: int, holders: list[tuple[float, int]], minimum: int) -> None:
    costs = [lambda n, s=s, c=c: n / s if n <= c else inf for s, c in holders]
    choices = [
        shares
        for shares in product(range(minimum, units + 1), repeat=len(holders))
        if sum(shares) == units and all(n <= c for n, (_, c) in zip(shares, holders, strict=True))
    ]
    shares = allot(units, costs, minimum=minimum)
    if not choices:
        assert shares is None
        return
    assert shares is not None
    best = min(max(n / s for n, (s, _) in zip(shares, holders, strict=True)) for shares in choices)
    assert tuple(shares) in choices
    assert isclose(max(n / s for n, (s, _) in zip(shares, holders, strict=True)), best)


@given(SPEEDS, st.integers(6, 40))
def test_a_faster_device_never_gets_less(speeds: list[float], units: int) -> None:
    shares = allot(units, [lambda n, s=s: n / s for s in speeds])
    assert shares is not None
    for s, n in zip(speeds, shares, strict=True):
        for other, m in zip(speeds, shares, strict=True):
            assert n + 1 >= m or s < other
