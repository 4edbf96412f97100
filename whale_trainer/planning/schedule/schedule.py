"""The schedule: every forward and backward of a step in one global order, made from a plan and a batch size alone.

A schedule is a list of actions such as `2F0` (tile 2, forward, micro-batch 0) that respects every dependency. Each
rank runs its own part of the list in that order, so with sends that do not wait nothing can lock. A tile that holds no
sample of a micro-batch has no action there, on all ranks alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from whale_trainer.errors import PlanError
from whale_trainer.planning.plan import Plan, Tile
from whale_trainer.planning.schedule.actions import Action, Compute, Instruction, Message, Op, Receive, Send
from whale_trainer.planning.shares import Interval

__all__ = [
    "Action",
    "Compute",
    "Instruction",
    "Message",
    "Op",
    "Receive",
    "Schedule",
    "Send",
    "bridges_between",
    "build_schedule",
    "max_in_flight",
    "messages",
    "order_of",
    "warm_up",
    "warm_ups",
]


@dataclass(frozen=True)
class Bridge:
    """`before` ends at the layer where `after` begins, and they share samples."""

    before: int
    after: int


def bridges_of(plan: Plan) -> tuple[Bridge, ...]:
    """All bridges of a plan, by tile numbers ascending."""
    return bridges_between(plan.tiles)


def bridges_between(tiles: Sequence[Tile]) -> tuple[Bridge, ...]:
    """All bridges between these tiles, by their numbers ascending."""
    starting: dict[int, list[int]] = {}
    for index, tile in enumerate(tiles):
        starting.setdefault(tile.layers.start, []).append(index)
    sorted_by_samples = {layer: sorted(indices, key=lambda i: tiles[i].samples) for layer, indices in starting.items()}
    begins = {layer: [tiles[i].samples.start for i in indices] for layer, indices in sorted_by_samples.items()}
    found = []
    for a, before in enumerate(tiles):
        layer = before.layers.stop
        if layer not in starting:
            continue
        # tiles that begin at one layer do not overlap, so the last one that begins above is the first that can touch
        place = max(0, bisect_right(begins[layer], before.samples.start) - 1)
        for b in sorted_by_samples[layer][place:]:
            if tiles[b].samples.start >= before.samples.stop:
                break
            if len(before.samples.intersect(tiles[b].samples)):
                found.append(Bridge(a, b))
    return tuple(sorted(found, key=lambda bridge: (bridge.before, bridge.after)))


@dataclass(frozen=True)
class Schedule:
    """A linear extension of the dependencies between all actions of one pass over a batch."""

    plan: Plan
    batch_size: int
    training: bool
    order: tuple[Action, ...]

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """What `rank` runs, in its order."""
        tiles = set(self.plan.tiles_of(rank))
        return tuple(a for a in self.order if a.tile in tiles)

    @cached_property
    def bridged(self) -> tuple[Message, ...]:
        """Every message in the order in which the producers run, with those that a rank hands to itself."""
        tiles = self.plan.tiles
        rows = rows_of(self.plan, self.batch_size)
        neighbours: dict[tuple[int, Op], list[int]] = {}
        for bridge in bridges_of(self.plan):
            neighbours.setdefault((bridge.before, Op.FORWARD), []).append(bridge.after)
            neighbours.setdefault((bridge.after, Op.BACKWARD), []).append(bridge.before)
        found = []
        for action in self.order:
            source, micro_batch = action.tile, action.micro_batch
            for target in neighbours.get((source, action.op), ()):
                shared = rows[source][micro_batch].intersect(rows[target][micro_batch])
                if not len(shared):
                    continue
                for source_rank, target_rank in pair_ranks(tiles[source].ranks, tiles[target].ranks):
                    found.append(Message(source, target, micro_batch, action.op, source_rank, target_rank, shared))
        return tuple(found)


def pair_ranks(sources: Sequence[int], targets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Who sends to each rank of a tile: itself where it has the tensor already, else the senders in even turns.

    >>> pair_ranks([0, 1], [2, 3, 4, 1])
    ((0, 2), (0, 3), (1, 4), (1, 1))
    """
    p, q = len(sources), len(targets)
    return tuple((rank if rank in sources else sources[j * p // q], rank) for j, rank in enumerate(targets))


def rows_of(plan: Plan, batch_size: int) -> tuple[tuple[Interval, ...], ...]:
    """`plan.rows` of every tile and micro-batch, as a table."""
    micro_batches = plan.micro_batches_of(batch_size)
    return tuple(tuple(tile.samples.shifted(m.start).intersect(m) for m in micro_batches) for tile in plan.tiles)


def messages(schedule: Schedule) -> tuple[Message, ...]:
    """The messages that travel between two ranks, each once, in the order in which they are sent."""
    return tuple(m for m in schedule.bridged if not m.is_local)


def warm_up(plan: Plan) -> tuple[int, ...]:
    """For each tile the forwards that 1F1B runs before the first backward; also the most micro-batches in flight.

    The tiles on the longest bridge path from the tile to the loss, both ends counted: S - s on stage s of S. Neighbours
    on a path that share a rank count once: they never run at the same time, and one more micro-batch would only cost
    memory.
    """
    return warm_ups([tile.ranks for tile in plan.tiles], bridges_of(plan))


def warm_ups(ranks: Sequence[Sequence[int]], bridges: Sequence[Bridge]) -> tuple[int, ...]:
    """`warm_up` of tiles given by their ranks and bridges."""
    after: list[list[int]] = [[] for _ in ranks]
    waiting = [0] * len(ranks)
    before: list[list[int]] = [[] for _ in ranks]
    for bridge in bridges:
        after[bridge.before].append(bridge.after)
        before[bridge.after].append(bridge.before)
        waiting[bridge.before] += 1
    depth = [1] * len(ranks)
    ready = [t for t, count in enumerate(waiting) if not count]
    while ready:
        tile = ready.pop()
        depth[tile] = max((depth[t] + set(ranks[tile]).isdisjoint(ranks[t]) for t in after[tile]), default=1)
        for previous in before[tile]:
            waiting[previous] -= 1
            if not waiting[previous]:
                ready.append(previous)
    return tuple(depth)


def build_schedule(plan: Plan, batch_size: int, *, training: bool = True) -> Schedule:
    """The schedule that the plan names, for a batch of any size; evaluation runs the forwards only."""
    if batch_size < 1:
        raise PlanError(f"a batch of {batch_size} samples cannot be scheduled: it needs at least one")
    counts = [sum(len(r) > 0 for r in rows) for rows in rows_of(plan, batch_size)]
    ranks = [tile.ranks for tile in plan.tiles]
    order = order_of(ranks, bridges_of(plan), counts, plan.schedule if training else EVALUATION)
    return Schedule(plan, batch_size, training, tuple(order))


EVALUATION = "evaluation"


def order_of(
    ranks: Sequence[Sequence[int]], bridges: Sequence[Bridge], counts: Sequence[int], schedule: str
) -> list[Action]:
    """The order of a schedule for tiles given by their ranks, bridges and numbers of micro-batches.

    Nothing else decides it: not how long an action takes, nor which device a rank is.
    """
    return _ORDERS[schedule](_Work(ranks, bridges, counts))


@dataclass(frozen=True)
class _Work:
    """What is to be ordered, by tile."""

    ranks: Sequence[Sequence[int]]
    bridges: Sequence[Bridge]
    counts: Sequence[int]

    @cached_property
    def warm_up(self) -> tuple[int, ...]:
        return warm_ups(self.ranks, self.bridges)


def _passes(tile: int, op: Op, count: int) -> list[Action]:
    return [Action(tile, op, m) for m in range(count)]


def _forward_only(work: _Work) -> list[Action]:
    return _list_schedule(work, [_passes(t, Op.FORWARD, n) for t, n in enumerate(work.counts)])


def _gpipe(work: _Work) -> list[Action]:
    """All forwards, then all backwards.

    rank 0  0F0 0F1 0F2   .   . 0B0 0B1 0B2
    rank 1    . 1F0 1F1 1F2 1B0 1B1 1B2   .
    """
    backwards = [_passes(t, Op.BACKWARD, n) for t, n in enumerate(work.counts)]
    return _forward_only(work) + _list_schedule(work, backwards)


def _one_forward_one_backward(work: _Work) -> list[Action]:
    """Each tile: its warm-up, then a backward and a forward in turn, then the backwards that are left.

    rank 0  0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
    rank 1    . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
    rank 2    .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .

    The tiles' orders never contradict each other. With W a tile's warm-up, put its `F` of micro-batch m at 2m - W and
    its `B` at 2m + W - 1: every action then stands after all that it waits for (two tiles that share a rank may share a
    W; there forwards go down the layers and backwards up). So the list schedule always finds something to run.
    """
    sequences = []
    for tile, (ahead, count) in enumerate(zip(work.warm_up, work.counts, strict=True)):
        forwards, backwards = _passes(tile, Op.FORWARD, count), _passes(tile, Op.BACKWARD, count)
        ahead = min(ahead, count)
        sequence = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            sequence += [backward, forward]
        sequences.append(sequence + backwards[count - ahead :])
    return _list_schedule(work, sequences)


_ORDERS: dict[str, Callable[[_Work], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    EVALUATION: _forward_only,
}


def _list_schedule(work: _Work, sequences: Sequence[Sequence[Action]]) -> list[Action]:
    """Merge the tiles' sequences into one order by running them in unit time: backwards first, then old micro-batches.

    An action is ready when it is its tile's next and what it needs ran in an earlier tick; it takes all ranks of its
    tile for one tick. Actions outside `sequences` count as done.
    """
    depth = work.warm_up
    # actions by number: the tiles' sequences one after the other
    first = list(accumulate((len(s) for s in sequences), initial=0))
    actions = [action for sequence in sequences for action in sequence]
    missing, consumers = _dependencies(work.bridges, sequences, first)
    urgency = [(a.op is Op.FORWARD, a.micro_batch, depth[a.tile], a.tile) for a in actions]
    place = first[:-1]
    running = [t for t, s in enumerate(sequences) if s]
    order: list[int] = []
    while running:
        ready = [place[t] for t in running if not missing[place[t]]]
        ready.sort(key=urgency.__getitem__)
        busy: set[int] = set()
        started = len(order)
        for number in ready:
            tile = actions[number].tile
            ranks = work.ranks[tile]
            if busy.isdisjoint(ranks):
                busy.update(ranks)
                order.append(number)
                place[tile] += 1
                if place[tile] == first[tile + 1]:
                    running.remove(tile)
        assert len(order) > started, "the tiles' sequences contradict each other"
        for number in order[started:]:
            for consumer in consumers[number]:
                missing[consumer] -= 1
    return [actions[number] for number in order]


def _dependencies(
    bridges: Sequence[Bridge], sequences: Sequence[Sequence[Action]], first: Sequence[int]
) -> tuple[list[int], list[list[int]]]:
    """For each action how many others it takes its inputs from, and which take theirs from it."""
    places: list[dict[Op, dict[int, int]]] = []
    for tile, sequence in enumerate(sequences):
        found: dict[Op, dict[int, int]] = {Op.FORWARD: {}, Op.BACKWARD: {}}
        for i, action in enumerate(sequence, first[tile]):
            found[action.op][action.micro_batch] = i
        places.append(found)
    missing = [0] * first[-1]
    consumers: list[list[int]] = [[] for _ in range(first[-1])]
    for bridge in bridges:
        ways = ((Op.FORWARD, bridge.before, bridge.after), (Op.BACKWARD, bridge.after, bridge.before))
        for op, source, target in ways:
            wanted = places[target][op]
            for micro_batch, producer in places[source][op].items():
                consumer = wanted.get(micro_batch)
                if consumer is not None:
                    missing[consumer] += 1
                    consumers[producer].append(consumer)
    return missing, consumers


def max_in_flight(schedule: Schedule, tile: int) -> int:
    """The most micro-batches whose forward has run on the tile, and whose backward has not."""
    current = most = 0
    for action in schedule.order:
        if action.tile == tile:
            current += 1 if action.op is Op.FORWARD else -1
            most = max(most, current)
    return most
