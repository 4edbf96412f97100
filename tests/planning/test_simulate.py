"""Simulated steps against times worked out by hand, and what must hold for every plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from specs import cpu_cluster, gpt_spec, plain_spec, preset
from tilings import pipeline, plan_of, plans, tile

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.plan import Plan, PlannedDevice
from whale_trainer.planning.planner import answer, build_plan
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.simulation.plan_times import PlanTimes
from whale_trainer.planning.simulation.simulate import Crossing, GradientSum, simulate
from whale_trainer.planning.simulation.timeline import Activity
from whale_trainer.planning.simulation.times import TimeModel


class Fixed:
    """Every tile takes 1 s forward and 2 s backward for each sample; bridges, sums and optimizer as given."""

    def __init__(self, crossing: Crossing | None = None, sums: tuple[GradientSum, ...] = (), optimizer_s: float = 0.0):
        self._crossing = crossing
        self._sums = sums
        self._optimizer_s = optimizer_s

    def pass_s(self, tile: int, samples: int) -> tuple[float, float]:
        return float(samples), 2.0 * samples

    def backward_part(self, tile: int, layer: int) -> float:
        return 0.5 if layer else 1.0

    def crossing(self, bridge: object, op: object, samples: int) -> Crossing | None:
        return self._crossing

    def sums(self) -> tuple[GradientSum, ...]:
        return self._sums

    def optimizer_s(self, tile: int) -> float:
        return self._optimizer_s

    def sums_overlap(self, tile: int) -> bool:
        return True


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_pipeline_takes_its_slots_and_a_bubble(schedule: str, count: int) -> None:
    found = simulate(pipeline(2, count, schedule), Fixed())
    assert found.step_s == 3.0 * (count + 1)
    assert found.busy_fractions() == (count / (count + 1),) * 2
    assert found.timeline().bubble_fraction == pytest.approx(1 / (count + 1))


def test_a_transfer_counts_twice_on_the_way_of_one_micro_batch() -> None:
    assert simulate(pipeline(2, 1), Fixed(Crossing(0.5, 0.25))).step_s == 6.0 + 2 * 0.75


def test_a_slow_link_rules_when_it_is_busier_than_any_rank() -> None:
    found = simulate(pipeline(2, 8), Fixed(Crossing(10.0, 0.0, ("one way",))))
    # both directions share the link: 16 transfers of 10 s
    assert found.step_s >= 160.0


def test_a_sum_starts_within_the_last_backward_pass_and_the_optimizer_after_it() -> None:
    plan = plan_of([tile((0, 2), (0, 1), 0), tile((0, 2), (1, 2), 1)], micro_batches=1, global_batch=2)
    late, early = GradientSum((0, 1), 1, 0.25), GradientSum((0, 1), 0, 4.0)
    found = simulate(plan, Fixed(sums=(late, early), optimizer_s=1.0))
    assert [(start, stop) for _, start, stop in found.sums] == [(2.0, 2.25), (3.0, 7.0)]
    assert found.step_s == 8.0


def test_replicas_that_play_alike_are_played_once_and_all_drawn() -> None:
    plan = build_plan(gpt_spec(), cpu_cluster([2, 2, 2, 2]), preset("replicate"), global_batch=8)
    simulation = simulate(plan, PlanTimes(plan, model_of(gpt_spec(), cpu_cluster([2, 2, 2, 2]))))
    assert [len(part.members) for part in simulation.parts] == [4]
    spans = simulation.timeline().spans
    assert {s.rank for s in spans} == {0, 1, 2, 3}
    assert sum(s.activity is Activity.FORWARD for s in spans) == 4


def model_of(model: ModelSpec, hardware: Cluster) -> TimeModel:
    return TimeModel(CostModel(model, PRECISIONS["32-true"]), hardware)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_spans_of_any_tiling(plan: Plan) -> None:
    """Compute of a rank never overlaps, no transfer starts before its producer ends, all is within the step."""
    model = gpt_spec(num_blocks=plan.num_layers - 2) if plan.num_layers > 2 else plain_spec([1e6] * plan.num_layers)
    hardware = cpu_cluster([1, 2], [3])
    devices = [hardware.devices[d.rank % 3] for d in plan.devices]
    placed = tuple(PlannedDevice(r, d.kind.name, d.node, 1 << 30) for r, d in enumerate(devices))
    plan = replace(plan, devices=placed, layer_names=model.layer_names)
    timeline = simulate(plan, PlanTimes(plan, model_of(model, hardware))).timeline()
    stops = {}
    for rank in range(plan.num_ranks):
        spans = [s for s in timeline.spans if s.rank == rank and s.activity.is_compute]
        assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(spans))
        stops |= {s.label: s.stop_s for s in spans}
    for span in timeline.spans:
        assert 0 <= span.start_s <= span.stop_s <= timeline.step_s * (1 + 1e-9)
        if span.activity is Activity.TRANSFER:
            assert span.start_s >= stops[span.label.split()[0]] - 1e-12
    assert all(0 <= busy <= 1 for busy in timeline.busy_fractions)


def test_a_step_grows_with_work_and_with_slower_links() -> None:
    def step_s(flops: float, gbit_per_s: float) -> float:
        nodes = [{"name": n, "devices": {"T4": 1}} for n in ("a", "b")]
        hardware = load_cluster({"nodes": nodes, "network": {"bandwidth_gbit_per_s": gbit_per_s}})
        model = plain_spec([flops] * 4, bytes_each=1 << 20, activation=1 << 20)
        return answer(model, hardware, preset("replicate"), global_batch=8).timeline.step_s

    assert step_s(1e9, 10) < step_s(2e9, 10)
    assert step_s(1e9, 10) < step_s(1e9, 1)


def test_what_bounds_the_step_is_told() -> None:
    slow_network = load_cluster(
        {
            "nodes": [{"name": n, "devices": {"V100-SXM2-32GB": 1}} for n in ("a", "b")],
            "network": {"bandwidth_gbit_per_s": 0.1, "latency_us": 20},
        }
    )
    forced = preset("replicate", scopes=[{"layers": "*", "replicate": 2}])
    found = answer(gpt_spec(width=192), slow_network, forced, global_batch=8)
    assert found.timeline.bound_by.startswith("the sum of gradients (")
    alone = answer(gpt_spec(width=192), slow_network, preset("single"), global_batch=8)
    assert alone.timeline.bound_by.startswith("compute of rank 0, V100-SXM2-32GB (100%")
