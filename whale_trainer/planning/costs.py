"""FLOPs and bytes of any interval of layers on each shard of a tensor group, in constant time per question."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate

from whale_trainer.model_spec import LayerSpec, ModelSpec, ParameterSpec
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


def layer_part(layer: LayerSpec, weights: tuple[int, ...], shard: int) -> float:
    """Part of a layer's cut work that one shard does: the mean over the dims that are cut, in whole units."""
    if len(weights) == 1 or not layer.split_dims:
        return 1.0
    parts = [len(cut_units(dim, weights)[shard]) / dim.units for dim in layer.split_dims]
    return sum(parts) / len(parts)


def shard_flops(layer: LayerSpec, weights: tuple[int, ...], shard: int) -> float:
    """FLOPs of one sample, forward and backward, on one shard."""
    part = layer_part(layer, weights, shard)
    return TRAINING_FACTOR * (layer.forward_flops - layer.split_flops * (1 - part))


def shard_activations(layer: LayerSpec, weights: tuple[int, ...], shard: int) -> float:
    """Bytes kept for the backward pass of one sample on one shard, in the model's own precision."""
    if len(weights) == 1 or not layer.split_dims:
        return layer.activation_bytes
    return layer.activation_bytes * (UNCUT_ACTIVATIONS + (1 - UNCUT_ACTIVATIONS) * layer_part(layer, weights, shard))


class ShardCosts:
    """Prefix sums over the layers for one shard of a tile."""

    def __init__(self, costs: CostModel, weights: tuple[int, ...], shard: int) -> None:
        layers = costs.model.layers
        factor = costs.precision.activation_factor
        self.costs = costs
        self.flops = _prefix([shard_flops(x, weights, shard) for x in layers])
        self._activations = _prefix([shard_activations(x, weights, shard) * factor for x in layers])
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
