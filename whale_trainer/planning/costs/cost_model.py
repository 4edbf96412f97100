"""FLOPs and bytes of any interval of layers on each shard of a tensor group, in constant time per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from whale_trainer.model_spec import Footprint, LayerSpec, ModelSpec, ParameterSpec, SplitDim
from whale_trainer.planning.costs.footprints import (
    Flow,
    Numbers,
    RangeMax,
    ShardFootprints,
    State,
    part_of,
    rough_footprint,
)
from whale_trainer.planning.costs.items import MemoryItems as MemoryItems
from whale_trainer.planning.costs.parameter_table import ParameterTable
from whale_trainer.planning.precision import Precision
from whale_trainer.planning.shares import cut_elements, cut_units, kv_dim, kv_part

TRAINING_FACTOR = 3.0
"""A step's FLOPs against those of its forward pass: the backward pass is taken as twice the forward pass."""
SMALL_PARTS = 0.005
"""What is added for scalars, and for memory that is taken in blocks, as part of all that comes and goes in a step."""


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer needs beside weights and gradients, in bytes; by default AdamW on GPUs."""

    of_element: float = 8.0
    """State of one fp32 weight; scales with the weight's bytes."""
    of_parameter: float = 4.0
    """State of a parameter whatever its size, such as the number of its steps."""
    peak_of_all: float = 4.0
    """What a step makes for a moment, for each fp32 element: on GPUs torch takes all parameters at once."""
    peak_of_one: float = 0.0
    """As above for each element of a single parameter, where they are taken one by one."""
    peak_of_one_before: float = 0.0
    """What of that is still there when the next one is taken."""


ADAMW = OptimizerBytes()


@dataclass(frozen=True)
class CostModel:
    """The model together with what decides its bytes: precision and optimizer."""

    model: ModelSpec
    precision: Precision
    optimizer: OptimizerBytes = ADAMW

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
        state = trained * self.optimizer.of_element / 4 + (self.optimizer.of_parameter if trained else 0.0)
        return MemoryItems(parameters=size, gradients=trained, optimizer_state=state)

    def footprint(self, index: int, weights: tuple[int, ...], shard: int) -> Footprint:
        """What a layer holds on one shard: as it was measured in this precision, else a guess."""
        layer, shares = self.model.layers[index], self.shares[index]
        measured = layer.memory if layer.memory and layer.memory.precision == self.precision.name else None
        whole = measured.whole if measured else self._rough[index]
        if len(weights) == 1 or not layer.split_dims:
            return whole
        if measured and measured.cut:
            return measured.cut
        part = layer_part(shares, weights, shard)
        key = (id(whole), part)
        if key not in self._parts:
            self._parts[key] = part_of(whole, part)
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[tuple[int, float], Footprint]:
        return {}

    @cached_property
    def _rough(self) -> tuple[Footprint, ...]:
        elements = [0] * self.model.num_layers
        for parameter in self.model.parameters:
            for index in parameter.layers:
                elements[index] += parameter.num_elements
        factor, copy_bytes = self.precision.activation_factor, self.precision.copy_bytes
        sizes = [
            (layer.activation_bytes * factor, layer.boundary_bytes * factor, float(count * copy_bytes))
            for layer, count in zip(self.model.layers, elements, strict=True)
        ]
        made = {key: rough_footprint(*key) for key in dict.fromkeys(sizes)}
        return tuple(made[key] for key in sizes)

    @cached_property
    def table(self) -> ParameterTable:
        """All parameters in columns."""
        return ParameterTable.of(self.model, self.precision)


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


def dim_parts(dims: Sequence[SplitDim], weights: tuple[int, ...], shard: int) -> dict[SplitDim, float]:
    """Part of each dim that one shard holds, in whole units, and of the keys and values of grouped heads."""
    found: dict[SplitDim, float] = {}
    for dim in dims:
        units = cut_units(dim, weights)[shard]
        found[dim] = len(units) / dim.units
        shared = kv_dim(dim)
        if shared is not None:
            found[shared] = kv_part(dim, units)
    return found


class ShardCosts:
    """Prefix sums over the layers for one shard of a tile."""

    def __init__(self, costs: CostModel, weights: tuple[int, ...], shard: int) -> None:
        model = costs.model
        pairs = zip(model.layers, costs.shares, strict=True)
        self.costs = costs
        self.flops = _prefix([shard_flops(layer, shares, weights, shard) for layer, shares in pairs])
        table = costs.table
        elements = table.elements(weights, shard)
        size = elements * table.bytes_each
        gradients = size * table.is_trained
        optimizer = gradients * costs.optimizer.of_element / 4 + table.is_trained * costs.optimizer.of_parameter
        is_own = ~table.is_tied

        def by_layer(values: Numbers, which: Any) -> list[float]:
            return np.bincount(table.last_layer[which], values[which], model.num_layers).tolist()  # type: ignore[no-any-return]

        self._parameters = _prefix(by_layer(size, is_own))
        self._gradients = _prefix(by_layer(gradients, is_own))
        self._optimizer = _prefix(by_layer(optimizer, is_own))
        is_shared = is_own & table.is_whole & (len(weights) > 1)
        self._shared = _prefix(by_layer(gradients, is_shared))
        self._single_peaks = RangeMax(_single_peaks(costs, gradients))
        self._tied = [
            (model.parameters[i].layers, float(size[i]), float(gradients[i]), float(optimizer[i]))
            for i in np.flatnonzero(table.is_tied)
        ]
        footprints = [costs.footprint(i, weights, shard) for i in range(model.num_layers)]
        parts = dim_parts(model.split_dims(0, model.num_layers), weights, shard) if len(weights) > 1 else {}
        self.footprints = ShardFootprints(footprints, parts, by_layer(gradients, slice(None)))

    def state(self, start: int, stop: int) -> State:
        """What does not depend on the batch."""
        parameters = self._parameters[stop] - self._parameters[start]
        gradients = self._gradients[stop] - self._gradients[start]
        optimizer = self._optimizer[stop] - self._optimizer[start]
        shared, tied, last_use = self._shared[stop] - self._shared[start], 0.0, start
        for layers, *sizes in self._tied:
            inside = [layer for layer in layers if start <= layer < stop]
            if inside:
                parameters += sizes[0]
                gradients += sizes[1]
                optimizer += sizes[2]
                shared += sizes[1] if len(inside) < len(layers) else 0.0
            if len(inside) > 1:
                tied += sizes[1]
                last_use = max(last_use, inside[-1])
        return State(parameters, gradients, optimizer, shared, tied, last_use)

    def moment(self, start: int, stop: int, flow: Flow, state: State) -> float:
        """The most bytes of gradients, activations and all that is there for a moment."""
        gradients = state.gradients
        found = self.footprints.peak(start, stop, flow, state)
        found += SMALL_PARTS * (found - gradients)
        return max(found, gradients + self.optimizer_peak(start, stop, gradients))

    def split_moment(self, start: int, stop: int, flow: Flow) -> float:
        """As `moment`, for a backward pass that leaves the gradients of weights; without gradients."""
        return (1 + SMALL_PARTS) * self.footprints.split_peak(start, stop, flow)

    def optimizer_peak(self, start: int, stop: int, gradients: float) -> float:
        """Bytes that the optimizer's step makes for a moment, for this many bytes of gradients."""
        return self.costs.optimizer.peak_of_all / 4 * gradients + max(0.0, self._single_peaks.most(start, stop))

    def batch(self, start: int, stop: int, flow: Flow) -> float:
        """Bytes of the samples that a rank with the first or the last layer reads for a step."""
        if start > 0 and stop < self.costs.model.num_layers:
            return 0.0
        return self.costs.model.batch_bytes * flow.samples * flow.micro_batches

    def memory(
        self,
        start: int,
        stop: int,
        samples: int,
        in_flight: int,
        micro_batches: int | None = None,
        *,
        is_fresh: bool = False,
    ) -> float:
        """Bytes that a rank with this shard alone needs.

        Without the number of micro-batches, what a step with more of them than are in flight needs.
        """
        return self.needs(start, stop, Flow(samples, in_flight, micro_batches or in_flight + 1, is_fresh))

    def needs(self, start: int, stop: int, flow: Flow) -> float:
        """As `memory`."""
        state = self.state(start, stop)
        return (
            state.parameters + state.optimizer + self.batch(start, stop, flow) + self.moment(start, stop, flow, state)
        )


def _single_peaks(costs: CostModel, gradients: Numbers) -> Numbers:
    """By layer what a step of an optimizer that takes parameters one by one makes for a moment."""
    one, before = costs.optimizer.peak_of_one / 4, costs.optimizer.peak_of_one_before / 4
    sizes = one * gradients
    sizes[1:] += before * gradients[:-1]
    found: Numbers = np.zeros(costs.model.num_layers)
    for parameter, value in zip(costs.model.parameters, sizes, strict=True):
        for layer in parameter.layers:
            found[layer] = max(found[layer], value)
    return found


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


def _prefix(values: list[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
