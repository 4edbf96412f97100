"""Memory of a rank, item by item."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specs import cpu_cluster, gpt_spec, plain_spec, preset, scopes

from whale_trainer.errors import PlanError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs import CostModel, MemoryItems, dim_shares
from whale_trainer.planning.memory import in_flight, rank_memory, size
from whale_trainer.planning.planner import build_plan
from whale_trainer.planning.precision import PRECISIONS

MB = 1_000_000


def state_mb(model: ModelSpec, precision: str, optimizer_bytes: int) -> dict[str, float]:
    costs = CostModel(model, PRECISIONS[precision], optimizer_bytes)
    items = MemoryItems()
    for parameter in model.parameters:
        items += costs.state_of(parameter, parameter.num_elements)
    return {name: value / MB for name, value in vars(items).items() if value}


def million(trainable: float = 1.0) -> ModelSpec:
    spec = plain_spec([1.0, 1.0], bytes_each=4 * MB // 2)
    first, second = spec.parameters
    return replace(spec, parameters=(first, replace(second, trainable=trainable == 1.0)))


@pytest.mark.parametrize(
    ("precision", "optimizer_bytes", "total"),
    [("32-true", 0, 8.0), ("32-true", 4, 12.0), ("32-true", 8, 16.0), ("64-true", 8, 32.0)],
)
def test_bytes_of_a_million_parameters(precision: str, optimizer_bytes: int, total: float) -> None:
    assert sum(state_mb(million(), precision, optimizer_bytes).values()) == pytest.approx(total)


def test_autocast_names_its_copy() -> None:
    assert state_mb(million(), "bf16-mixed", 8) == {
        "parameters": 4.0,
        "gradients": 4.0,
        "optimizer_state": 8.0,
        "cast_copy": 2.0,
    }


def test_frozen_parameters_are_weights_only() -> None:
    assert sum(state_mb(million(trainable=0.5), "32-true", 8).values()) == pytest.approx(10.0)


def test_tied_weights_are_counted_once_on_a_rank_and_on_each_of_two() -> None:
    tied, untied = gpt_spec(tied=True), gpt_spec(tied=False)
    table = tied.parameters[0].size_bytes
    assert untied.num_parameters - tied.num_parameters == tied.parameters[0].num_elements
    cluster = cpu_cluster([1, 1])

    def parameters(spec: ModelSpec, strategy: str) -> float:
        plan = build_plan(spec, cluster, preset(strategy), global_batch=8)
        return sum(items.parameters for items in rank_memory(plan, CostModel(spec, PRECISIONS["32-true"], 8)))

    assert parameters(untied, "single") - parameters(tied, "single") == table
    assert parameters(tied, "pipeline") == parameters(untied, "pipeline") == parameters(tied, "single") + table


@pytest.mark.parametrize(("schedule", "flying"), [("1f1b", (3, 2, 1)), ("gpipe", (8, 8, 8))])
def test_micro_batches_in_flight(schedule: str, flying: tuple[int, ...]) -> None:
    strategy = preset("pipeline", schedule=schedule, micro_batches=8, scopes=[{"layers": "*", "stages": 3}])
    plan = build_plan(plain_spec([1.0] * 3), cpu_cluster([1, 1, 1]), strategy, global_batch=8)
    assert in_flight(plan) == flying


def test_more_of_anything_needs_more_memory() -> None:
    cluster = cpu_cluster([1, 1, 1])

    def first_rank(global_batch: int = 8, micro_batches: int = 2, **sizes: int) -> int:
        strategy = preset("pipeline", micro_batches=micro_batches, scopes=[{"layers": "*", "stages": 3}])
        plan = build_plan(gpt_spec(**sizes), cluster, strategy, global_batch=global_batch)
        planned = plan.devices[0].planned_memory_bytes
        assert planned is not None
        return planned

    assert first_rank() < first_rank(global_batch=16) < first_rank(global_batch=32)
    assert first_rank() < first_rank(context=128)
    assert first_rank() < first_rank(num_blocks=12)
    assert first_rank(global_batch=8, micro_batches=2) < first_rank(global_batch=12, micro_batches=3)


def test_a_shard_holds_its_units() -> None:
    spec = gpt_spec()
    plan = build_plan(spec, cpu_cluster([2, 1]), preset("split"), global_batch=4)
    items = rank_memory(plan, CostModel(spec, PRECISIONS["32-true"], 8))
    whole = sum(p.size_bytes for p in spec.parameters if p.cut is None)
    cut = sum(p.size_bytes for p in spec.parameters if p.cut is not None)
    assert items[0].parameters + items[1].parameters == 2 * whole + cut
    assert items[0].parameters == pytest.approx(whole + cut * 2 / 3, rel=0.01)


def test_two_tiles_on_a_rank_hold_a_shared_weight_once() -> None:
    spec = gpt_spec()
    cluster = cpu_cluster([1, 1])
    strategy = scopes({"layers": "head", "split": 2, "colocate": True}, default={"replicate": 2})
    plan = build_plan(spec, cluster, strategy, global_batch=4)
    items = rank_memory(plan, CostModel(spec, PRECISIONS["32-true"], 8))
    # embed holds the whole table on both ranks, so the half that head cuts from it is there already
    assert items[0].parameters == sum(p.size_bytes for p in spec.parameters)


def test_a_plan_that_does_not_fit_says_what_is_needed_and_what_there_is() -> None:
    spec = plain_spec([1.0] * 4, bytes_each=40 * MB)
    with pytest.raises(PlanError) as error:
        build_plan(spec, cpu_cluster([2, 1], memory_gib=0.1), preset("replicate"), global_batch=4)
    message = str(error.value)
    assert "rank 0 (cpu-2-0.1 on node0) needs 635.4 MiB, 102.4 MiB of its 102.4 MiB can be used" in message
    assert "305.2 MiB optimizer state, 152.6 MiB parameters, 152.6 MiB gradients" in message
    assert "Too much also on rank 1" in message
    assert "Use more stages or shards (strategy.scopes)" in message


def test_activations_that_do_not_fit_point_to_the_batch() -> None:
    spec = plain_spec([1.0] * 4, activation=40 * MB)
    with pytest.raises(PlanError, match=r"Raise strategy\.micro_batches or lower global_batch"):
        build_plan(spec, cpu_cluster([2, 1], memory_gib=0.1), preset("replicate"), global_batch=4)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "512 B"), (40 << 20, "40 MiB"), (13_207_024_435, "12.3 GiB"), (5 << 40, "5120 GiB")]
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_cut_work_follows_the_parameters_of_each_dim() -> None:
    shares = dim_shares(gpt_spec())
    assert [{dim.name: round(share, 3) for dim, share in layer.items()} for layer in shares[:2]] == [
        {"vocabulary": 1.0},
        {"heads": 0.333, "columns": 0.667},
    ]
    assert dim_shares(plain_spec([1.0])) == ({},)
