"""How long each part of a plan takes on the declared hardware: layers on devices, tensors on links, the optimizer.

Layers follow a roofline with a floor: matrix products at the device's sustained speed, though never faster than their
weights can be read; all other kernels at its memory bandwidth; and a fixed time for each kernel, so that small work is
less efficient (Williams et al. 2009 for the roofline; the floor is what a launch, its ramp and its tail cost). Where
there is a measured profile of the kind, its figures are taken instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import Protocol

import numpy as np
import numpy.typing as npt

from whale_trainer.cluster import Cluster, Device
from whale_trainer.device_kinds import DeviceKind, Link
from whale_trainer.planning.costs.cost_model import CostModel, layer_part, shard_elements

Seconds = npt.NDArray[np.float64]

KERNEL_S = 4e-6
"""Of every kernel, whatever its size: an estimate between the launch overhead of a GPU (about 5 us where the host is
behind) and the ramp-up and tail of a kernel whose launch is hidden (1 to 3 us). A profile replaces it."""
BACKWARD_FACTOR = 2.0
"""The backward pass against the forward pass: one product for the inputs' gradients and one for the weights'."""
UNCUT_TRAFFIC = 1 / 3
"""Part of a cut layer's memory traffic that every shard has: residual, norms and gathered outputs."""
TRAFFIC_FACTORS = {"fp64": 2.0, "fp32": 1.0, "bf16": 0.6, "fp16": 0.6}
"""Memory traffic against that of the model in fp32; under autocast norms, softmax and the loss keep 4 bytes."""


class LayerProfile(Protocol):
    """Measured times of layers, by kind; see `planning.simulation.profile`."""

    def pass_s(self, kind: str, layer: str, samples: float, part: float) -> tuple[float, float] | None:
        """(forward, backward) seconds of a layer with `part` of its cut work; None where nothing was measured."""
        ...

    def optimizer_s(self, kind: str, num_elements: float) -> float | None:
        """Seconds of an optimizer step; None where nothing was measured."""
        ...


@dataclass(frozen=True)
class StageTimes:
    """Prefix sums over the layers, in seconds: layers [a, b) take `forward[b] - forward[a]`."""

    forward: Seconds
    backward: Seconds
    weights: Seconds
    """The part of `backward` that is gradients of weights which can wait."""

    @cached_property
    def both(self) -> Seconds:
        return self.forward + self.backward


class TimeModel:
    """Times on the devices and links of a cluster, for one model in one precision."""

    def __init__(self, costs: CostModel, cluster: Cluster, profile: LayerProfile | None = None) -> None:
        self.costs = costs
        self.cluster = cluster
        self.profile = profile
        self._layers: dict[tuple[str, float, tuple[int, ...], int], StageTimes] = {}
        self._stages: dict[tuple[object, ...], StageTimes] = {}
        self._parts_of: dict[tuple[tuple[int, ...], int], Seconds] = {}
        distinct = {tuple(shares.items()): shares for shares in costs.shares}
        self._distinct_shares = list(distinct.values())
        numbers = {key: i for i, key in enumerate(distinct)}
        self._share_of = [numbers[tuple(shares.items())] for shares in costs.shares]
        self._elements: dict[tuple[tuple[int, ...], int], Seconds] = {}
        model = costs.model
        factor = TRAFFIC_FACTORS[costs.precision.dtype]
        self._flops = np.array([layer.forward_flops for layer in model.layers])
        self._cut_flops = np.array([layer.split_flops for layer in model.layers])
        self._moved = np.array([layer.moved_bytes for layer in model.layers]) * factor
        self._kernels_s = np.array([layer.num_kernels for layer in model.layers]) * KERNEL_S
        self._weights = np.zeros(len(model.layers))
        for parameter in model.parameters:
            for index in parameter.layers:
                # the rows of a table are not all read
                if model.layers[index].forward_flops:
                    self._weights[index] += parameter.num_elements * costs.precision.bytes_of(parameter)
        outputs = [layer.boundary_bytes for layer in model.layers]
        self.boundary_bytes = np.array(outputs) * (2.0 if costs.precision.weight_bytes == 8 else 1.0)
        """Bytes that one sample takes over a bridge after each layer."""
        width = [min(outputs[max(0, i - 1)], outputs[i]) for i in range(len(outputs))]
        self._sum_bytes = np.array(width) * (0.5 if costs.precision.copy_bytes else 1.0)
        self._num_sums = np.array([layer.num_collectives for layer in model.layers])
        self._links = {node.name: node.link for node in cluster.nodes}
        self._nodes = {d.index: d.node for d in cluster.devices}

    def shard(self, kind: DeviceKind, samples: float, weights: tuple[int, ...], shard: int) -> StageTimes:
        """Times of every layer on one device that has shard number `shard`; not summed up, no collectives."""
        key = (kind.name, samples, weights, shard)
        if key not in self._layers:
            self._layers[key] = self._profiled(kind, samples, weights, shard) or self._roofline(
                kind, samples, weights, shard
            )
        return self._layers[key]

    def _parts(self, weights: tuple[int, ...], shard: int) -> Seconds:
        key = (weights, shard)
        if key not in self._parts_of:
            # layers of one structure share their parts
            known = [layer_part(shares, weights, shard) for shares in self._distinct_shares]
            self._parts_of[key] = np.array(known)[self._share_of]
        return self._parts_of[key]

    def _roofline(self, kind: DeviceKind, samples: float, weights: tuple[int, ...], shard: int) -> StageTimes:
        parts = self._parts(weights, shard)
        bandwidth = kind.memory_bandwidth_bytes_per_s
        flops = (self._flops - self._cut_flops * (1 - parts)) * samples
        products_s = np.maximum(flops / kind.speed(self.costs.precision.dtype), self._weights * parts / bandwidth)
        traffic_s = self._moved * samples * (UNCUT_TRAFFIC + (1 - UNCUT_TRAFFIC) * parts) / bandwidth
        forward = products_s + traffic_s + self._kernels_s
        return StageTimes(
            forward, BACKWARD_FACTOR * forward, np.where(self._linear < 0, forward, self._linear * products_s)
        )

    @cached_property
    def _linear(self) -> Seconds:
        """Part of each layer's products that is of linear layers, whose weights' gradients can wait; each takes as long
        as the product itself. Below 0 where it is not known, and half of the backward pass is taken."""
        parts = [
            -1.0 if layer.linear_flops is None else layer.linear_flops / max(1.0, layer.forward_flops)
            for layer in self.costs.model.layers
        ]
        return np.array(parts)

    def _profiled(self, kind: DeviceKind, samples: float, weights: tuple[int, ...], shard: int) -> StageTimes | None:
        if self.profile is None:
            return None
        found = [
            self.profile.pass_s(kind.name, name, samples, part)
            for name, part in zip(self.costs.model.layer_names, self._parts(weights, shard), strict=True)
        ]
        known = [f for f in found if f is not None]
        if len(known) < len(found):
            return None
        guess = self._roofline(kind, samples, weights, shard)
        backward = np.array([b for _, b in known])
        parts = np.divide(guess.weights, guess.backward, out=np.full_like(backward, 0.5), where=guess.backward > 0)
        return StageTimes(np.array([f for f, _ in known]), backward, backward * parts)

    def group(self, devices: Sequence[Device], weights: tuple[int, ...], samples: float) -> StageTimes:
        """Prefix sums for a tile of `samples` on a tensor group; its shards wait for each other in every layer."""
        place = self._place(devices)
        key = (tuple(d.kind.name for d in devices), place, weights, samples)
        if key not in self._stages:
            shards = {(d.kind.name, i): self.shard(d.kind, samples, weights, i) for i, d in enumerate(devices)}
            forward = np.maximum.reduce([s.forward for s in shards.values()])
            backward = np.maximum.reduce([s.backward for s in shards.values()])
            waiting = np.maximum.reduce([s.weights for s in shards.values()])
            if len(devices) > 1:
                latency_s, per_byte_s = self.sum_costs(devices)
                sums_s = self._num_sums * (latency_s + per_byte_s * self._sum_bytes * samples)
                forward, backward = forward + sums_s, backward + sums_s
            self._stages[key] = StageTimes(_prefix(forward), _prefix(backward), _prefix(waiting))
        return self._stages[key]

    def _place(self, devices: Sequence[Device]) -> object:
        """What decides the group's links: how many members each link joins."""
        nodes = [d.node for d in devices]
        if len(set(nodes)) == 1:
            return self._links[nodes[0]]
        return tuple(sorted((self._links[n].name, nodes.count(n)) for n in set(nodes)))

    def link(self, first: Device, second: Device) -> Link:
        """The link between two devices."""
        return self._links[first.node] if first.node == second.node else self.cluster.network

    def sum_costs(self, devices: Sequence[Device], sharers: int = 1) -> tuple[float, float]:
        """(seconds, seconds per byte) of a sum over `devices`, all of which get the result.

        Each byte passes every link about twice, 2 (k - 1) / k (Patarasuk and Yuan 2009); the time to start grows with
        the logarithm of the group's size (double binary trees, Sanders et al. 2009). `sharers` rings use one network
        port at once.
        """
        count = len(devices)
        if count < 2:
            return 0.0, 0.0
        distinct = Counter(d.node for d in devices)
        links = [self._links[n] for n, members in distinct.items() if members > 1]
        bandwidths = [link.bandwidth_bytes_per_s for link in links]
        latency = max((link.latency_s for link in links), default=0.0)
        if len(distinct) > 1:
            bandwidths.append(self.cluster.network.bandwidth_bytes_per_s / sharers)
            latency = max(latency, self.cluster.network.latency_s)
        return 2 * ceil(log2(count)) * latency, 2 * (count - 1) / count / min(bandwidths)

    @cached_property
    def gradient_bytes(self) -> tuple[list[float], list[float], list[tuple[tuple[int, ...], bool, float]]]:
        """Bytes of the gradients: by layer of what may be cut, by layer of the rest, and (layers, cut, bytes) of
        parameters that several layers use."""
        cut, whole = [0.0] * len(self.costs.model.layers), [0.0] * len(self.costs.model.layers)
        tied = []
        for parameter in self.costs.model.parameters:
            if not parameter.trainable:
                continue
            size = float(parameter.num_elements * self.costs.precision.bytes_of(parameter))
            if len(parameter.layers) == 1:
                (cut if parameter.cut is not None else whole)[parameter.layers[0]] += size
            else:
                tied.append((parameter.layers, parameter.cut is not None, size))
        return cut, whole, tied

    def elements(self, weights: tuple[int, ...], shard: int) -> Seconds:
        """Prefix sums over the layers of the trained elements that a shard holds; tied ones count where they are
        first used."""
        key = (weights, shard)
        if key not in self._elements:
            counts = np.zeros(len(self.costs.model.layers))
            for parameter in self.costs.model.parameters:
                if parameter.trainable and parameter.layers:
                    counts[parameter.layers[0]] += shard_elements(parameter, weights, shard)
            self._elements[key] = _prefix(counts)
        return self._elements[key]

    def optimizer_s(self, kind: DeviceKind, num_elements: float) -> float:
        """Seconds of an optimizer step: weights, gradients and state are read, weights and state written."""
        if self.profile is not None:
            measured = self.profile.optimizer_s(kind.name, num_elements)
            if measured is not None:
                return measured
        per_element = 3 * 4 + 2 * self.costs.optimizer.of_element
        return num_elements * per_element / kind.memory_bandwidth_bytes_per_s + KERNEL_S


def _prefix(values: Seconds) -> Seconds:
    return np.concatenate(([0.0], np.cumsum(values)))
