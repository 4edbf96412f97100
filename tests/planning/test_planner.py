"""From scopes to tiles: worked examples, brute force, invariants, and every refusal with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specs import cpu_cluster, gpt_spec, module_spec, plain_spec, preset, scopes

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.errors import ConfigError, PlanError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.costs.memory import CONTEXT_BYTES, rank_memory
from whale_trainer.planning.plan import Plan, Shard, Tile
from whale_trainer.planning.planner import answer, build_plan
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.shares import Interval, cut_units
from whale_trainer.planning.simulation.plan_times import PlanTimes
from whale_trainer.planning.simulation.simulate import simulate
from whale_trainer.planning.simulation.times import TimeModel
from whale_trainer.planning.strategy import PRESETS, StrategySpec, load_strategy

CONF = Path(__file__).parents[2] / "conf"
BIG = gpt_spec(width=1024, num_blocks=10, num_heads=16, vocab_size=8192, context=512)
"""A model whose compute rules."""


def cluster(name: str) -> Cluster:
    return load_cluster(yaml.safe_load((CONF / "cluster" / f"{name}.yaml").read_text()))


def tiles(plan: Plan) -> list[tuple[tuple[int, int], tuple[int, int], tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(t.layers), tuple(t.samples), t.ranks, t.weights) for t in plan.tiles]


def shares(plan: Plan) -> list[int]:
    return [len(t.samples) for t in plan.tiles]


# ---- what the presets give ----


def test_replicate_gives_samples_in_proportion_to_speed() -> None:
    plan = build_plan(gpt_spec(), cluster("v100_p100"), preset("replicate"), global_batch=32)
    assert shares(plan) == [5, 5, 5, 5, 3, 3, 3, 3]
    assert plan.is_replicated_only
    assert [d.kind for d in plan.devices] == ["V100-SXM2-32GB"] * 4 + ["P100-PCIE-16GB"] * 4


def test_split_gives_shards_in_proportion_to_speed() -> None:
    plan = build_plan(gpt_spec(), cpu_cluster([5, 3]), preset("split"), global_batch=4)
    assert tiles(plan) == [((0, 8), (0, 4), (0, 1), (5, 3))]
    equal = build_plan(gpt_spec(), cpu_cluster([3, 3]), preset("split"), global_batch=4)
    assert equal.tiles[0].weights == (1, 1)


def test_pipeline_gives_layers_in_proportion_to_speed() -> None:
    strategy = preset("pipeline", scopes=[{"layers": "*", "stages": 2}])
    plan = build_plan(plain_spec([1.0] * 5), cpu_cluster([3, 2]), strategy, global_batch=4)
    assert sorted(len(t.layers) for t in plan.tiles) == [2, 3]
    by_rank = {t.ranks[0]: len(t.layers) for t in plan.tiles}
    assert by_rank == {0: 3, 1: 2}


def test_hybrid_on_the_papers_test_bed_has_all_three_cuts() -> None:
    plan = build_plan(gpt_spec(), cluster("v100_p100"), preset("hybrid"), global_batch=32)
    assert plan.num_ranks == 8
    assert len({t.samples for t in plan.tiles}) == 2
    assert len({t.layers for t in plan.tiles}) >= 2
    for tile in plan.tiles:
        assert len(tile.shards) == 2
        assert len({plan.devices[r].node for r in tile.ranks}) == 1


def test_single_takes_the_fastest_device() -> None:
    plan = build_plan(gpt_spec(), cluster("a100_h100"), preset("single"), global_batch=8)
    assert [d.kind for d in plan.devices] == ["H100-SXM5-80GB"]
    assert len(plan.left_out) == 15
    assert plan.left_out[0] == "A100-SXM4-80GB on ampere"
    assert any("1 of 16 devices are used" in note for note in plan.notes)


def test_even_takes_all_devices_as_equal() -> None:
    plan = build_plan(gpt_spec(), cluster("v100_p100"), preset("replicate", balance="even"), global_batch=32)
    assert shares(plan) == [4] * 8
    split = build_plan(gpt_spec(), cpu_cluster([5, 3]), preset("split", balance="even"), global_batch=4)
    assert split.tiles[0].weights == (1, 1)


@pytest.mark.parametrize("name", ["replicate", "split", "pipeline", "hybrid", "auto"])
def test_hardware_is_never_behind_a_base_line(name: str) -> None:
    predicted = answer(BIG, cluster("v100_p100"), preset(name), global_batch=32).plan.predicted
    assert predicted.step_s is not None
    for other in (predicted.even_step_s, predicted.whale_step_s):
        assert other is None or predicted.step_s <= other * (1 + 1e-9)
    if name == "replicate":
        assert predicted.even_step_s is not None
        assert predicted.even_step_s / predicted.step_s > 1.09  # the sum of gradients takes as long in both


def test_auto_takes_what_no_preset_beats() -> None:
    auto = answer(BIG, cluster("v100_p100"), preset("auto", micro_batches="auto"), global_batch=64)
    for name in PRESETS:
        other = answer(BIG, cluster("v100_p100"), preset(name), global_batch=64).plan.predicted.step_s
        assert other is not None
        assert auto.timeline.step_s <= other * 1.01


def test_auto_cuts_what_does_not_fit_whole() -> None:
    model = gpt_spec(width=384, num_blocks=12, vocab_size=8192)
    plan = build_plan(model, cpu_cluster([1, 1, 1, 1], memory_gib=0.2), preset("auto"), global_batch=8)
    assert not plan.is_replicated_only


def test_auto_refuses_with_the_plan_that_is_nearest_to_fitting() -> None:
    with pytest.raises(PlanError, match="no plan of this model fits on this cluster"):
        build_plan(gpt_spec(width=384), cpu_cluster([1], memory_gib=0.01), load_strategy({}), global_batch=8)


def test_a_module_without_layers_may_only_be_replicated() -> None:
    plan = build_plan(module_spec(), cpu_cluster([2, 1]), preset("replicate"), global_batch=6)
    assert shares(plan) == [4, 2]
    assert build_plan(module_spec(), cpu_cluster([2, 1]), preset("auto"), global_batch=6).is_replicated_only
    with pytest.raises(ConfigError) as error:
        build_plan(module_spec(), cpu_cluster([1] * 4), preset("hybrid"), global_batch=8)
    assert [p.path for p in error.value.problems] == ["strategy.scopes[0].stages", "strategy.scopes[0].split"]
    assert "it can only be replicated: use strategy=replicate" in error.value.problems[0].message


# ---- scopes ----


def test_scopes_with_devices_of_their_own() -> None:
    strategy = scopes(
        {"layers": ["embed", "blocks.[0-2]"], "devices": "V100-32", "replicate": "auto"},
        {"layers": ["blocks.[3-5]", "head"], "devices": ["pascal"], "split": 2, "replicate": "auto"},
        micro_batches=4,
    )
    plan = build_plan(gpt_spec(), cluster("v100_p100"), strategy, global_batch=40)
    front = [t for t in plan.tiles if t.layers.start == 0]
    back = [t for t in plan.tiles if t.layers.start == 4]
    assert {r for t in front for r in t.ranks} == {0, 1, 2, 3}
    assert {r for t in back for r in t.ranks} == {4, 5, 6, 7}
    assert [len(t.samples) for t in front] == [3, 3, 2, 2]
    assert [len(t.samples) for t in back] == [5, 5]


def test_scopes_share_devices_by_their_work() -> None:
    model = plain_spec([1.0, 1.0, 6.0])
    strategy = scopes({"layers": "layer.[01]", "replicate": "auto"}, {"layers": "layer.2", "replicate": "auto"})
    plan = build_plan(model, cpu_cluster([1, 1, 1, 1]), strategy, global_batch=12)
    counts = [sum(t.layers.start == start for t in plan.tiles) for start in (0, 2)]
    assert counts == [1, 3]


def test_the_heavier_scope_gets_the_faster_device() -> None:
    model = plain_spec([1.0, 6.0])
    plan = build_plan(model, cpu_cluster([6, 1]), scopes({"layers": "layer.0"}, {"layers": "layer.1"}), global_batch=2)
    assert tiles(plan) == [((0, 1), (0, 2), (1,), (1,)), ((1, 2), (0, 2), (0,), (1,))]


def test_colocated_scope_shares_the_devices_of_default() -> None:
    strategy = scopes(
        {"name": "classifier", "layers": "head", "split": "auto", "colocate": True}, default={"replicate": "auto"}
    )
    plan = build_plan(gpt_spec(), cpu_cluster([2, 2, 1]), strategy, global_batch=10)
    assert [plan.tiles_of(rank) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    assert plan.tiles[3].weights == (2, 2, 1)
    assert shares(plan) == [4, 4, 2, 10]


def test_default_may_stand_on_both_sides_of_a_scope() -> None:
    strategy = scopes({"layers": "blocks.*", "replicate": 2}, default={"split": 2})
    plan = build_plan(gpt_spec(), cpu_cluster([1] * 4), strategy, global_batch=4)
    ends = [t for t in plan.tiles if len(t.layers) == 1]
    assert [t.layers.start for t in ends] == [0, 7]
    assert ends[0].ranks == ends[1].ranks


def test_a_tensor_group_over_two_nodes_is_named() -> None:
    plan = build_plan(gpt_spec(), cpu_cluster([1], [1]), preset("split"), global_batch=4)
    assert any("A tensor group of 2 spans the nodes node0, node1" in note for note in plan.notes)


def test_groups_stay_inside_nodes_when_they_can() -> None:
    hardware = cpu_cluster([1, 1, 1], [1, 1, 1])
    plan = build_plan(gpt_spec(), hardware, preset("hybrid"), global_batch=32)
    assert all(len({plan.devices[r].node for r in t.ranks}) == 1 for t in plan.tiles)
    assert len(plan.left_out) == 2
    refusing = preset("hybrid", left_over="refuse", scopes=[{"layers": "*", "replicate": "auto", "split": 2}])
    filled = build_plan(gpt_spec(), hardware, refusing, global_batch=32)
    assert filled.num_ranks == 6


def test_auto_leaves_out_a_device_that_would_only_slow_the_run_down() -> None:
    plan = build_plan(gpt_spec(), cpu_cluster([100, 100, 1]), preset("replicate"), global_batch=8)
    assert shares(plan) == [4, 4]
    assert plan.left_out == ("cpu-1-1 on node0",)
    stages = build_plan(gpt_spec(), cpu_cluster([100, 100, 1]), preset("pipeline"), global_batch=8)
    assert stages.num_ranks == 2


def test_auto_makes_no_more_replicas_than_samples_nor_stages_than_layers_nor_shards_than_units() -> None:
    hardware = cpu_cluster([1] * 9)
    assert build_plan(gpt_spec(), hardware, preset("replicate"), global_batch=3).num_ranks == 3
    assert build_plan(plain_spec([1e9] * 3), hardware, preset("pipeline"), global_batch=64).num_ranks == 3
    assert build_plan(gpt_spec(), hardware, preset("split"), global_batch=3).num_ranks == 6


def test_kv_heads_may_be_fewer_than_shards() -> None:
    plan = build_plan(gpt_spec(num_kv_heads=1), cpu_cluster([2, 1]), preset("split"), global_batch=3)
    assert plan.tiles[0].weights == (2, 1)


def test_several_degrees_may_be_left_to_the_planner() -> None:
    strategy = scopes({"layers": "*", "replicate": "auto", "split": "auto"})
    roomy = build_plan(gpt_spec(), cpu_cluster([1] * 4), strategy, global_batch=8)
    assert roomy.is_replicated_only
    few = build_plan(gpt_spec(), cpu_cluster([1] * 4), strategy, global_batch=2)
    assert [len(t.shards) for t in few.tiles] == [2, 2]
    assert any("auto became replicate 2, split 2" in note for note in few.notes)


# ---- memory ----


def test_samples_move_to_where_memory_is() -> None:
    model = plain_spec([1.0] * 2, activation=1 << 20)
    hardware = cpu_cluster([4, 1], memory_gib=[3 / 1024, 1.0])
    plan = build_plan(model, hardware, preset("replicate"), global_batch=10)
    assert shares(plan) == [1, 9]


def test_shards_move_to_where_memory_is() -> None:
    model = gpt_spec(width=192, num_blocks=12)
    wide = build_plan(model, cpu_cluster([2, 1]), preset("split"), global_batch=1)
    assert wide.tiles[0].weights == (2, 1)
    tight = build_plan(model, cpu_cluster([2, 1], memory_gib=[0.06, 1.0]), preset("split"), global_batch=1)
    assert tight.tiles[0].weights[0] < tight.tiles[0].weights[1]


def test_layers_move_to_where_memory_is() -> None:
    model = plain_spec([1.0] * 8, bytes_each=1 << 20)
    strategy = preset("pipeline", scopes=[{"layers": "*", "stages": 2}])
    plan = build_plan(model, cpu_cluster([1, 1], memory_gib=[12.5 / 1024, 1.0]), strategy, global_batch=4)
    assert {t.ranks[0]: len(t.layers) for t in plan.tiles} == {0: 2, 1: 6}


def test_a_colocated_scope_gets_what_the_other_leaves() -> None:
    model = gpt_spec(width=192, vocab_size=4096, tied=False)
    strategy = scopes({"layers": "head", "split": "auto", "colocate": True}, default={"replicate": 2})
    tight = cpu_cluster([2, 2], memory_gib=[0.095, 1.0])
    plan = build_plan(model, tight, strategy, global_batch=8)
    assert plan.tiles[-1].ranks == (0, 1)
    assert plan.tiles[-1].weights[0] < plan.tiles[-1].weights[1]


def test_planned_memory_is_that_of_the_accounts() -> None:
    for name in PRESETS:
        plan = build_plan(gpt_spec(), cluster("v100_p100"), preset(name), global_batch=32)
        items = rank_memory(plan, CostModel(gpt_spec(), PRECISIONS["32-true"]))
        assert [d.planned_memory_bytes for d in plan.devices] == [i.total + CONTEXT_BYTES for i in items]


# ---- brute force ----


def seconds_of(model: ModelSpec, hardware: Cluster, plan: Plan) -> float:
    return simulate(plan, PlanTimes(plan, TimeModel(CostModel(model, PRECISIONS["32-true"]), hardware))).step_s


def every_grid(plan: Plan, groups: list[tuple[int, ...]], replicas: int, stages: int) -> Iterator[Plan]:
    """Plans with these degrees: all assignments of groups of ranks to (replica, stage), all cuts, all sample shares."""
    kinds = [tuple(plan.devices[r].kind for r in group) for group in groups]
    seen = set()
    for order in permutations(range(len(groups))):
        like = tuple(kinds[i] for i in order)
        if like in seen:
            continue
        seen.add(like)
        all_cuts = list(combinations(range(1, plan.num_layers), stages - 1))
        for inner in combinations(range(1, plan.micro_batch_size), replicas - 1):
            rows = list(pairwise((0, *inner, plan.micro_batch_size)))
            for cuts in product(all_cuts, repeat=replicas):
                made = [
                    Tile(Interval(*layers), Interval(*rows[r]), tuple(map(Shard, groups[order[r * stages + s]])))
                    for r in range(replicas)
                    for s, layers in enumerate(pairwise((0, *cuts[r], plan.num_layers)))
                ]
                yield replace(plan, tiles=tuple(made))


def test_hybrid_is_as_good_as_brute_force() -> None:
    model, hardware = gpt_spec(width=512, num_blocks=4, num_heads=8, context=512), cluster("v100_p100")
    plan = build_plan(model, hardware, preset("hybrid"), global_batch=20)
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    best = min(seconds_of(model, hardware, other) for other in every_grid(plan, pairs, 2, 2))
    assert seconds_of(model, hardware, plan) <= best * 1.01


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([1e8, 2e8, 5e8, 9e8]), min_size=4, max_size=5),
    st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]),
    st.integers(4, 7),
)
def test_any_grid_is_as_good_as_brute_force(flops: list[float], degrees: tuple[int, int], height: int) -> None:
    replicas, stages = degrees
    speeds = [1.0, 3.0, 3.0, 7.0][: replicas * stages]
    model, hardware = plain_spec(flops), cpu_cluster(speeds)
    strategy = scopes({"layers": "*", "replicate": replicas, "stages": stages}, micro_batches=4)
    plan = build_plan(model, hardware, strategy, global_batch=4 * height)
    groups = [(rank,) for rank in range(replicas * stages)]
    best = min(seconds_of(model, hardware, other) for other in every_grid(plan, groups, replicas, stages))
    # a pipeline with as few micro-batches as stages depends on more than its slowest stage and their sum: up to 9 %
    # behind was found
    assert seconds_of(model, hardware, plan) <= best * (1.1 if stages > 1 else 1.01)


# ---- what holds for every plan ----


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, 9.0]), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from(sorted([*PRESETS, "auto"])),
    st.sampled_from([1, 4, 5]),
    st.integers(1, 24),
    st.sampled_from([1.0, 0.02, 0.008]),
)
def test_every_plan_is_whole_or_refused(
    speeds: list[list[float]], name: str, num_blocks: int, global_batch: int, memory_gib: float
) -> None:
    model = gpt_spec(num_blocks=num_blocks, num_kv_heads=3)
    hardware = cpu_cluster(*speeds, memory_gib=memory_gib)
    try:
        plan = build_plan(model, hardware, preset(name), global_batch=global_batch)
    except (ConfigError, PlanError) as error:
        assert len(str(error)) > 40  # noqa: PT017 - either outcome is right
        return
    assert {r for t in plan.tiles for r in t.ranks} == set(range(plan.num_ranks))
    assert plan.num_ranks + len(plan.left_out) == len(hardware.devices)
    for tile in plan.tiles:
        for dim in model.split_dims(*tile.layers):
            assert min(len(part) for part in cut_units(dim, tile.weights)) >= 1
    assert all(d.planned_memory_bytes is not None and d.planned_memory_bytes <= d.memory_bytes for d in plan.devices)
    assert plan == build_plan(model, hardware, preset(name), global_batch=global_batch)
    assert Plan.from_json(plan.to_json(model)) == plan


@settings(max_examples=20)
@given(st.integers(1, 30), st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=5))
def test_a_faster_device_never_gets_fewer_samples(global_batch: int, speeds: list[float]) -> None:
    plan = build_plan(gpt_spec(), cpu_cluster(speeds), preset("replicate"), global_batch=global_batch)
    parts = {d.kind: len(t.samples) for t in plan.tiles for d in (plan.devices[t.ranks[0]],)}
    ordered = [parts[kind] for kind in sorted(parts, key=lambda k: float(k.split("-")[1]))]
    assert ordered == sorted(ordered)


def test_plans_of_large_clusters_are_quick_and_whole() -> None:
    model = gpt_spec(num_blocks=48, num_heads=12, width=192)
    plan = build_plan(model, cluster("v100_512"), preset("hybrid"), global_batch=1024)
    assert plan.num_ranks == 512
    assert len(plan.tiles) == 256
    stages = build_plan(model, cluster("v100_512"), preset("pipeline", micro_batches=64), global_batch=64)
    assert len(stages.tiles) > 16


# ---- refusals ----


def refused(
    strategy: StrategySpec, model: ModelSpec | None = None, hardware: Cluster | None = None, **options: Any
) -> tuple[str, str]:
    """Path and message of the one problem that the planner finds."""
    options = {"global_batch": 32, **options}
    with pytest.raises(ConfigError) as error:
        build_plan(model or gpt_spec(), hardware or cpu_cluster([1] * 4), strategy, **options)
    (problem,) = error.value.problems
    return problem.path, problem.message


def test_a_scope_that_matches_nothing() -> None:
    assert refused(scopes({"layers": "block.9"}, default={})) == (
        "strategy.scopes[0].layers",
        "'block.9' matches no layer (did you mean blocks.5?): the model has embed, blocks.0 … blocks.5, head",
    )


def test_a_pattern_of_modules_inside_layers() -> None:
    path, message = refused(scopes({"layers": "blocks.*.attention", "split": 2}, default={}))
    assert path == "strategy.scopes[0].layers"
    assert "names modules inside layers (blocks.0.attention, blocks.1.attention … " in message


def test_a_layer_in_two_scopes() -> None:
    path, message = refused(scopes({"layers": "*"}, {"layers": ["head", "embed"], "split": 2}))
    assert path == "strategy.scopes[1].layers"
    assert message.startswith(
        "embed, head would be in scopes[0] (*) and scopes[1] (head, embed): a layer belongs to one"
    )


def test_a_layer_in_no_scope() -> None:
    path, message = refused(scopes({"layers": "blocks.*"}))
    assert path == "strategy.default"
    assert "layers embed, head are in no scope" in message
    assert "strategy.default={replicate: auto}" in message


def test_all_problems_with_scopes_at_once() -> None:
    strategy = scopes({"layers": ["hed", "blocks.*"]}, {"layers": ["blocks.0", "embde"]})
    with pytest.raises(ConfigError) as error:
        build_plan(gpt_spec(), cpu_cluster([1, 1]), strategy, global_batch=4)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("degrees", "devices", "message"),
    [
        ({"replicate": 2, "split": 2}, 3, "replicate 2 x split 2 needs 4 devices, the cluster declares 3"),
        ({"replicate": "auto", "stages": 2, "split": 2}, 1, "needs at least 4 devices, the cluster declares 1"),
        ({"replicate": 3}, 4, "replicate 3 uses 3 of 4 devices, 1 would be left over"),
        ({"replicate": "auto", "split": 3}, 4, "replicate auto x split 3 uses 3 of 4 devices, 1 would be left over"),
        ({}, 2, "replicate 1 uses 1 of 2 devices, 1 would be left over"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_devices(degrees: dict[str, Any], devices: int, message: str) -> None:
    path, text = refused(scopes({"layers": "*", **degrees}), hardware=cpu_cluster([1] * devices))
    assert path == "strategy.scopes[0]"
    assert message in text
    assert "lower a degree, or declare more devices" in text or "strategy.left_over=allow" in text


def test_left_over_devices_may_be_allowed() -> None:
    plan = build_plan(
        gpt_spec(),
        cpu_cluster([1, 2, 2, 2]),
        scopes({"layers": "*", "replicate": 3}, left_over="allow"),
        global_batch=3,
    )
    assert [d.kind for d in plan.devices] == ["cpu-2-1"] * 3
    assert plan.left_out == ("cpu-1-1 on node0",)


def test_several_scopes_that_need_too_many_devices() -> None:
    path, message = refused(scopes({"layers": "head", "split": 4}, default={"replicate": 2}))
    assert path == "strategy.scopes"
    assert "replicate 2 + split 4 needs 6 devices, the cluster declares 4 (node0: 4 x cpu-1-1)" in message


def test_more_devices_than_a_named_kind_has() -> None:
    strategy = scopes({"layers": "*", "replicate": 8, "devices": "pascal"})
    path, message = refused(strategy, hardware=cluster("v100_p100"))
    assert path == "strategy.scopes[0]"
    assert "needs 8 devices, the cluster declares 8" in message
    assert "4 of them for this scope" in message


def test_devices_that_do_not_exist() -> None:
    with pytest.raises(ConfigError) as error:
        build_plan(
            gpt_spec(),
            cluster("v100_p100"),
            scopes({"layers": "*", "replicate": "auto", "devices": ["voltas", "A100-80"]}),
            global_batch=32,
        )
    first, second = error.value.problems
    assert first.path == second.path == "strategy.scopes[0].devices"
    assert first.message.startswith("'voltas' is no node or device kind of the cluster; did you mean volta?")
    assert "'A100-80' is no node or device kind of the cluster; " in second.message
    assert "pascal, volta, V100-SXM2-32GB, P100-PCIE-16GB" in second.message


def test_more_shards_than_heads() -> None:
    strategy = scopes({"layers": "*", "split": 8})
    path, message = refused(strategy, hardware=cpu_cluster([1] * 8))
    assert path == "strategy.scopes[0].split"
    assert message == "8 shards, but blocks.0 has 6 heads: at most 6 shards"


def test_shards_of_layers_that_cannot_be_cut() -> None:
    path, message = refused(scopes({"layers": "*", "split": 2}), plain_spec([1.0] * 3), cpu_cluster([1, 1]))
    assert path == "strategy.scopes[0].split"
    assert "no layer of layer.0, layer.1, layer.2 declares a dim that may be cut (tensor_split)" in message


def test_more_stages_than_layers() -> None:
    path, message = refused(scopes({"layers": "head", "stages": 2}, default={"replicate": 2}))
    assert path == "strategy.scopes[0].stages"
    assert message == "2 stages, but the scope has 1 layer (head): at most 1 stage"


def test_stages_over_layers_that_do_not_follow_each_other() -> None:
    path, message = refused(scopes({"layers": "blocks.*", "replicate": 2}, default={"stages": 2}))
    assert path == "strategy.default.stages"
    assert "2 stages need consecutive layers" in message


@pytest.mark.parametrize(
    ("strategy", "global_batch", "message"),
    [
        (
            preset("hybrid"),
            3,
            "3 samples are fewer than 4 micro-batches, each of which needs at least one: use global_batch=4",
        ),
        (
            scopes({"layers": "*", "replicate": 4}, micro_batches=3),
            11,
            "11 samples are fewer than 3 micro-batches x 4 replicas = 12, each of which needs at least one: "
            "use global_batch=12 or more, or strategy.micro_batches=2 or less",
        ),
        (preset("replicate"), 0, "0 is not a number of samples"),
        (preset("replicate"), 3.5, "3.5 is not a number of samples"),
        (preset("replicate"), True, "True is not a number of samples"),
    ],
)
def test_batches_that_are_too_small(strategy: StrategySpec, global_batch: int, message: str) -> None:
    path, text = refused(strategy, global_batch=global_batch)
    assert path == "global_batch"
    assert text.startswith(message)


def test_an_unknown_precision() -> None:
    path, message = refused(preset("replicate"), precision="bf16-mix")
    assert path == "trainer.precision"
    assert message.startswith("'bf16-mix' is no precision; did you mean bf16-mixed?")


def test_a_cluster_that_is_not_filled_in() -> None:
    path, _ = refused(preset("replicate"), hardware=load_cluster({"nodes": "auto"}))
    assert path == "cluster.nodes"


# ---- field cases ----


class TestG01:
    """bf16 asked for on cards that have no bf16: decided from the declared hardware, the weakest device rules."""

    def test_volta_and_pascal(self) -> None:
        path, message = refused(preset("replicate"), hardware=cluster("v100_p100"), precision="bf16-mixed")
        assert path == "trainer.precision"
        assert "bf16-mixed needs bf16, which is not legal on 4 x V100-SXM2-32GB, 4 x P100-PCIE-16GB" in message
        assert "(compute capability 6.0, 7.0, bf16 needs 8.0)" in message
        assert "use 32-true or 64-true or 16-mixed," in message

    def test_one_old_card_rules_for_all(self) -> None:
        mixed = load_cluster({"nodes": [{"name": "box", "devices": {"A100-80": 1, "V100-32": 1}}]})
        _, message = refused(preset("replicate"), hardware=mixed, precision="bf16-mixed")
        assert "not legal on 1 x V100-SXM2-32GB in box (compute capability 7.0" in message

    def test_a_card_that_the_plan_does_not_use_does_not_count(self) -> None:
        mixed = load_cluster({"nodes": [{"name": "box", "devices": {"V100-32": 1, "A100-80": 1}}]})
        plan = build_plan(gpt_spec(), mixed, preset("single"), global_batch=4, precision="bf16-mixed")
        assert [d.kind for d in plan.devices] == ["A100-SXM4-80GB"]

    def test_fp16_is_legal_on_pascal(self) -> None:
        plan = build_plan(gpt_spec(), cluster("v100_p100"), preset("replicate"), global_batch=64, precision="16-mixed")
        assert shares(plan)[0] > 3 * shares(plan)[-1]  # tensor cores


class TestN04:
    """A plan that cannot run: whole shares, at least one each, or a refusal with a reason."""

    @pytest.mark.parametrize("name", ["replicate", "split", "pipeline", "hybrid"])
    @pytest.mark.parametrize("speeds", [[1, 1], [5, 3, 2], [9, 1], [1] * 5, [1] * 7])
    @pytest.mark.parametrize("num_blocks", [1, 2, 3])
    def test_divisibility(self, name: str, speeds: list[float], num_blocks: int) -> None:
        model = gpt_spec(width=12, num_blocks=num_blocks, num_heads=6, num_kv_heads=3, vocab_size=11, context=8)
        try:
            plan = build_plan(model, cpu_cluster(speeds), preset(name), global_batch=12)
        except (ConfigError, PlanError) as error:
            assert name == "hybrid" and len(speeds) < 4, error  # noqa: PT017, PT018
            return
        assert all(len(t.samples) >= 1 and len(t.layers) >= 1 for t in plan.tiles)

    def test_tiny_memory_on_one_device(self) -> None:
        model = gpt_spec()
        plan = build_plan(model, cpu_cluster([1, 1], memory_gib=[0.001, 1.0]), preset("replicate"), global_batch=4)
        assert shares(plan) == [4]
        with pytest.raises(PlanError, match="does not fit"):
            build_plan(model, cpu_cluster([1, 1], memory_gib=0.001), preset("replicate"), global_batch=4)


def test_the_stage_with_the_widest_layer_is_accounted_for_with_it() -> None:
    """N03: an average layer must not stand for unequal ones."""
    spec = plain_spec([1.0] * 8, bytes_each=1 << 16)
    strategy = preset("pipeline", scopes=[{"layers": "*", "stages": 2}])
    for wide in (5, 1):
        parameters = tuple(replace(p, shape=(1 << 22,)) if i == wide else p for i, p in enumerate(spec.parameters))
        plan = build_plan(replace(spec, parameters=parameters), cpu_cluster([1, 1]), strategy, global_batch=4)
        (tile,) = (t for t in plan.tiles if t.layers.start <= wide < t.layers.stop)
        planned = [d.planned_memory_bytes or 0 for d in plan.devices]
        assert planned[tile.ranks[0]] == max(planned)
        assert max(planned) >= (1 << 24) * 4


# ---- the search's limits ----


def test_a_limit_gives_the_best_so_far_and_says_so() -> None:
    hardware = cluster("v100_p100")
    free = answer(BIG, hardware, preset("auto", micro_batches="auto"), global_batch=64)
    few = answer(BIG, hardware, preset("auto", micro_batches="auto", max_candidates=2), global_batch=64)
    assert few.num_simulated <= 2 < free.num_simulated
    assert few.timeline.step_s >= free.timeline.step_s
    note = "The search stopped after 2 plans (strategy.max_candidates): this is the best so far."
    assert note in few.plan.notes
    assert not any("stopped" in n for n in free.plan.notes)


def test_n05_repeated_layers_cost_little_and_plans_are_kept() -> None:
    """Planning does not grow with the number of equal blocks as such, and gives the same plan again."""
    spent = {}
    for blocks in (12, 48, 96):
        model = gpt_spec(width=1024, num_blocks=blocks, num_heads=16, vocab_size=8192, context=512)
        found = answer(model, cluster("v100_p100_16"), preset("auto", micro_batches="auto"), global_batch=128)
        spent[blocks] = found.search_s
        again = answer(model, cluster("v100_p100_16"), preset("auto", micro_batches="auto"), global_batch=128)
        assert again.plan == found.plan
    assert spent[96] < 60
    assert spent[96] < 4 * max(spent[48], 0.1)
