"""Memory of a rank, item by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import cpu_cluster, gpt_spec, plain_spec, preset, scopes
from tilings import plan_of, tile

from whale_trainer.device_kinds import KINDS
from whale_trainer.errors import PlanError
from whale_trainer.model_spec import Bytes, Footprint, LayerMemory, ModelSpec, SplitDim
from whale_trainer.planning.costs.cost_model import ADAMW, CostModel, MemoryItems, OptimizerBytes, dim_parts, dim_shares
from whale_trainer.planning.costs.footprints import RangeMax, ShardFootprints
from whale_trainer.planning.costs.memory import (
    CONTEXT_BYTES,
    flow_of,
    in_flight,
    rank_memory,
    size,
    usable_bytes,
    with_framework,
)
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.planner import build_plan
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.shares import Interval, kv_dim, kv_part

MB = 1_000_000


SGD, MOMENTUM = OptimizerBytes(0, 0, 0, 0), OptimizerBytes(4, 0, 0, 0)


def single_rank(
    model: ModelSpec, precision: str = "32-true", optimizer: OptimizerBytes = ADAMW, *, global_batch: int = 1
) -> MemoryItems:
    """The whole model on one CPU, in one micro-batch."""
    costs = CostModel(model, PRECISIONS[precision], optimizer)
    (items,) = rank_memory(build_plan(model, cpu_cluster([1]), preset("single"), global_batch=global_batch), costs)
    return items


def state_mb(items: MemoryItems) -> float:
    return (items.parameters + items.gradients + items.optimizer_state) / MB


def million(trainable: float = 1.0) -> ModelSpec:
    spec = plain_spec([1.0, 1.0], bytes_each=4 * MB // 2)
    first, second = spec.parameters
    return replace(spec, parameters=(first, replace(second, trainable=trainable == 1.0)))


class TestN02:
    """Bytes of a parameter: which copies exist depends on precision and optimizer."""

    @pytest.mark.parametrize(
        ("precision", "optimizer", "total"),
        [("32-true", SGD, 8.0), ("32-true", MOMENTUM, 12.0), ("32-true", ADAMW, 16.0), ("64-true", ADAMW, 32.0)],
    )
    def test_of_a_million(self, precision: str, optimizer: OptimizerBytes, total: float) -> None:
        assert state_mb(single_rank(million(), precision, optimizer)) == pytest.approx(total, rel=0.01)

    def test_autocast_names_its_copy(self) -> None:
        items = single_rank(million(), "bf16-mixed")
        assert state_mb(items) == pytest.approx(16.0, rel=0.01)
        assert items.cast_copy == 2 * MB
        assert "cast copy" in dict(items.biggest(6))

    def test_autocast_keeps_a_copy_for_each_micro_batch_in_flight(self) -> None:
        strategy = preset("pipeline", schedule="gpipe", micro_batches=4, scopes=[{"layers": "*", "stages": 2}])
        plan = build_plan(million(), cpu_cluster([1, 1]), strategy, global_batch=4, precision="16-mixed")
        items = rank_memory(plan, CostModel(million(), PRECISIONS["16-mixed"]))
        assert [i.cast_copy for i in items] == [4 * MB, 4 * MB]

    def test_frozen_parameters_are_weights_only(self) -> None:
        assert state_mb(single_rank(million(trainable=0.5))) == pytest.approx(10.0, rel=0.01)

    def test_a_tied_pair_counts_once(self) -> None:
        spec = plain_spec([1.0, 1.0], bytes_each=400_000)
        tied = replace(spec.parameters[0], layers=(0, 1))
        assert state_mb(single_rank(replace(spec, parameters=(tied,)))) == pytest.approx(1.6, rel=0.01)
        assert state_mb(single_rank(spec)) == pytest.approx(3.2, rel=0.01)

    def test_the_optimizer_s_moment_of_all_or_of_the_largest(self) -> None:
        spec = plain_spec([1.0, 1.0], bytes_each=2 * MB, activation=4)
        assert single_rank(spec, optimizer=OptimizerBytes(8, 4, 4, 0)).temporary_peak == pytest.approx(4 * MB, rel=0.01)
        assert single_rank(spec, optimizer=OptimizerBytes(8, 4, 0, 12)).temporary_peak == pytest.approx(
            6 * MB, rel=0.01
        )


def unequal(wide: int) -> ModelSpec:
    """Eight layers of width 64, of which `wide` has width 1024, between an embedding and a head of 50,000 words."""
    widths = [1024 if i == wide else 64 for i in range(8)]
    sizes = [50_000 * 64, *(12 * w * w for w in widths), 50_000 * 64]
    tokens = 32
    spec = plain_spec([2.0 * tokens * s for s in sizes], activation=4 * tokens * 64)
    parameters = tuple(replace(p, shape=(s,)) for p, s in zip(spec.parameters, sizes, strict=True))
    layers = list(spec.layers)
    layers[1 + wide] = replace(layers[1 + wide], activation_bytes=34 * tokens * 1024)
    layers[-1] = replace(layers[-1], activation_bytes=2 * 4 * tokens * 50_000)
    return replace(spec, layers=tuple(layers), parameters=parameters)


class TestN03:
    """An average layer must not stand for unequal layers."""

    @staticmethod
    def planned(wide: int, speeds: Sequence[float]) -> tuple[Plan, list[MemoryItems], int]:
        """The plan, its memory, and the rank that holds the wide layer."""
        spec = unequal(wide)
        strategy = preset("pipeline", micro_batches=4, scopes=[{"layers": "*", "stages": 2}])
        plan = build_plan(spec, cpu_cluster(list(speeds)), strategy, global_batch=8)
        (holder,) = (t.ranks[0] for t in plan.tiles if t.layers.start <= 1 + wide < t.layers.stop)
        return plan, list(rank_memory(plan, CostModel(spec, PRECISIONS["32-true"]))), holder

    @pytest.mark.parametrize("speeds", [(1.0, 1.0), (2.0, 1.0)])
    def test_the_stage_of_the_wide_layer_holds_it(self, speeds: tuple[float, float]) -> None:
        plan, items, holder = self.planned(5, speeds)
        assert items[holder].total >= 12 * 1024 * 1024 * 4 * 4
        assert len(plan.tiles[0].layers) != len(plan.tiles[1].layers)

    def test_the_peak_moves_with_the_layer(self) -> None:
        plan = plan_of([tile((0, 5), (0, 2), 0), tile((5, 10), (0, 2), 1)], micro_batches=4, global_batch=8)
        for wide, holder in ((0, 0), (7, 1)):
            items = rank_memory(plan, CostModel(unequal(wide), PRECISIONS["32-true"]))
            assert max((0, 1), key=lambda rank: items[rank].total) == holder


class TestN01:
    """Activations drive the need; tests/test_memory_measured.py holds it against what is measured."""

    def planned(self, *, stages: int = 1, micro_batches: int = 1, global_batch: int = 8, **sizes: int) -> list[int]:
        spec = gpt_spec(**sizes)
        strategy = preset("pipeline", micro_batches=micro_batches, scopes=[{"layers": "*", "stages": stages}])
        plan = build_plan(spec, cpu_cluster([1.0] * stages, memory_gib=8), strategy, global_batch=global_batch)
        return [i.total for i in rank_memory(plan, CostModel(spec, PRECISIONS["32-true"]))]

    def test_it_rises_with_batch_sequence_and_layers(self) -> None:
        for rising in (
            [self.planned(global_batch=b) for b in (1, 4, 16)],
            [self.planned(context=c) for c in (16, 64, 256)],
            [self.planned(num_blocks=n) for n in (2, 8, 12)],
        ):
            assert rising == sorted(rising)
            assert rising[0] < rising[1] < rising[2]

    def test_the_first_stage_holds_more_than_the_last(self) -> None:
        first, *_, last = self.planned(stages=4, micro_batches=8, global_batch=32, num_blocks=10, vocab_size=64)
        assert first > last


def test_tied_weights_are_counted_once_on_a_rank_and_on_each_of_two() -> None:
    tied, untied = gpt_spec(tied=True), gpt_spec(tied=False)
    table = tied.parameters[0].size_bytes
    assert untied.num_parameters - tied.num_parameters == tied.parameters[0].num_elements
    cluster = cpu_cluster([1, 1])

    def parameters(spec: ModelSpec, strategy: str) -> float:
        plan = build_plan(spec, cluster, preset(strategy), global_batch=8)
        return sum(items.parameters for items in rank_memory(plan, CostModel(spec, PRECISIONS["32-true"])))

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
    items = rank_memory(plan, CostModel(spec, PRECISIONS["32-true"]))
    whole = sum(p.size_bytes for p in spec.parameters if p.cut is None)
    cut = sum(p.size_bytes for p in spec.parameters if p.cut is not None)
    assert items[0].parameters + items[1].parameters == 2 * whole + cut
    assert items[0].parameters == pytest.approx(whole + cut * 2 / 3, rel=0.01)


def test_two_tiles_on_a_rank_hold_a_shared_weight_once() -> None:
    spec = gpt_spec()
    cluster = cpu_cluster([1, 1])
    strategy = scopes({"layers": "head", "split": 2, "colocate": True}, default={"replicate": 2})
    plan = build_plan(spec, cluster, strategy, global_batch=4)
    items = rank_memory(plan, CostModel(spec, PRECISIONS["32-true"]))
    # embed holds the whole table on both ranks, so the half that head cuts from it is there already
    assert items[0].parameters == sum(p.size_bytes for p in spec.parameters)


def test_a_plan_that_does_not_fit_says_what_is_needed_and_what_there_is() -> None:
    spec = plain_spec([1.0] * 4, bytes_each=40 * MB)
    with pytest.raises(PlanError) as error:
        build_plan(spec, cpu_cluster([2, 1], memory_gib=0.1), preset("replicate"), global_batch=4)
    message = str(error.value)
    assert "rank 0 (cpu-2-0.1 on node0) needs 762.9 MiB, 102.4 MiB of its 102.4 MiB can be used" in message
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


# ---- the fast form that the search asks ----


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", ["single", "replicate", "pipeline", "split", "hybrid"])
def test_the_fast_form_tells_what_the_accounts_tell(name: str, schedule: str) -> None:
    spec = replace(gpt_spec(), batch_bytes=512.0)
    costs = CostModel(spec, PRECISIONS["16-mixed"])
    strategy = preset(name, schedule=schedule)
    plan = build_plan(spec, cpu_cluster([2, 1, 1, 1]), strategy, global_batch=16, precision="16-mixed")
    items = rank_memory(plan, costs)
    for part, flying in zip(plan.tiles, in_flight(plan), strict=True):
        for shard, rank in enumerate(part.ranks):
            told = costs.tile(part.weights).shards[shard]
            alone = items[rank].total - items[rank].bucket_buffers
            assert told.needs(*part.layers, flow_of(plan, part, flying)) == pytest.approx(alone, abs=1)
            assert told.memory(*part.layers, len(part.samples), flying, plan.micro_batches) >= alone - 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.data())
def test_the_largest_of_a_run(values: list[float], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values) - 1))
    stop = data.draw(st.integers(start + 1, len(values)))
    assert RangeMax(np.array(values)).most(start, stop) == max(values[start:stop])
    assert RangeMax(np.array(values)).most(start, start) == -inf


def test_a_tensor_between_two_layers_is_held_once() -> None:
    edge = Bytes(each=100)
    one = Footprint(kept=Bytes(each=10), kept_input=edge, kept_output=edge, output=edge, output_gradient=edge)
    held = ShardFootprints([one, one, one], {}, [0.0] * 3)
    assert held.held(0, 1, 2) == 2 * (10 + 100)  # the first layer's input is the batch
    assert held.held(0, 3, 2) == 2 * (3 * 10 + 3 * 100)
    assert held.held(1, 2, 2) == 2 * (100 + 10 + 100)


def test_framework_base_of_gpus() -> None:
    gpu = KINDS["V100-SXM2-32GB"]
    cpu = cpu_cluster([1]).devices[0].kind
    assert usable_bytes(gpu) == gpu.memory_bytes - CONTEXT_BYTES
    assert usable_bytes(cpu) == cpu.memory_bytes
    plan = build_plan(gpt_spec(), cpu_cluster([1]), preset("single"), global_batch=2)
    items = [MemoryItems(parameters=10.0)]
    name = plan.devices[0].kind
    assert with_framework(plan, items, {name: gpu})[0].total == 10 + CONTEXT_BYTES
    assert with_framework(plan, items, {name: cpu})[0].total == 10


def test_measured_free_memory_limits_what_a_plan_may_fill() -> None:
    kind = cpu_cluster([1], memory_gib=2.0).devices[0].kind
    assert usable_bytes(kind) == 2 << 30
    assert usable_bytes(kind.model_copy(update={"free_bytes": 1 << 30})) == 1 << 30
    assert usable_bytes(kind.model_copy(update={"free_bytes": 3 << 30})) == 2 << 30


def test_keys_and_values_of_grouped_heads() -> None:
    dim = SplitDim("heads", 8, 2)
    assert kv_dim(dim) == SplitDim("kv heads", 2)
    assert kv_dim(SplitDim("heads", 8, 8)) is None
    assert kv_dim(SplitDim("columns", 8)) is None
    assert [kv_part(dim, Interval(*heads)) for heads in ((0, 4), (0, 8), (4, 6), (0, 3))] == [0.5, 1, 0.5, 0.5]
    assert kv_part(dim, Interval(3, 6)) == 1.5  # one head of the first group and two of the second: each has a copy
    assert dim_parts([dim], (3, 3, 2), 1) == {dim: 3 / 8, SplitDim("kv heads", 2): 1.5}


def test_shards_that_share_a_key_head_sum_its_gradient_over_copies() -> None:
    spec = gpt_spec(num_kv_heads=2)
    plan = build_plan(spec, cpu_cluster([1, 1, 1]), preset("split"), global_batch=2)
    items = rank_memory(plan, CostModel(spec, PRECISIONS["32-true"]))
    keys = [p for p in spec.parameters if p.cut is not None and p.cut.is_kv]
    assert [i.bucket_buffers for i in items] == [0, sum(p.size_bytes for p in keys), 0]


def test_a_layer_that_was_measured_in_another_precision_counts_by_the_rough_figures() -> None:
    spec = plain_spec([1.0, 1.0])
    told = Footprint(kept=Bytes(each=5000), output=Bytes(each=25), forward=(Bytes(each=5025),))
    measured = replace(spec, layers=tuple(replace(x, memory=LayerMemory("32-true", told)) for x in spec.layers))
    assert single_rank(measured).activations > 9000 > 1000 > single_rank(spec).activations
    assert single_rank(measured, "64-true") == single_rank(spec, "64-true")


def test_a_cut_that_was_not_measured_is_guessed() -> None:
    spec = gpt_spec()
    told = Footprint(kept=Bytes(each=900), output=Bytes(each=90))
    measured = replace(spec, layers=tuple(replace(x, memory=LayerMemory("32-true", told)) for x in spec.layers))
    costs = CostModel(measured, PRECISIONS["32-true"])
    assert costs.footprint(1, (1,), 0).kept.each == 900
    assert costs.footprint(1, (1, 1), 0).kept.each == pytest.approx(900 * (1 / 3 + 1 / 3))
    assert costs.footprint(1, (1, 1), 0) is costs.footprint(2, (1, 1), 1)
