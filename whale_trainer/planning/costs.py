"""FLOPs and bytes of any interval of layers on each shard of a tensor group, in constant time per question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate

from whale_trainer.model_spec import LayerSpec, ModelSpec, ParameterSpec, SplitDim
from whale_trainer.planning.pieces import BUCKET_BYTES
from whale_trainer.planning.precision import Precision
from whale_trainer.planning.shares import cut_elements, cut_units

TRAINING_FACTOR = 3.0
"""A step's FLOPs against those of its forward pass: the backward pass is taken as twice the forward pass."""
UNCUT_ACTIVATIONS = 1 / 3
"""Part of a cut layer's saved activations that each shard holds whole: residual, norms and gathered outputs. In a
decoder block these are 10 of 34 bytes per element (Korthikanti et al. 2022)."""


@dataclass(frozen=True)
class MemoryItems:
    """What a rank's memory holds, in bytes."""

    parameters: float = 0
    gradients: float = 0
    optimizer_state: float = 0
    cast_copy: float = 0
    """Low-precision copy of the weights under autocast."""
    activations: float = 0
    """Kept for the backward pass, over all micro-batches in flight."""
    buffers: float = 0
    """What bridges and gradient buckets hold on the way."""

    @property
    def total(self) -> int:
        return round(sum(float(getattr(self, f.name)) for f in fields(self)))

    def __add__(self, other: MemoryItems) -> MemoryItems:
        return MemoryItems(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def biggest(self, count: int = 3) -> list[tuple[str, float]]:
        """The largest items, by name in words."""
        named = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]
        return sorted([n for n in named if n[1] > 0], key=lambda n: -n[1])[:count]


@dataclass(frozen=True)
class CostModel:
    """The model together with what decides its bytes: precision and optimizer."""

    model: ModelSpec
    precision: Precision
    optimizer_bytes_per_element: int
    """Optimizer state of one fp32 weight; scales with the weight's bytes."""

    @cached_property
    def _tiles(self) -> dict[tuple[int, ...], TileCosts]:
        return {}

    @cached_property
    def shares(self) -> tuple[DimShares, ...]:
        """How each layer's cut work follows its dims."""
        return dim_shares(self.model)

    def tile(self, weights: tuple[int, ...]) -> TileCosts:
        """Costs under a tensor cut by `weights`; made once for each."""
        if weights not in self._tiles:
            self._tiles[weights] = TileCosts(self, weights)
        return self._tiles[weights]

    def state_of(self, parameter: ParameterSpec, num_elements: float) -> MemoryItems:
        """Memory that does not depend on the batch, for `num_elements` elements of a parameter."""
        weight = self.precision.bytes_of(parameter)
        size = num_elements * weight
        trained = size if parameter.trainable else 0
        return MemoryItems(
            parameters=size,
            gradients=trained,
            optimizer_state=trained * self.optimizer_bytes_per_element / 4,
            cast_copy=num_elements * self.precision.copy_bytes,
        )

    def boundary_bytes(self, start: int, stop: int, samples: int) -> float:
        """Bridge buffers of a tile: the activations that come in and go out, and their gradients."""
        layers = self.model.layers
        incoming = layers[start - 1].boundary_bytes if start > 0 else 0
        outgoing = layers[stop - 1].boundary_bytes if stop < len(layers) else 0
        return 2.0 * samples * (incoming + outgoing) * self.precision.activation_factor


def shard_elements(parameter: ParameterSpec, weights: tuple[int, ...], shard: int) -> float:
    """Elements of a parameter that one shard of a tile holds."""
    if parameter.cut is None or len(weights) == 1:
        return parameter.num_elements
    size = parameter.shape[parameter.cut.dim]
    return parameter.num_elements // size * len(cut_elements(parameter.cut, weights, shard))


DimShares = Mapping[SplitDim, float]


def dim_shares(model: ModelSpec) -> tuple[DimShares, ...]:
    """For each layer, the part of its cut work that follows each dim: as its cut parameters are spread over them."""
    elements: list[dict[SplitDim, float]] = [dict.fromkeys(layer.split_dims, 0.0) for layer in model.layers]
    for parameter in model.parameters:
        for layer in parameter.layers if parameter.cut is not None else ():
            if parameter.cut is not None and parameter.cut.split in elements[layer]:
                elements[layer][parameter.cut.split] += parameter.num_elements
    return tuple(
        {dim: count / sum(found.values()) if any(found.values()) else 1 / len(found) for dim, count in found.items()}
        for found in elements
    )


def layer_part(shares: DimShares, weights: tuple[int, ...], shard: int) -> float:
    """Part of a layer's cut work that one shard does, in whole units of each dim."""
    if len(weights) == 1 or not shares:
        return 1.0
    return sum(share * len(cut_units(dim, weights)[shard]) / dim.units for dim, share in shares.items())


def shard_flops(layer: LayerSpec, shares: DimShares, weights: tuple[int, ...], shard: int) -> float:
    """FLOPs of one sample, forward and backward, on one shard."""
    part = layer_part(shares, weights, shard)
    return TRAINING_FACTOR * (layer.forward_flops - layer.split_flops * (1 - part))


def shard_activations(layer: LayerSpec, shares: DimShares, weights: tuple[int, ...], shard: int) -> float:
    """Bytes kept for the backward pass of one sample on one shard, in the model's own precision."""
    if len(weights) == 1 or not shares:
        return layer.activation_bytes
    part = layer_part(shares, weights, shard)
    return layer.activation_bytes * (UNCUT_ACTIVATIONS + (1 - UNCUT_ACTIVATIONS) * part)


class ShardCosts:
    """Prefix sums over the layers for one shard of a tile."""

    def __init__(self, costs: CostModel, weights: tuple[int, ...], shard: int) -> None:
        layers = costs.model.layers
        factor = costs.precision.activation_factor
        pairs = list(zip(layers, costs.shares, strict=True))
        self.costs = costs
        self.flops = _prefix([shard_flops(layer, shares, weights, shard) for layer, shares in pairs])
        self._activations = _prefix([shard_activations(layer, d, weights, shard) * factor for layer, d in pairs])
        state, gradients = [0.0] * len(layers), [0.0] * len(layers)
        self._tied: list[tuple[tuple[int, ...], float, float]] = []
        for parameter in costs.model.parameters:
            items = costs.state_of(parameter, shard_elements(parameter, weights, shard))
            if len(parameter.layers) > 1:
                self._tied.append((parameter.layers, sum_of(items), items.gradients))
            for layer in parameter.layers if len(parameter.layers) == 1 else ():
                state[layer] += sum_of(items)
                gradients[layer] += items.gradients
        self._state, self._gradients = _prefix(state), _prefix(gradients)

    def memory(self, start: int, stop: int, samples: int, in_flight: int) -> float:
        """Bytes that a rank with this shard alone needs."""
        state = self._state[stop] - self._state[start]
        gradients = self._gradients[stop] - self._gradients[start]
        for layers, tied_state, tied_gradients in self._tied:
            if any(start <= layer < stop for layer in layers):
                state += tied_state
                gradients += tied_gradients
        activations = self._activations[stop] - self._activations[start]
        buffers = self.costs.boundary_bytes(start, stop, samples) + min(BUCKET_BYTES, gradients)
        return state + activations * samples * in_flight + buffers


class TileCosts:
    """The shards of a tile for one tuple of weights; shards with equal parts share their sums."""

    def __init__(self, costs: CostModel, weights: tuple[int, ...]) -> None:
        self.weights = weights
        cuts = dict.fromkeys(p.cut for p in costs.model.parameters if p.cut is not None)
        dims = costs.model.split_dims(0, costs.model.num_layers)
        made: dict[tuple[int, ...], ShardCosts] = {}
        self.shards: list[ShardCosts] = []
        for shard in range(len(weights)):
            parts = [len(cut_elements(cut, weights, shard)) for cut in cuts] if len(weights) > 1 else []
            parts += [len(cut_units(dim, weights)[shard]) for dim in dims]
            if tuple(parts) not in made:
                made[tuple(parts)] = ShardCosts(costs, weights, shard)
            self.shards.append(made[tuple(parts)])

    def distinct(self, figures: tuple[float, ...]) -> list[tuple[ShardCosts, float]]:
        """Each different pair of a shard and its device's figure once."""
        return list(dict.fromkeys(zip(self.shards, figures, strict=True)))


def sum_of(items: MemoryItems) -> float:
    return items.parameters + items.gradients + items.optimizer_state + items.cast_copy


def _prefix(values: list[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
