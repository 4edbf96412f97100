"""Cutting layers into stages: equal to brute force over all orders and cuts, with and without memory limits."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise, permutations
from math import inf, isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import plain_spec

from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.search.cutting import Cutting, StageTable
from whale_trainer.planning.shares import Interval


def cutting(flops: list[float], speeds: list[float], free: list[float] | None, samples: int = 1) -> Cutting:
    """One group of one device for each speed; equal ones are of one type."""
    costs = CostModel(plain_spec(flops), PRECISIONS["32-true"]).tile((1,))
    work = np.cumsum([0.0, *flops]) * 3
    kinds = list(dict.fromkeys(zip(speeds, free or [inf] * len(speeds), strict=True)))
    counted = Counter(zip(speeds, free or [inf] * len(speeds), strict=True))
    layers = Interval(0, len(flops))
    tables = [StageTable(costs, work / s, None if free is None else (f,), layers) for s, f in kinds]
    return Cutting(tables, tuple(counted[k] for k in kinds), samples, lambda position: len(speeds) - position)


def brute_force(question: Cutting) -> float:
    """The least time of the slowest stage over every order and every cut; inf when nothing fits."""
    kinds = [kind for kind, count in enumerate(question.counts) for _ in range(count)]
    stop = question.layers.stop
    best = inf
    for order in set(permutations(kinds)):
        for inner in combinations(range(1, stop), len(order) - 1):
            parts = [Interval(a, b) for a, b in pairwise((0, *inner, stop))]
            fits = all(
                question.tables[k].limit(p.start, question.samples, question.in_flight(i)) >= p.stop
                for i, (k, p) in enumerate(zip(order, parts, strict=True))
            )
            if fits:
                best = min(best, max(question.tables[k].time(p) for k, p in zip(order, parts, strict=True)))
    return best


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, 30.0]), min_size=3, max_size=6),
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([4000.0, 9000.0])), min_size=1, max_size=3),
    st.booleans(),
)
def test_equal_to_brute_force(flops: list[float], devices: list[tuple[float, float]], has_limits: bool) -> None:
    question = cutting(flops, [s for s, _ in devices], [f for _, f in devices] if has_limits else None)
    chain, best = question.best(), brute_force(question)
    if chain is None:
        assert best == inf
        return
    assert isclose(chain.slowest_s, best, rel_tol=1e-6)
    assert question.fits(chain)
    level = chain
    assert level.layers[0].start == 0
    assert level.layers[-1].stop == len(flops)
    assert all(a.stop == b.start for a, b in pairwise(level.layers))
    slowest = max(question.tables[k].time(p) for k, p in zip(level.order, level.layers, strict=True))
    assert isclose(slowest, best, rel_tol=1e-6)


def test_reaching_further_is_not_always_better() -> None:
    # at 4.2 the first slow group must stop after one layer, since the second could not take the third layer alone
    chain = cutting([1, 1, 4, 3], [1.0, 1.0, 5.0], None).best()
    assert chain is not None
    assert chain.slowest_s == pytest.approx(4.2)
    assert chain.layers == (Interval(0, 1), Interval(1, 2), Interval(2, 4))


def test_five_layers_at_three_to_two() -> None:
    chain = cutting([1.0] * 5, [3.0, 2.0], None).best()
    assert chain is not None
    assert [len(part) for part in chain.layers] in ([3, 2], [2, 3])
    assert chain.slowest_s == 3.0


def test_the_widest_layer_counts_with_its_own_cost() -> None:
    flops = [1.0] * 8
    flops[5] = 40.0
    question = cutting(flops, [1.0, 1.0], None)
    chain = question.best()
    assert chain is not None
    assert chain.layers == (Interval(0, 5), Interval(5, 8))


def test_other_stages_are_levelled_when_one_layer_rules() -> None:
    question = cutting([1, 1, 1, 1, 9], [1.0, 1.0, 1.0], None)
    chain = question.best()
    assert chain is not None
    assert chain.layers == (Interval(0, 2), Interval(2, 4), Interval(4, 5))


def test_with_very_many_states_the_groups_keep_their_order() -> None:
    speeds = [float(s) for s in range(1, 13)]
    chain = cutting([1.0] * 24, speeds, None).best()
    assert chain is not None
    assert chain.order == tuple(range(12))
    assert sum(len(part) for part in chain.layers) == 24
