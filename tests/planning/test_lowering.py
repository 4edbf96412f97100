"""What a rank executes: literal programs, early receives, whole inputs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tilings import pipeline, plan_of, plans, tile

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.actions import Compute, Instruction, Message, Op, Receive, Send
from whale_trainer.planning.schedule.lowering import lower
from whale_trainer.planning.schedule.schedule import build_schedule


def words(program: tuple[Instruction, ...]) -> str:
    """`+x` posts the receive of what action x makes, `x` computes it, `-x` sends it."""
    found = []
    for instruction in program:
        if isinstance(instruction, Compute):
            found.append(str(instruction.action))
        else:
            found.append(f"{'+' if isinstance(instruction, Receive) else '-'}{instruction.message.producer}")
    return " ".join(found)


def test_receives_are_posted_one_compute_ahead() -> None:
    schedule = build_schedule(pipeline(2, 3), 3)
    assert words(lower(schedule, 0)) == "0F0 -0F0 +1B0 0F1 -0F1 0B0 +1B1 0F2 -0F2 +1B2 0B1 0B2"
    assert words(lower(schedule, 1)) == "+0F0 1F0 +0F1 1B0 -1B0 1F1 +0F2 1B1 -1B1 1F2 1B2 -1B2"


def test_a_rank_hands_its_own_result_on_without_a_message() -> None:
    plan = plan_of(
        [tile((0, 1), (0, 2), 0), tile((1, 2), (0, 1), 0), tile((1, 2), (1, 2), 1)], micro_batches=1, global_batch=2
    )
    program = lower(build_schedule(plan, 2), 0)
    assert words(program) == "0F0 -0F0 1F0 +2B0 1B0 0B0"
    computes = [i for i in program if isinstance(i, Compute)]
    assert [[m.target_rank for m in c.outputs] for c in computes] == [[0, 1], [], [0], []]
    assert [[m.source_rank for m in c.inputs] for c in computes] == [[], [0], [], [0, 1]]
    assert computes[0].outputs[0] == computes[1].inputs[0]


def test_what_is_sent_earlier_is_received_earlier() -> None:
    """Rank 0 feeds two tiles of rank 1, and rank 1 uses in another order what rank 0 sends in turn."""
    tiles = [tile((0, 2), (0, 1), 0), tile((0, 1), (1, 2), 0), tile((1, 3), (1, 2), 1), tile((2, 3), (0, 1), 1)]
    program = lower(build_schedule(plan_of(tiles, micro_batches=2, global_batch=4, schedule="gpipe"), 4), 1)
    posted = [i.message.producer for i in program if isinstance(i, Receive)]
    sent = [
        i.message.producer
        for i in lower(build_schedule(plan_of(tiles, micro_batches=2, global_batch=4, schedule="gpipe"), 4), 0)
        if isinstance(i, Send) and i.message.op is Op.FORWARD
    ]
    assert posted == sent


def assert_whole(plan: Plan, batch_size: int, program: tuple[Instruction, ...]) -> None:
    """Inputs cover the rows of their action exactly; sends follow their compute; receives come a compute ahead."""
    computes = [i for i in program if isinstance(i, Compute)]
    for compute in computes:
        tile, op = plan.tiles[compute.action.tile], compute.action.op
        rows = plan.rows(compute.action.tile, compute.action.micro_batch, batch_size)
        at_edge = tile.layers.start == 0 if op is Op.FORWARD else tile.layers.stop == plan.num_layers
        covered = Counter(row for m in compute.inputs for row in range(*m.rows))
        assert covered == Counter([] if at_edge or op is Op.WEIGHT else range(*rows))
    before: list[Compute] = []
    posted: dict[Message, int] = {}
    for instruction in program:
        if isinstance(instruction, Compute):
            before.append(instruction)
            for message in instruction.inputs:
                assert message.is_local or posted[message] <= max(0, len(before) - 2)
        elif isinstance(instruction, Receive):
            posted[instruction.message] = len(before)
        else:
            assert not instruction.message.is_local
            assert instruction.message in before[-1].outputs
    sent = {i.message for i in program if isinstance(i, Send)}
    assert sent == {m for c in computes for m in c.outputs if not m.is_local}


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(plans(), st.data())
def test_any_tiling(plan: Plan, data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, 2 * plan.global_batch))
    schedule = build_schedule(plan, batch_size, training=data.draw(st.booleans()))
    for rank in range(plan.num_ranks):
        program = lower(schedule, rank)
        assert_whole(plan, batch_size, program)
        assert tuple(i.action for i in program if isinstance(i, Compute)) == schedule.actions_of(rank)
