"""Stages in several chunks, and the choice between all schedules."""

from __future__ import annotations

import random

import pytest
from specs import cpu_cluster, gpt_spec, plain_spec, scopes

from whale_trainer.errors import ConfigError, PlanError
from whale_trainer.planning.answer import Answer
from whale_trainer.planning.plan import SCHEDULES, Plan
from whale_trainer.planning.planner import answer, build_plan
from whale_trainer.planning.schedule.replay import check
from whale_trainer.planning.schedule.schedule import build_schedule
from whale_trainer.planning.search.chunks import _equal_parts


def pieces(plan: Plan) -> list[tuple[int, int, int]]:
    """(first layer, layer after the last, rank) by tile."""
    return [(*tile.layers, tile.ranks[0]) for tile in plan.tiles]


def test_chunks_go_round_in_proportion_to_the_speeds() -> None:
    """12 equal layers on devices of speeds 2 and 1: twice 4 and 2 layers."""
    strategy = scopes({"layers": "*", "stages": 2, "chunks": 2}, micro_batches=4, schedule="interleaved")
    plan = build_plan(plain_spec([1e9] * 12), cpu_cluster([2, 1]), strategy, global_batch=4)
    assert pieces(plan) == [(0, 2, 1), (2, 6, 0), (6, 8, 1), (8, 12, 0)]


def test_chunks_back_and_forth() -> None:
    strategy = scopes(
        {"layers": "*", "stages": 2, "chunks": 2, "placement": "v"}, micro_batches=4, schedule="zero_bubble"
    )
    plan = build_plan(plain_spec([1e9] * 12), cpu_cluster([2, 1]), strategy, global_batch=4)
    assert [rank for _, _, rank in pieces(plan)] in ([0, 1, 1, 0], [1, 0, 0, 1])
    assert [b - a for a, b, rank in pieces(plan) if rank == 0] == [4, 4]


def test_interleaved_means_two_chunks_where_none_are_named() -> None:
    strategy = scopes({"layers": "*", "stages": 2}, micro_batches=4, schedule="interleaved")
    plan = build_plan(gpt_spec(), cpu_cluster([2, 2]), strategy, global_batch=8)
    assert [rank for _, _, rank in pieces(plan)] in ([0, 1, 0, 1], [1, 0, 1, 0])
    check(build_schedule(plan, plan.global_batch))


def test_parts_are_as_equal_as_whole_layers_allow() -> None:
    import numpy as np

    times = np.array([0.0, 1.0, 2.0, 5.0, 6.0, 7.0])
    assert [tuple(p) for p in _equal_parts([times, times, times])] == [(0, 2), (2, 3), (3, 5)]


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        (
            {"layers": "*", "stages": 2, "chunks": 5},
            "5 chunks of 2 stages need 10 layers, but the scope has 8 (embed, blocks.0 … blocks.5, head): "
            "at most 4 chunks",
        ),
        ({"layers": "*", "chunks": 2}, "2 chunks of one stage would all be on the same devices"),
    ],
)
def test_chunks_that_cannot_be(scope: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_plan(gpt_spec(), cpu_cluster([2, 2]), scopes(scope), global_batch=8)
    assert message in str(error.value)
    assert "strategy.scopes[0].chunks" in str(error.value)


def _answer(schedule: str, **question: object) -> Answer | None:
    hardware, model, scope, micro_batches = (question[k] for k in ("hardware", "model", "scope", "micro_batches"))
    strategy = scopes(scope, micro_batches=micro_batches, schedule=schedule, left_over="allow")  # type: ignore[arg-type]
    try:
        return answer(model, hardware, strategy, global_batch=16)  # type: ignore[arg-type]
    except PlanError:
        return None


def test_auto_is_never_worse_than_any_schedule_and_fits() -> None:
    """Random devices, memory from scarce to plenty; sometimes nothing fits."""
    draw = random.Random(0)
    chosen, refused = set(), 0
    for _ in range(12):
        memory = draw.choice([0.004, 0.006, 0.01, 1.0])
        question = {
            "hardware": cpu_cluster(
                [draw.choice([1.0, 2.0, 3.0]) for _ in range(draw.randint(2, 4))], memory_gib=memory
            ),
            "model": gpt_spec(num_blocks=draw.randint(5, 9)),
            "scope": {"layers": "*", "stages": draw.randint(2, 3)}
            if draw.random() < 0.8
            else {"layers": "*", "stages": "auto"},
            "micro_batches": draw.choice([2, 4, 8]),
        }
        try:
            fixed = [found for s in SCHEDULES if (found := _answer(s, **question)) is not None]
            best = _answer("auto", **question)
        except ConfigError:  # more stages than devices
            continue
        refused += best is None
        assert (best is None) == (not fixed)
        if best is None:
            continue
        step_s = best.plan.predicted.step_s or 0.0
        assert step_s <= min(f.plan.predicted.step_s or 0.0 for f in fixed) * (1 + 1e-9)
        assert all((d.planned_memory_bytes or 0) <= d.memory_bytes for d in best.plan.devices)
        assert Plan.from_json(best.plan.to_json()) == best.plan
        chosen.add(best.plan.schedule)
    assert len(chosen) >= 2
