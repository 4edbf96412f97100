"""The paper's Algorithm 1 and its stage order, as the base line `balance: whale`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from specs import cpu_cluster, gpt_spec, plain_spec, preset

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.errors import PlanError
from whale_trainer.planning.planner import answer, build_plan
from whale_trainer.planning.search.balance import water_fill
from whale_trainer.planning.search.whale import largest_remainders, shift_loads

CONF = Path(__file__).parents[2] / "conf"


def cluster(name: str) -> Cluster:
    return load_cluster(yaml.safe_load((CONF / "cluster" / f"{name}.yaml").read_text()))


def test_loads_follow_the_data_sheets_single_precision() -> None:
    plan = build_plan(gpt_spec(), cluster("v100_p100"), preset("replicate", balance="whale"), global_batch=100)
    # 15.7 : 9.3 TFLOP/s, whatever is sustained
    assert [len(t.samples) for t in plan.tiles] == [16, 16, 16, 16, 9, 9, 9, 9]


def test_earlier_stages_get_the_devices_with_more_memory() -> None:
    strategy = preset("pipeline", balance="whale", scopes=[{"layers": "*", "replicate": 2, "stages": 4}])
    plan = build_plan(gpt_spec(), cluster("v100_p100"), strategy, global_batch=32)
    kinds = [plan.devices[t.ranks[0]].kind for t in sorted(plan.tiles)]
    assert kinds == ["V100-SXM2-32GB"] * 4 + ["P100-PCIE-16GB"] * 4
    assert len({t.layers for t in plan.tiles}) == 4


def test_an_overflow_is_shifted_to_the_least_busy() -> None:
    room = [3, 10, 10]
    assert shift_loads([6, 2, 1], [3.0, 2.0, 1.0], lambda i, n: n / room[i]) == [3, 2, 4]
    # partial shifts count: what one cannot take goes to the next
    assert shift_loads([6, 2, 1], [3.0, 2.0, 1.0], lambda i, n: n / [3, 4, 2][i]) == [3, 4, 2]
    assert shift_loads([6, 2, 1], [3.0, 2.0, 1.0], lambda i, n: n / [3, 2, 2][i]) is None


@given(
    st.lists(st.tuples(st.floats(1, 10), st.integers(1, 40)), min_size=2, max_size=6),
    st.integers(6, 60),
)
def test_algorithm_1_never_beats_water_filling(devices: list[tuple[float, int]], units: int) -> None:
    speeds, caps = [s for s, _ in devices], [c for _, c in devices]
    if units < len(devices):
        return
    loads = largest_remainders(units, speeds)
    assert sum(loads) == units
    found = shift_loads(loads, speeds, lambda i, n: n / caps[i])
    best = water_fill(speeds, [c / units for c in caps])
    if found is None:
        return
    assert best is not None, "what fits in whole units fits in parts"
    assert all(n <= c for n, c in zip(found, caps, strict=True))
    least = max(units * p / s for p, s in zip(best, speeds, strict=True))
    assert max(n / s for n, s in zip(found, speeds, strict=True)) >= least * (1 - 1e-9)


def test_layers_move_through_the_stages_between() -> None:
    # three stages of equal speed, the first with little memory: its layers go to the last one, all stay contiguous
    model = plain_spec([1e9] * 9, bytes_each=1 << 20)
    strategy = preset("pipeline", balance="whale", scopes=[{"layers": "*", "stages": 3}])
    tight = cpu_cluster([1], [1], [1], memory_gib=[0.1, 0.1, 0.1])
    assert [len(t.layers) for t in build_plan(model, tight, strategy, global_batch=4).tiles] == [3, 3, 3]
    with pytest.raises(PlanError, match="does not fit"):
        build_plan(model, cpu_cluster([1], [1], [1], memory_gib=0.003), strategy, global_batch=4)


@pytest.mark.parametrize("name", ["replicate", "split", "pipeline", "hybrid", "auto"])
def test_hardware_is_never_behind(name: str) -> None:
    model = gpt_spec(width=512, num_blocks=6, num_heads=8, context=256)
    for hardware in (cluster("v100_p100"), cpu_cluster([4, 2], [1, 1], memory_gib=[1.0, 1.0, 3.0, 3.0])):
        predicted = answer(model, hardware, preset(name), global_batch=32).plan.predicted
        assert predicted.step_s is not None
        for other in (predicted.even_step_s, predicted.whale_step_s):
            assert other is None or predicted.step_s <= other * (1 + 1e-9)
