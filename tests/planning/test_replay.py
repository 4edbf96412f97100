"""Programs broken by hand, and what is said of them."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from tilings import pipeline, plan_of, tile

from whale_trainer.errors import PlanError
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.actions import Action, Compute, Instruction, Receive, Send
from whale_trainer.planning.schedule.lowering import lower
from whale_trainer.planning.schedule.replay import replay
from whale_trainer.planning.schedule.schedule import Schedule, build_schedule


def ordered(plan: Plan, order: str) -> Schedule:
    """The schedule with exactly this order, right or wrong."""
    return replace(build_schedule(plan, plan.global_batch), order=tuple(map(Action.parse, order.split())))


def programs(schedule: Schedule) -> list[tuple[Instruction, ...]]:
    return [lower(schedule, rank) for rank in range(schedule.plan.num_ranks)]


def stuck(plan: Plan, broken: list[tuple[Instruction, ...]]) -> str:
    with pytest.raises(PlanError) as error:
        replay(plan, broken)
    return str(error.value)


def text(message: str) -> str:
    return inspect.cleandoc(message)


def test_gives_what_every_rank_did() -> None:
    plan = pipeline(2, 1)
    ticks = replay(plan, dict(enumerate(programs(build_schedule(plan, 1)))))
    assert [{r: str(a) for r, a in tick.items()} for tick in ticks] == [{0: "0F0"}, {1: "1F0"}, {1: "1B0"}, {0: "0B0"}]


def test_backward_before_its_forward() -> None:
    plan = pipeline(2, 3)
    schedule = ordered(plan, "0F0 1B0 1F0 0F1 0B0 0F2 1F1 1B1 0B1 1F2 1B2 0B2")
    assert stuck(plan, programs(schedule)) == text(
        """
        the schedule cannot make progress after tick 2
          rank 0  0F0 0F1  ← waits at 0B0 for 1B0, which rank 1 has not sent
          rank 1    .   .  ← waits at 1B0, whose forward has not run
        """
    )


def test_two_ranks_wait_for_each_other() -> None:
    """Ranks 0 and 1 hold the halves of two split tiles, and come to them in another order."""
    plan = plan_of(
        [tile((0, 1), (0, 1), 0, 1), tile((0, 1), (1, 2), 0, 1), tile((0, 1), (2, 3), 2)],
        micro_batches=1,
        global_batch=3,
    )
    right = ordered(plan, "0F0 1F0 1B0 0B0 2F0 2B0")
    left = ordered(plan, "1F0 0F0 1B0 0B0 2F0 2B0")
    assert stuck(plan, [lower(right, 0), lower(left, 1), lower(right, 2)]) == text(
        """
        the schedule cannot make progress after tick 2
          rank 0    .   .  ← waits at 0F0 for rank 1, which is at 1F0
          rank 1    .   .  ← waits at 1F0 for rank 0, which is at 0F0
          rank 2  2F0 2B0
        """
    )


def test_a_partner_that_has_finished() -> None:
    plan = plan_of([tile((0, 1), (0, 1), 0, 1)], micro_batches=1, global_batch=1)
    whole, _ = programs(build_schedule(plan, 1))
    assert stuck(plan, [whole, whole[:1]]) == text(
        """
        the schedule cannot make progress after tick 1
          rank 0  0F0  ← waits at 0B0 for rank 1, which has finished
          rank 1  0F0
        """
    )


def test_a_partner_that_waits() -> None:
    """Rank 2 is at the right action, but its data never comes; nor does rank 1 go on."""
    plan = plan_of([tile((0, 1), (0, 1), 0), tile((1, 2), (0, 1), 0, 1)], micro_batches=1, global_batch=1)
    schedule = build_schedule(plan, 1)
    first, second = programs(schedule)
    late = [i for i in second if isinstance(i, Receive)]
    assert stuck(plan, [first, (*(i for i in second if not isinstance(i, Receive)), *late)]) == text(
        """
        the schedule cannot make progress after tick 1
          rank 0  0F0  ← waits at 1F0 for rank 1, which waits too
          rank 1    .  ← waits at 1F0 for 0F0 from rank 0, whose receive is not posted
        """
    )


def test_own_result_before_it_is_there() -> None:
    plan = plan_of([tile((s, s + 1), (0, 1), 0) for s in range(2)], micro_batches=1, global_batch=1)
    assert stuck(plan, programs(ordered(plan, "1F0 0F0 1B0 0B0"))) == text(
        """
        the schedule cannot make progress after tick 0
          rank 0    ← waits at 1F0 for 0F0, which has not run
        """
    )


def test_a_send_before_its_compute() -> None:
    plan = pipeline(2, 1)
    first, second = programs(build_schedule(plan, 1))
    send = [i for i in first if isinstance(i, Send)]
    broken = [(*send, *(i for i in first if not isinstance(i, Send))), second]
    assert stuck(plan, broken) == "rank 0 sends 0F0 of rank 0 for 1F0 of rank 1 before it has computed it"


def test_a_message_that_is_never_received() -> None:
    plan = pipeline(2, 1)
    first, second = programs(build_schedule(plan, 1))
    assert stuck(plan, [first, second[1:]]) == (
        "0F0 of rank 0 for 1F0 of rank 1 must be made, sent, received and used once; "
        "times found: made 1, sent 1, received 0, used 1"
    )


def test_a_message_that_is_sent_twice() -> None:
    plan = pipeline(2, 1)
    first, second = programs(build_schedule(plan, 1))
    assert stuck(plan, [(*first, *(i for i in first if isinstance(i, Send))), second]) == (
        "0F0 of rank 0 for 1F0 of rank 1 must be made, sent, received and used once; "
        "times found: made 1, sent 2, received 1, used 1"
    )


def test_the_ends_of_a_channel_disagree() -> None:
    plan = pipeline(2, 2, "gpipe")
    first, second = programs(build_schedule(plan, 2))
    receives = [i for i in second if isinstance(i, Receive)]
    broken = (*reversed(receives), *(i for i in second if not isinstance(i, Receive)))
    assert stuck(plan, [first, broken]) == (
        "ranks 0 and 1 disagree on the order of their messages: where rank 0 sends 0F0 of rank 0 for 1F0 of rank 1, "
        "rank 1 receives 0F1 of rank 0 for 1F1 of rank 1"
    )


def test_sends_that_wait_for_their_receiver_would_lock() -> None:
    """Why no send may wait: with 1F1B, neighbours send to each other before either receives."""
    plan = pipeline(2, 2)
    schedule = build_schedule(plan, 2)
    first, second = programs(schedule)
    replay(plan, [first, second])
    after_f1 = first[first.index(next(i for i in first if isinstance(i, Compute) and str(i.action) == "0F1")) + 1]
    after_b0 = second[second.index(next(i for i in second if isinstance(i, Compute) and str(i.action) == "1B0")) + 1]
    assert isinstance(after_f1, Send)
    assert isinstance(after_b0, Send)
    assert (after_f1.message.target_rank, after_b0.message.target_rank) == (1, 0)
