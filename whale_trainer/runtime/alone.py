"""One shard of some layers, alone on its device: what is timed where nobody is there to sum with.

The layers are cut as they would be in a run; only their sums leave what they get, so that nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.pieces import parameter_layouts
from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.shares import Interval
from whale_trainer.runtime.dropout import DropoutState
from whale_trainer.runtime.shards import ShardBuilder, TileLayers, cut_parameters
from whale_trainer.runtime.weight_gradients import WeightGradients


class _Nothing(dist.Work):
    """Work that is over when it begins."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class AbsentGroup(dist.ProcessGroup):
    """A tensor group whose other members are not there: a sum over it is what this rank has. Never for training."""

    def __init__(self, met: Callable[[], None] = lambda: None) -> None:
        """`met` is called at each sum."""
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._met = met

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        self._met()
        return _Nothing()


def lone_tile(
    model: nn.Module,
    spec: ModelSpec,
    layers: Interval,
    weights: tuple[int, ...],
    shard: int = 0,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dropout: DropoutState,
    met: Callable[[], None] = lambda: None,
    weights_wait: WeightGradients | None = None,
) -> TileLayers:
    """A shard of `layers` when they are cut by `weights`, on `device`; `model` stays whole and where it is.

    `met` is called wherever its tensor group would meet; `weights_wait` has gradients of weights wait in split backward
    passes. Raises `PlanError` where a layer has fewer units than shards.
    """
    plan = _plan_around(spec, layers, weights)
    layouts = parameter_layouts(plan, spec)
    position = next(i for i, tile in enumerate(plan.tiles) if tile.layers == layers)
    builder = ShardBuilder(model, spec, plan, layouts, shard, dropout, weights_wait)
    builder.copy(position)
    whole = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        pieces = cut_parameters(model, layouts, shard)
    finally:
        for module, parameters in whole:
            module._parameters.clear()
            module._parameters.update(parameters)
    pieces = {
        key: nn.Parameter(_moved(piece.detach(), device, dtype), requires_grad=piece.requires_grad)
        for key, piece in pieces.items()
    }
    tile = builder.bind(position, pieces, AbsentGroup(met) if len(weights) > 1 else None)
    for layer in tile.layers:
        layer.to(device=device, dtype=dtype)  # its buffers: the weights are there already
    return tile


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _plan_around(spec: ModelSpec, layers: Interval, weights: tuple[int, ...]) -> Plan:
    """A plan in which the first ranks have the shards of some layers and the last rank all other layers."""
    rest, sample = len(weights), Interval(0, 1)
    shards = tuple(Shard(rank, weight) for rank, weight in enumerate(weights))
    tiles = [Tile(layers, sample, shards)]
    if layers.start:
        tiles.insert(0, Tile(Interval(0, layers.start), sample, (Shard(rest),)))
    if layers.stop < spec.num_layers:
        tiles.append(Tile(Interval(layers.stop, spec.num_layers), sample, (Shard(rest),)))
    devices = (PlannedDevice(rank, "any", "any", 1) for rank in range(rest + (len(tiles) > 1)))
    return Plan(tuple(tiles), spec.layer_names, 1, 1, "1f1b", tuple(devices))
