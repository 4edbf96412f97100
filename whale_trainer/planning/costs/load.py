"""How much compute a plan puts on each rank, and how deep its pipeline is."""

from __future__ import annotations

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import dim_shares, shard_flops
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.schedule import bridges_of, warm_ups


def tile_depths(plan: Plan) -> tuple[int, ...]:
    """For each tile the number of tiles on the longest path of bridges from it to the loss, itself included."""
    return warm_ups([(index,) for index in range(len(plan.tiles))], bridges_of(plan))


def rank_flops(plan: Plan, model: ModelSpec) -> tuple[float, ...]:
    """FLOPs of a full micro-batch, forward and backward, on each rank."""
    flops = [0.0] * plan.num_ranks
    shares = dim_shares(model)
    for tile in plan.tiles:
        for shard, holder in enumerate(tile.shards):
            layers = range(*tile.layers)
            each = sum(shard_flops(model.layers[i], shares[i], tile.weights, shard) for i in layers)
            flops[holder.rank] += each * len(tile.samples)
    return tuple(flops)
