"""Orders of actions: literal pictures, bounds, and what must hold for any tiling and batch size."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilings import grid_plan, irregular, is_grid, is_guillotine, pipeline, plan_of, plans, tile

from whale_trainer.errors import PlanError
from whale_trainer.planning.plan import SCHEDULES, SPLIT_SCHEDULES, Plan
from whale_trainer.planning.schedule.bridges import longest_paths
from whale_trainer.planning.schedule.orders import _ORDERS
from whale_trainer.planning.schedule.replay import check, draw
from whale_trainer.planning.schedule.schedule import (
    Action,
    Message,
    Op,
    Schedule,
    bridges_of,
    build_schedule,
    held_by,
    max_in_flight,
    messages,
    warm_up,
)
from whale_trainer.planning.shares import Interval

F, B = Op.FORWARD, Op.BACKWARD


def picture(text: str) -> str:
    return inspect.cleandoc(text)


def assert_sound(schedule: Schedule) -> None:
    """The actions that the plan asks for, each once, each after all that it needs."""
    plan = schedule.plan
    back = Op.INPUT if plan.schedule in SPLIT_SCHEDULES else B
    ops = ((F, Op.INPUT, Op.WEIGHT) if back is Op.INPUT else (F, B)) if schedule.training else (F,)
    rows = {
        (t, m): plan.rows(t, m, schedule.batch_size)
        for t in range(len(plan.tiles))
        for m in range(len(plan.micro_batches_of(schedule.batch_size)))
    }
    place = {action: i for i, action in enumerate(schedule.order)}
    assert len(place) == len(schedule.order)
    assert set(place) == {Action(t, op, m) for (t, m), r in rows.items() for op in ops if len(r)}
    if schedule.training:
        for first, second in pairwise(ops):
            assert all(place[Action(t, first, m)] < place[Action(t, second, m)] for (t, m), r in rows.items() if len(r))
    for (a, m), rows_before in rows.items():
        for b, after in enumerate(plan.tiles):
            if plan.tiles[a].layers.stop == after.layers.start and len(rows_before.intersect(rows[b, m])):
                assert place[Action(a, F, m)] < place[Action(b, F, m)]
                if schedule.training:
                    assert place[Action(b, back, m)] < place[Action(a, back, m)]


def channels_of(schedule: Schedule) -> set[tuple[int, int]]:
    return {(m.source_rank, m.target_rank) for m in messages(schedule)}


def test_actions_print_and_parse() -> None:
    assert str(Action(2, F, 0)) == "2F0"
    for action in (Action(2, F, 0), Action(0, B, 13), Action(117, Op.INPUT, 40), Action(3, Op.WEIGHT, 1)):
        assert Action.parse(str(action)) == action
    assert sorted([Action(1, F, 0), Action(0, F, 1), Action(0, B, 2)])[0].tile == 0


@pytest.mark.parametrize("text", ["", "2f0", "F0", "2F", "2F0 ", "2FB0", "-1F0", "1F²"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action: write tile, F, B, I or W, micro-batch, such as 2F0"):
        Action.parse(text)


def test_gpipe_on_a_pipeline() -> None:
    assert draw(build_schedule(pipeline(3, 4, "gpipe"), 4)) == picture(
        """
        rank 0  0F0 0F1 0F2 0F3   .   .   .   . 0B0 0B1 0B2 0B3
        rank 1    . 1F0 1F1 1F2 1F3   .   . 1B0 1B1 1B2 1B3   .
        rank 2    .   . 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3   .   .
        """
    )


def test_1f1b_on_a_pipeline() -> None:
    assert draw(build_schedule(pipeline(3, 4), 4)) == picture(
        """
        rank 0  0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
        rank 1    . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
        rank 2    .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .
        """
    )


def test_zero_bubble_on_a_pipeline() -> None:
    """As long as the work of a rank and the forwards that fill the pipeline: (3 M + S - 1) ticks."""
    assert draw(build_schedule(pipeline(3, 4, "zero_bubble"), 4)) == picture(
        """
        rank 0  0F0 0F1 0F2   .   . 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1    . 1F0 1F1   . 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2    .   . 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """
    )


def test_interleaved_in_rounds() -> None:
    assert draw(build_schedule(replace(loop(2, 2, 4), schedule="interleaved"), 4)) == picture(
        """
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
        rank 1    . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .
        """
    )


def test_zero_bubble_back_and_forth() -> None:
    """The first rank also has the last tile, as in ZB-V."""
    plan = plan_of(
        [tile((s, s + 1), (0, 1), rank) for s, rank in enumerate((0, 1, 1, 0))],
        micro_batches=4,
        global_batch=4,
        schedule="zero_bubble",
    )
    assert draw(build_schedule(plan, 4)) == picture(
        """
        rank 0  0F0 0F1 0F2 3F0 3I0 3F1 3I1 0I0 3W0 3F2 3I2 0I1 3W1 0I2 0W0 0F3 0W1 3W2 3F3 3I3 3W3 0W2 0I3 0W3   .
        rank 1    . 1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 2I1 1I1 2I2 1I2 1W0 2W0 1W1 1F3 2F3 2W1 1W2 2I3 1I3 2W2 1W3 2W3
        """
    )


def test_fitted_follows_the_lengths_of_actions() -> None:
    """With a last stage three times as long, its rank is never idle from its first action to its last."""
    plan = replace(pipeline(2, 4, "fitted"), lengths=((1, 1, 1), (3, 3, 3)))
    assert draw(build_schedule(plan, 4)) == picture(
        """
        rank 0  0F0 0F1   . 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        rank 1    . 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
        """
    )
    assert build_schedule(plan, 4) == build_schedule(Plan.from_json(plan.to_json()), 4)
    assert plan.fingerprint != replace(plan, lengths=((1, 1, 1), (3, 3, 2))).fingerprint


def test_fewer_micro_batches_than_stages() -> None:
    assert draw(build_schedule(pipeline(3, 2), 2)) == picture(
        """
        rank 0  0F0 0F1   .   .   . 0B0   . 0B1
        rank 1    . 1F0 1F1   . 1B0   . 1B1   .
        rank 2    .   . 2F0 2B0 2F1 2B1   .   .
        """
    )


def test_evaluation_runs_the_forwards_of_a_batch_of_any_size() -> None:
    for name in SCHEDULES:
        assert draw(build_schedule(pipeline(3, 2, name), 5, training=False)) == picture(
            """
            rank 0  0F0 0F1 0F2 0F3 0F4   .   .
            rank 1    . 1F0 1F1 1F2 1F3 1F4   .
            rank 2    .   . 2F0 2F1 2F2 2F3 2F4
            """
        )


def test_irregular_tiling_with_a_split_tile() -> None:
    assert draw(build_schedule(irregular(), 128)) == picture(
        """
        rank 0  0F0 0F1   . 0B0 0F2 0B1 0F3 0B2   . 0B3
        rank 1  0F0 0F1   . 0B0 0F2 0B1 0F3 0B2   . 0B3
        rank 2  1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3
        rank 3    . 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3   .
        rank 4    . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .
        """
    )


def test_tiles_without_a_sample_of_a_short_micro_batch_have_no_action_there() -> None:
    """Batch of 50: the second micro-batch has rows 32-50, which end before the tiles of ranks 2 and 3 begin."""
    assert draw(build_schedule(irregular(), 50)) == picture(
        """
        rank 0  0F0 0F1   . 0B0   . 0B1
        rank 1  0F0 0F1   . 0B0   . 0B1
        rank 2  1F0   .   . 1B0   .   .
        rank 3    . 3F0 3B0   .   .   .
        rank 4    . 2F0 2B0 2F1 2B1   .
        """
    )


def loop(size: int, chunks: int, micro_batches: int) -> Plan:
    """A pipeline that goes `chunks` times over the same ranks."""
    tiles = [tile((s, s + 1), (0, 1), s % size) for s in range(size * chunks)]
    return plan_of(tiles, micro_batches=micro_batches, global_batch=micro_batches)


def test_interleaved_stages_share_a_rank() -> None:
    plan = loop(2, 2, 4)
    assert warm_up(plan) == (4, 3, 2, 1)
    assert draw(build_schedule(plan, 4)) == picture(
        """
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3   . 2F2 0B0 2B1   . 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1    . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3F2 3B2 1F3 1B1 3F3 3B3 1B2 1B3   .
        """
    )


def test_a_classifier_split_over_the_devices_of_its_backbone_needs_one_micro_batch_in_flight() -> None:
    tiles = [tile((0, 3), (0, 8), 0), tile((0, 3), (8, 16), 1), tile((3, 4), (0, 16), 0, 1)]
    plan = plan_of(tiles, micro_batches=3, global_batch=48)
    assert warm_up(plan) == (1, 1, 1)
    assert draw(build_schedule(plan, 40)) == picture(
        """
        rank 0  0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1 0F2 2F2 2B2 0B2
        rank 1  1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1   . 2F2 2B2   .
        """
    )


def test_one_rank_with_all_stages_holds_one_micro_batch() -> None:
    plan = plan_of([tile((s, s + 1), (0, 1), 0) for s in range(2)], micro_batches=2, global_batch=2)
    assert draw(build_schedule(plan, 2)) == "rank 0  0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def test_docstrings_show_what_is_built() -> None:
    for name, micro_batches, stages in (("gpipe", 3, 2), ("1f1b", 4, 3), ("zero_bubble", 4, 3), ("interleaved", 4, 2)):
        plan = replace(loop(2, 2, 4), schedule=name) if name == "interleaved" else pipeline(stages, micro_batches, name)
        drawn = draw(build_schedule(plan, micro_batches))
        assert drawn in inspect.getdoc(_ORDERS[name])  # type: ignore[operator]
    assert set(_ORDERS) == {*SCHEDULES, "evaluation"}


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(PlanError, match="a batch of 0 samples cannot be scheduled"):
        build_schedule(pipeline(2, 2), 0)


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_straight_pipelines(stages: int, micro_batches: int) -> None:
    """All schedules replay, in the least time; 1F1B holds at most S - s micro-batches on stage s, GPipe all; with split
    backwards never more than S with those that wait."""
    for name in SCHEDULES:
        schedule = build_schedule(pipeline(stages, micro_batches, name), micro_batches)
        assert_sound(schedule)
        if name in SPLIT_SCHEDULES:
            fill = max(stages - 1, 3 * stages - 3 - 2 * (micro_batches - 1)) if micro_batches < stages else stages - 1
            assert len(check(schedule)) <= 3 * micro_batches + fill
            assert all(sum(held) <= stages for s in range(stages) for held in held_by(schedule, s))
        else:
            assert len(check(schedule)) == 2 * (micro_batches + stages - 1)
        bounds = [micro_batches if name == "gpipe" else stages - s for s in range(stages)]
        assert [max_in_flight(schedule, s) for s in range(stages)] == [min(b, micro_batches) for b in bounds]


GRIDS = {
    "DP 3:1": grid_plan([3, 1], [2], 1, 3),
    "DP x PP": grid_plan([3, 2], [2, 1, 1], 1, 3),
    "TP x PP": grid_plan([2], [1, 3], 3, 4),
    "DP x TP": grid_plan([1, 3], [2], 2, 2),
    "DP x TP x PP": grid_plan([2, 1], [1, 2, 1], 2, 3),
    "the design's": replace(irregular(), micro_batches=3, global_batch=96),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_batch_size(grid: str, name: str) -> None:
    plan = replace(GRIDS[grid], schedule=name)
    for batch_size in range(1, 2 * plan.global_batch + 1):
        for training in (True, False):
            schedule = build_schedule(plan, batch_size, training=training)
            assert_sound(schedule)
            check(schedule)


def test_random_tilings() -> None:
    """Any tiling, any batch size: sound, replays, within 1F1B's bound, over channels of a full batch only."""
    seen: Counter[str] = Counter()
    schedules: set[str] = set()

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(plans(), st.data())
    def run(plan: Plan, data: st.DataObject) -> None:
        sizes = {
            1,
            plan.global_batch,
            *data.draw(st.sets(st.integers(1, 2 * plan.global_batch), min_size=2, max_size=3)),
        }
        channels = channels_of(build_schedule(plan, plan.global_batch))
        for batch_size in sizes:
            schedule = build_schedule(plan, batch_size)
            assert_sound(schedule)
            check(schedule)
            assert channels_of(schedule) <= channels
            if plan.schedule != "gpipe":
                assert all(max_in_flight(schedule, t) <= w for t, w in enumerate(warm_up(plan)))
            if plan.schedule in SPLIT_SCHEDULES:
                most = longest_paths([t.ranks for t in plan.tiles], bridges_of(plan))
                assert all(sum(held) <= most[t] for t in range(len(plan.tiles)) for held in held_by(schedule, t))
        evaluation = build_schedule(plan, max(sizes), training=False)
        assert_sound(evaluation)
        check(evaluation)
        seen.update(
            plans=1,
            no_grid=not is_grid(plan),
            no_guillotine=not is_guillotine(plan.tiles),
            two_tiles=any(len(plan.tiles_of(r)) > 1 for r in range(plan.num_ranks)),
            other_degree=len({len(t.shards) for t in plan.tiles}) > 1,
        )
        schedules.add(plan.schedule)

    run()
    assert seen["plans"] >= 300
    assert seen["no_grid"] >= 100
    assert seen["no_guillotine"] >= 30
    assert seen["two_tiles"] >= 100
    assert seen["other_degree"] >= 80
    assert schedules == set(SCHEDULES)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("1f1b", "gpipe")])
def test_a_short_batch_holds_no_more_than_a_whole_one(name: str) -> None:
    for plan in (replace(loop(2, 2, 6), schedule=name), replace(loop(4, 2, 8), schedule=name), irregular(name)):
        whole = build_schedule(plan, plan.global_batch)
        for size in range(1, plan.global_batch):
            short = build_schedule(plan, size)
            for t in range(len(plan.tiles)):
                assert max(map(sum, held_by(short, t)), default=0) <= max(map(sum, held_by(whole, t)))


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(plans())
def test_1f1b_takes_hardly_longer_than_gpipe(plan: Plan) -> None:
    ticks = [len(check(build_schedule(replace(plan, schedule=s), plan.global_batch))) for s in ("1f1b", "gpipe")]
    assert ticks[0] <= 1.25 * ticks[1] + 1


def test_schedules_are_equal_wherever_they_are_made() -> None:
    plan = irregular()
    assert build_schedule(plan, 100) == build_schedule(Plan.from_json(plan.to_json()), 100)


def test_messages_carry_what_both_tiles_hold() -> None:
    """Tile 0 (ranks 0, 1; samples 0-20) ends where tile 2 (rank 4) begins; tile 1 (rank 2) where tile 3 (rank 3)."""
    found = messages(build_schedule(irregular(), 32))
    assert found == (
        Message(0, 2, 0, F, 0, 4, Interval(0, 20)),
        Message(1, 3, 0, F, 2, 3, Interval(20, 32)),
        Message(2, 0, 0, B, 4, 0, Interval(0, 20)),
        Message(2, 0, 0, B, 4, 1, Interval(0, 20)),
        Message(3, 1, 0, B, 3, 2, Interval(20, 32)),
    )
    assert str(found[0]) == "0F0 of rank 0 for 2F0 of rank 4"


def test_messages_cross_uneven_sample_cuts() -> None:
    """Shares 3:1 before the bridge, 1:3 after it; the second micro-batch of a batch of 6 has 2 samples."""
    tiles = [tile((0, 1), (0, 3), 0), tile((0, 1), (3, 4), 1), tile((1, 2), (0, 1), 2), tile((1, 2), (1, 4), 3)]
    plan = plan_of(tiles, micro_batches=2, global_batch=8)
    forward = [m for m in messages(build_schedule(plan, 6)) if m.op is F]
    assert [(m.source_rank, m.target_rank, *m.rows) for m in forward] == [
        (0, 2, 0, 1),
        (0, 3, 1, 3),
        (1, 3, 3, 4),
        (0, 2, 4, 5),
        (0, 3, 5, 6),
    ]


def test_split_groups_of_another_degree() -> None:
    """2 ranks to 3: senders in even turns; a rank of both groups takes its own copy."""
    tiles = [tile((0, 1), (0, 1), 0, 1), tile((1, 2), (0, 1), 2, 3, 4)]
    pairs = [
        (m.op, m.source_rank, m.target_rank)
        for m in messages(build_schedule(plan_of(tiles, micro_batches=1, global_batch=1), 1))
    ]
    assert pairs == [(F, 0, 2), (F, 0, 3), (F, 1, 4), (B, 2, 0), (B, 3, 1)]
    tiles = [tile((0, 1), (0, 1), 0, 1), tile((1, 2), (0, 1), 1, 2, 3)]
    schedule = build_schedule(plan_of(tiles, micro_batches=1, global_batch=1), 1)
    assert [(m.op, m.source_rank, m.target_rank) for m in schedule.bridged] == [
        (F, 1, 1), (F, 0, 2), (F, 1, 3), (B, 1, 0), (B, 1, 1),
    ]  # fmt: skip
    assert [m for m in schedule.bridged if m.is_local] == [m for m in schedule.bridged if m not in messages(schedule)]
