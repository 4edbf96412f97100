"""A schedule lowered to one rank's instructions: receives posted early, computes, sends that do not wait."""

from __future__ import annotations

from collections import defaultdict

from whale_trainer.planning.schedule.schedule import Action, Compute, Instruction, Message, Receive, Schedule, Send


def lower(schedule: Schedule, rank: int) -> tuple[Instruction, ...]:
    """What `rank` executes, in order.

    Each receive is posted before the compute that precedes the one which needs it, so that the data travels meanwhile;
    with it, all that the same sender sends earlier. So messages between two ranks need no tags: both ends name them in
    the order in which they are made.
    """
    inputs: dict[Action, list[Message]] = defaultdict(list)
    outputs: dict[Action, list[Message]] = defaultdict(list)
    channels: dict[int, list[Message]] = defaultdict(list)
    for message in schedule.bridged:
        if message.source_rank == rank:
            outputs[message.producer].append(message)
        if message.target_rank == rank:
            inputs[message.consumer].append(message)
            if not message.is_local:
                channels[message.source_rank].append(message)
    actions = schedule.actions_of(rank)
    receives = _receives(actions, inputs, channels)
    program: list[Instruction] = []
    for action in actions:
        program += map(Receive, receives[action])
        program.append(Compute(action, tuple(inputs[action]), tuple(outputs[action])))
        program += [Send(m) for m in outputs[action] if not m.is_local]
    return tuple(program)


def _receives(
    actions: tuple[Action, ...], inputs: dict[Action, list[Message]], channels: dict[int, list[Message]]
) -> dict[Action, list[Message]]:
    """The receives to post before each action. `channels` holds, by source rank, all messages as they are sent."""
    receives: dict[Action, list[Message]] = defaultdict(list)
    place = {m: i for channel in channels.values() for i, m in enumerate(channel)}
    posted: dict[int, int] = defaultdict(int)
    for before, action in zip(actions[:1] + actions, actions, strict=False):
        for message in inputs[action]:
            if not message.is_local:
                source, stop = message.source_rank, place[message] + 1
                receives[before] += channels[source][posted[source] : stop]
                posted[source] = max(posted[source], stop)
    return receives
