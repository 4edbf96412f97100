"""Every distinct layer of a model, really run: forward and backward, by samples and by part of its cut work."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from whale_trainer.calibration.core import Core, now_s
from whale_trainer.calibration.statistics import Statistic, repeated
from whale_trainer.config import Config
from whale_trainer.data.draws import seed_generators
from whale_trainer.describe import first_inputs, layers_of, model_loss
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import dim_shares, layer_part
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.profile import equal_layers
from whale_trainer.runtime.alone import lone_tile
from whale_trainer.runtime.dropout import DropoutState
from whale_trainer.runtime.precision import Precision
from whale_trainer.runtime.shards import TileLayers
from whale_trainer.runtime.weight_gradients import Product, WeightGradients, add_waiting

CUTS: tuple[tuple[int, ...], ...] = ((1,), (3, 1), (1, 1), (1, 1, 1, 1), (1,) * 8)
"""Weights of a tensor group of which the first shard is measured, where the layer can be cut so often."""
LONG_PASS_S = 1.0
"""After a pass that takes longer no larger micro-batch is tried: the time then grows with the samples."""

Trial = Callable[[], dict[str, Any]]
Segments = tuple[float, ...]
"""Seconds of a pass, cut where a tensor group would meet."""


def trial_name(layer: str, samples: int, weights: tuple[int, ...]) -> str:
    """What a trial is called in the journal."""
    return f"layer {layer}, {samples} samples, first shard of {':'.join(map(str, weights))}"


def parts_of(spec: ModelSpec, index: int) -> dict[tuple[int, ...], float]:
    """The cuts that a layer is measured with, each with the part of the cut work that is measured; every part once."""
    dims = spec.layers[index].split_dims
    shares = dim_shares(spec)[index]
    found: dict[float, tuple[int, ...]] = {}
    for weights in CUTS:
        if len(weights) == 1 or (dims and all(dim.units >= len(weights) for dim in dims)):
            found.setdefault(layer_part(shares, weights, 0), weights)
    return {weights: part for part, weights in found.items()}


class LayerBench:
    """The model on the CPU, as its author wrote it, and what its layers get; shards of it are run on `device`."""

    def __init__(
        self, config: Config, spec: ModelSpec, batch: Any, device: torch.device, core: Core | None = None
    ) -> None:
        """With `core`, times are processor time of that core at its usual speed."""
        seed_generators("model", config.seed)
        torch.manual_seed(config.seed)
        self._model: nn.Module = config.model.build().train()
        _check_loss(self._model)
        self._spec = spec
        self._device = device
        self.core = core
        self._meetings: list[float] = []
        """Moments at which the tensor group would have met, in the pass that runs."""
        self._precision = Precision(config.trainer.precision, device.type)
        self._on_cpu = Precision(config.trainer.precision, "cpu")
        self._batch = batch
        sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        self._num_samples = sizes[0] if sizes else 1
        self._dropout = DropoutState(config.seed)
        self._layers = [module for _, module in layers_of(self._model)]
        self.groups = self._groups()
        """Indices of layers that are equal and written alike, group by group."""
        self._outputs: dict[int, Any] = {}

    def _groups(self) -> list[list[int]]:
        found: dict[tuple[int, str], list[int]] = {}
        for number, group in enumerate(equal_layers(self._spec)):
            for index in group:
                found.setdefault((number, repr(self._layers[index])), []).append(index)
        return sorted(found.values())

    def trials(
        self, samples: Sequence[int], known: Container[str], *, is_cut: bool = True
    ) -> Iterator[tuple[str, Trial]]:
        """Every trial by name, without those that are known already; to be made in this order, one after another.

        Without `is_cut` only whole layers are measured.
        """
        for group in self.groups:
            index, name = group[0], self._spec.layers[group[0]].name
            for weights in parts_of(self._spec, index) if is_cut else ((1,),):
                shard = _Shard(self, index, weights)
                for count in samples:
                    if trial_name(name, count, weights) not in known:
                        yield trial_name(name, count, weights), partial(shard.measure, count)

    def inputs(self, index: int, count: int) -> Any:
        """What layer `index` gets of `count` samples, on the device."""
        value = first_inputs(self._model, self._batch) if index == 0 else self._output(index - 1)
        return tree_map(lambda leaf: self._sent(leaf, count), value)

    def batch(self, count: int) -> Any:
        """The batch of `count` samples, on the device."""
        return tree_map(lambda leaf: self._sent(leaf, count), self._batch)

    def _sent(self, leaf: Any, count: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() and len(leaf) == self._num_samples:
            leaf = leaf[torch.arange(count) % self._num_samples]
        is_double = self._precision.parameter_dtype == torch.float64 and leaf.is_floating_point()
        return leaf.to(self._device, torch.float64 if is_double else None)

    def _output(self, index: int) -> Any:
        """What layer `index` gives for the example: that of an equal layer, run once on the CPU."""
        first = next(group[0] for group in self.groups if index in group)
        if first not in self._outputs:
            value = first_inputs(self._model, self._batch) if first == 0 else self._output(first - 1)
            with torch.no_grad(), self._on_cpu.forward_context():
                self._outputs[first] = self._layers[first](value)
        return self._outputs[first]

    def shard(
        self, layers: Interval, weights: tuple[int, ...], shard: int = 0, waits: WeightGradients | None = None
    ) -> TileLayers:
        """A shard of some layers under `weights`, on the device; with `waits` for split backward passes."""
        return lone_tile(
            self._model,
            self._spec,
            layers,
            weights,
            shard,
            device=self._device,
            dtype=self._precision.parameter_dtype,
            dropout=self._dropout,
            met=lambda: self._meetings.append(self._now()),
            weights_wait=waits,
        )

    def run(
        self, tile: TileLayers, layers: Interval, inputs: Any, batch: Any, waits: WeightGradients | None = None
    ) -> tuple[Segments, ...]:
        """Seconds of one forward and one backward pass, each cut where a tensor group would meet.

        With `waits` the backward pass is split: forward, gradients of inputs, gradients of weights.
        """
        x = tree_map(_with_gradient, inputs) if layers.start else inputs
        self._dropout.enter(0, 0)
        forward = self._begin()
        with self._precision.forward_context():
            out = tile(x)
            if layers.stop == self._spec.num_layers:
                out = model_loss(self._model, out, batch)[0] * self._precision.loss_scale
        forward_s = forward()
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        products: list[Product] = []
        if waits is not None:
            waits.waiting = products
        backward = self._begin()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        backward_s = backward()
        if waits is None:
            return forward_s, backward_s
        waits.waiting = None
        weight = self._begin()
        for _ in add_waiting(products):
            pass
        return forward_s, backward_s, weight()

    def _begin(self) -> Callable[[], Segments]:
        """Start to time; gives what ends it, with the seconds of each segment."""
        self._meetings.clear()
        begin = self._now()

        def end() -> Segments:
            moments = [begin, *self._meetings, self._now()]
            return tuple(b - a for a, b in pairwise(moments))

        return end

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call, in the bench's kind of time."""
        begin = self._now()
        call()
        return self._now() - begin

    def steady(self, call: Callable[[], Sequence[float]]) -> tuple[Statistic, ...]:
        """The repeated seconds of a call, in the bench's kind of time."""
        core = self.core
        return repeated(lambda: tuple(call())) if core is None else repeated(lambda: core.usual(call))

    def _now(self) -> float:
        if self.core is not None:
            return now_s()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Shard:
    """The trials of one shard of one layer; made when the first one runs, and used for all."""

    def __init__(self, bench: LayerBench, index: int, weights: tuple[int, ...]) -> None:
        self._bench = bench
        self._layers = Interval(index, index + 1)
        self._weights = weights
        self._tile: TileLayers | None = None
        self._is_long = False

    def measure(self, count: int) -> dict[str, Any]:
        """Times of `count` samples, or that they were left out."""
        if self._is_long:
            return {"left_out": f"fewer samples take longer than {LONG_PASS_S:g} s"}
        bench = self._bench
        if self._tile is None:
            self._tile = bench.shard(self._layers, self._weights)
        tile, inputs, batch = self._tile, bench.inputs(self._layers.start, count), bench.batch(count)
        forward, backward = bench.steady(lambda: [sum(s) for s in bench.run(tile, self._layers, inputs, batch)])
        self._is_long = forward.median_s + backward.median_s > LONG_PASS_S
        return {
            "forward_s": forward.median_s,
            "backward_s": backward.median_s,
            "forward_spread_s": forward.spread_s,
            "backward_spread_s": backward.spread_s,
            "repeats": forward.repeats,
        }


def _check_loss(model: nn.Module) -> None:
    if not callable(getattr(model, "loss", None)):
        message = (
            f"{type(model).__name__} has no loss(output, batch) -> (sum, count), which mode=calibrate times with the "
            "last layer: give it one, or plan without a profile"
        )
        raise ConfigError([Problem("model", message)])


def _with_gradient(leaf: Any) -> Any:
    """A tensor as it comes over a bridge."""
    return leaf.detach().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf
