"""N04: every plan that the planner gives can be started; the searched ones train to the numbers of one process."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from ranks import run_ranks
from runs import Case, gpt, run_case, single, token_batch
from specs import cpu_cluster, preset
from whale_trainer.models.gpt import GPT

from whale_trainer.describe import describe
from whale_trainer.errors import ConfigError, PlanError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.planner import build_plan

SPEEDS = {
    2: ([9.0, 1.0], [3.0, 2.0]),
    3: ([1.0, 1.0, 1.0], [5.0, 3.0, 2.0]),
    5: ([9.0, 1.0, 3.0, 3.0, 1.0],),
    7: ([1.0] * 7,),
}
STRATEGIES = ("auto", "hybrid", "pipeline", "replicate", "split")


def spec_of(num_layers: int) -> ModelSpec:
    with torch.device("meta"):
        model = gpt(num_layers=num_layers)
    assert isinstance(model, GPT)
    return describe(model, token_batch(2, 0))


def planned(spec: ModelSpec, speeds: list[float], name: str, memory_gib: float) -> Plan | None:
    """The plan on devices so slow that compute rules and all of them are worth using; None where it is refused."""
    # one of them is tiny where memory is short
    memory = [1.0] * (len(speeds) - 1) + [memory_gib]
    hardware = cpu_cluster([s * 1e-3 for s in speeds], memory_gib=memory)
    try:
        return build_plan(spec, hardware, preset(name), global_batch=12, precision="64-true")
    except (ConfigError, PlanError) as error:
        assert len(str(error)) > 40  # noqa: PT017 - either outcome is right
        return None


def every_plan() -> list[Plan]:
    found = []
    for num_layers, memory_gib, name in product((1, 4, 5), (1.0, 0.0001), STRATEGIES):
        spec = spec_of(num_layers)
        for all_speeds in SPEEDS.values():
            found += [planned(spec, list(speeds), name, memory_gib) for speeds in all_speeds]
    return [plan for plan in found if plan is not None]


@pytest.mark.ranks
def test_n04_plans_are_whole_and_run() -> None:
    plans = every_plan()
    assert len(plans) > 100
    for plan in plans:
        assert {r for t in plan.tiles for r in t.ranks} == set(range(plan.num_ranks))
        assert all(len(t.layers) >= 1 and len(t.samples) >= 1 for t in plan.tiles)
    small = [p for p in dict.fromkeys(plans) if 2 <= p.num_ranks <= 4]
    for plan in random.Random(0).sample(small, 10):
        arguments = {"num_layers": plan.num_layers - 2}
        case = Case(plan, arguments=arguments)
        alone = run_ranks(run_case, 1, case.under(single(plan)))[0]
        for outcome in run_ranks(run_case, plan.num_ranks, case):
            assert outcome.losses == pytest.approx(alone.losses, abs=1e-10)
            for name, gradient in alone.gradients.items():
                torch.testing.assert_close(outcome.gradients[name], gradient, atol=1e-10, rtol=1e-10)


def test_n04_five_layers_at_three_to_two() -> None:
    strategy = preset("pipeline", scopes=[{"layers": "*", "stages": 2}])
    spec = spec_of(3)
    flat = tuple(layer.__class__(f"l{i}", 1e9, 0.0, 100, 100) for i, layer in enumerate(spec.layers))
    plan = build_plan(ModelSpec("Flat", flat, ()), cpu_cluster([3, 2]), strategy, global_batch=4)
    assert {t.ranks[0]: len(t.layers) for t in plan.tiles} == {0: 3, 1: 2}
