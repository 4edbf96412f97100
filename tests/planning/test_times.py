"""Seconds of layers, collectives and the optimizer on declared hardware, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from specs import gpt_spec, plain_spec

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.simulation.times import BACKWARD_FACTOR, KERNEL_S, TimeModel


def hardware() -> Cluster:
    """Two nodes of two devices: 1 TFLOP/s, 100 GB/s; links of 10 GB/s inside, 1 GB/s between."""
    kind = {"peak_tflops": {"fp32": 1.0, "fp16": 4.0}, "memory_gib": 4, "memory_bandwidth_gb_per_s": 100}
    link = {"bandwidth_gbit_per_s": 80, "latency_us": 10}
    nodes = [{"name": name, "devices": {"unit": 2}, "link": link} for name in ("a", "b")]
    network = {"bandwidth_gbit_per_s": 8, "latency_us": 100}
    return load_cluster({"nodes": nodes, "network": network, "kinds": {"unit": kind}})


def one_layer(**changes: float) -> ModelSpec:
    model = plain_spec([1e9])
    return replace(model, layers=(replace(model.layers[0], **changes),))


def times_of(model: ModelSpec, precision: str = "32-true") -> TimeModel:
    return TimeModel(CostModel(model, PRECISIONS[precision]), hardware())


def forward_s(model: ModelSpec, samples: float, precision: str = "32-true") -> float:
    times = times_of(model, precision)
    return float(times.group(times.cluster.devices[:1], (1,), samples).forward[-1])


def test_products_run_at_the_sustained_speed_of_the_precision() -> None:
    assert forward_s(one_layer(), 4) == pytest.approx(4e-3)
    assert forward_s(one_layer(), 4, "16-mixed") == pytest.approx(1e-3)


def test_other_kernels_run_at_the_memory_bandwidth_and_each_has_a_floor() -> None:
    assert forward_s(one_layer(moved_bytes=10**9), 4) == pytest.approx(4e-3 + 4 * 1e-2)
    assert forward_s(one_layer(num_kernels=10), 1) == pytest.approx(1e-3 + 10 * KERNEL_S)


def test_small_products_wait_for_their_weights() -> None:
    heavy = plain_spec([1e6], bytes_each=10**9)
    assert forward_s(heavy, 1) == pytest.approx(1e-2)
    # with enough samples the weights are read beside the products
    assert forward_s(heavy, 10**5) == pytest.approx(1e-1)


def test_efficiency_rises_with_the_samples() -> None:
    model = one_layer(num_kernels=50)
    per_sample = [forward_s(model, n) / n for n in (1, 2, 4, 64)]
    assert per_sample == sorted(per_sample, reverse=True)


def test_a_group_is_as_slow_as_its_slowest_shard_and_waits_for_its_sums() -> None:
    model = gpt_spec(width=96, num_heads=6)
    times = times_of(model)
    devices = times.cluster.devices
    alone = times.group(devices[:1], (1,), 8)
    uneven = times.group(devices[:2], (2, 1), 8)
    even = times.group(devices[:2], (1, 1), 8)
    assert even.forward[-1] < uneven.forward[-1]
    sums = sum(layer.num_collectives for layer in model.layers)
    latency_s, _ = times.sum_costs(devices[:2])
    assert even.forward[-1] > alone.forward[-1] / 2 + sums * latency_s
    far = times.group((devices[0], devices[2]), (1, 1), 8)
    assert far.forward[-1] > even.forward[-1]


def test_the_backward_pass_takes_twice_as_long() -> None:
    times = times_of(one_layer())
    found = times.group(times.cluster.devices[:1], (1,), 3)
    assert np.allclose(found.backward, BACKWARD_FACTOR * found.forward)


def test_sums_pass_the_slowest_link_about_twice() -> None:
    times = times_of(one_layer())
    devices = times.cluster.devices
    assert times.sum_costs(devices[:1]) == (0.0, 0.0)
    assert times.sum_costs(devices[:2]) == pytest.approx((2 * 10e-6, 1 / 10e9))
    assert times.sum_costs(devices) == pytest.approx((4 * 100e-6, 1.5 / 1e9))
    # two rings through one port have half of it each
    assert times.sum_costs(devices, sharers=2)[1] == pytest.approx(1.5 / 0.5e9)


class Profile:
    """Knows the kind `unit`: 7 s forward, 11 s backward, whatever the layer."""

    def pass_s(self, kind: str, layer: str, samples: float, part: float) -> tuple[float, float] | None:
        return (7.0, 11.0) if kind == "unit" else None

    def optimizer_s(self, kind: str, num_elements: float) -> float | None:
        return 3.0 if kind == "unit" else None


def test_a_profile_is_preferred_where_it_knows_the_kind() -> None:
    costs = CostModel(plain_spec([1e9, 1e9]), PRECISIONS["32-true"])
    times = TimeModel(costs, hardware(), Profile())
    device = times.cluster.devices[0]
    found = times.group((device,), (1,), 1)
    assert (found.forward[-1], found.backward[-1]) == (14.0, 22.0)
    assert times.optimizer_s(device.kind, 1e6) == 3.0
    other = device.kind.model_copy(update={"name": "other"})
    assert times.optimizer_s(other, 1e9) == pytest.approx(28e9 / 100e9, rel=1e-3)
