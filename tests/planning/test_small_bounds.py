"""The bounds that the search over all tilings goes by: never above the simulated step, and near enough to be of use."""

from __future__ import annotations

import random
from math import inf
from statistics import median

import pytest
from test_quality import HEIGHT, problem

from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.search import small
from whale_trainer.planning.search.candidates import Weigher
from whale_trainer.planning.simulation.times import TimeModel

SCHEDULES = ["1f1b", "gpipe"]


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_no_bound_is_above_the_simulated_step(seed: int) -> None:
    model, cluster, micro_batches = problem(seed)
    costs = CostModel(model, PRECISIONS["32-true"])
    weigher = Weigher(costs, cluster, TimeModel(costs, cluster), HEIGHT * micro_batches)
    shards = min((dim.units for layer in model.layers for dim in layer.split_dims), default=1)
    divisions = list(small._divisions(weigher, shards))
    bounded = [
        (float(bound), entry.tiles(tiling), entry.schedule)
        for entry in small._bounded(weigher, divisions, micro_batches, SCHEDULES, inf)
        for tiling, bound in enumerate(entry.bounds)
    ]
    draw = random.Random(seed)
    near = []
    for bound_s, tiles, schedule in draw.sample(bounded, min(150, len(bounded))):
        candidate = weigher.weigh(tiles, micro_batches, schedule)
        if candidate is not None:
            assert bound_s <= candidate.step_s * (1 + 1e-9), f"{tiles} {schedule}"
            near.append(bound_s / candidate.step_s)
    assert not near or median(near) > 0.5
