"""The orders: for each schedule one function from tiles, bridges and numbers of micro-batches to a list of actions.

To change a schedule, change its function; to add one, write it and name it in `_ORDERS` and in `plan.SCHEDULES`.
`gpipe`, `1f1b` and `interleaved` give every tile or rank its sequence and let `_list_schedule` merge them;
`zero_bubble` and `fitted` are found by `_greedy`, which runs what is most urgent whenever its ranks are free.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import product

from whale_trainer.planning.plan import Lengths
from whale_trainer.planning.schedule.actions import Action, Op
from whale_trainer.planning.schedule.bridges import Bridge, joined, longest_paths, warm_ups

EVALUATION = "evaluation"
UNIT = (1, 1, 1)


def order_of(
    ranks: Sequence[Sequence[int]],
    bridges: Sequence[Bridge],
    counts: Sequence[int],
    schedule: str,
    lengths: Sequence[Lengths] = (),
) -> list[Action]:
    """The order of a schedule for tiles given by their ranks, bridges and numbers of micro-batches.

    Nothing else decides it: not which device a rank is, nor, but for `fitted`, how long an action takes. `lengths` are
    the whole numbers by tile that `fitted` is made for.
    """
    return _ORDERS[schedule](_Work(ranks, bridges, counts, lengths))


@dataclass(frozen=True)
class _Work:
    """What is to be ordered, by tile."""

    ranks: Sequence[Sequence[int]]
    bridges: Sequence[Bridge]
    counts: Sequence[int]
    lengths: Sequence[Lengths] = ()

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
        sequences.append(
            _in_turn(_passes(tile, Op.FORWARD, count), _passes(tile, Op.BACKWARD, count), min(ahead, count))
        )
    return _list_schedule(work, sequences)


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """The first `ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    sequence = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        sequence += [backward, forward]
    return sequence + backwards[len(forwards) - ahead :]


# --- interleaved -----------------------------------------------------------------------------------------------------


def _interleaved(work: _Work) -> list[Action]:
    """Ranks with several tiles of a pipeline: a round of micro-batches through one, then the same round through the
    next, so that filling the pipeline takes only as long as one tile does (Narayanan et al. 2021).

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
    rank 1    . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .

    Where all ranks hold equally many tiles in turns, and micro-batches fill whole rounds, this is the order of the
    paper; other tilings take what is ready, in that preference, with no more in flight on a tile than 1F1B has.
    """
    return _by_parts(work, _interleaved_part)


def _interleaved_part(work: _Work) -> list[tuple[int, Action]]:
    loop = _loop_of(work)
    if loop is None:
        return _greedy(work, None)
    tiles, size = loop
    count, chunks = work.counts[0], len(tiles) // size
    num_rounds = max(1, count // size)
    length = count // num_rounds
    sequences = []
    for place in range(size):
        own = tiles[place::size]
        rounds = [range(r * length, (r + 1) * length) for r in range(num_rounds)]
        forwards = [Action(tile, Op.FORWARD, m) for r in rounds for tile in own for m in r]
        backwards = [Action(tile, Op.BACKWARD, m) for r in rounds for tile in reversed(own) for m in r]
        # one more than the warm-up of the paper, after which a forward comes first
        ahead = (chunks - 1) * length + 2 * (size - 1 - place) + 1
        sequences.append(_in_turn(forwards, backwards, min(ahead, count * chunks)))
    return list(enumerate(_list_schedule(work, sequences)))


def _loop_of(work: _Work) -> tuple[list[int], int] | None:
    """(tiles from first to last, groups of ranks) of a pipeline that goes round several times over the same groups.

    None for another tiling, for one round only, and where micro-batches fill no whole rounds.
    """
    after: dict[int, int] = {b.before: b.after for b in work.bridges}
    first = set(range(len(work.ranks))) - set(after.values())
    if len(first) != 1 or not len(after) == len(work.bridges) == len(work.ranks) - 1:
        return None
    tiles = [first.pop()]
    while tiles[-1] in after:
        tiles.append(after[tiles[-1]])
    groups = list(dict.fromkeys(tuple(work.ranks[t]) for t in tiles))
    size, count = len(groups), work.counts[0]
    is_loop = (
        len(tiles) == len(work.ranks)
        and len(set(work.counts)) == 1
        and len(tiles) % size == 0
        and len(tiles) > size > 1
        and all(tuple(work.ranks[t]) == groups[i % size] for i, t in enumerate(tiles))
        and sum(map(len, groups)) == len({rank for group in groups for rank in group})
    )
    return (tiles, size) if is_loop and count and count % max(1, count // size) == 0 else None


# --- zero bubble -----------------------------------------------------------------------------------------------------


def _zero_bubble(work: _Work) -> list[Action]:
    """1F1B whose backward is in two parts: `I` for the gradients that the tile before waits for, and `W` for those of
    the weights, which fill what would be idle time (Qi et al. 2023, ZB-H1).

    rank 0  0F0 0F1 0F2   .   . 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1    . 1F0 1F1   . 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2    .   . 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Micro-batches whose weights' gradients wait count as in flight; no tile has more of both than there are tiles on
    its longest path, as the first tile has under 1F1B.
    """
    return _by_parts(replace(work, lengths=()), _best_greedy)


def _fitted(work: _Work) -> list[Action]:
    """As `zero_bubble`, with the true lengths of the tiles' actions in place of equal ones."""
    return _by_parts(work, _best_greedy)


def _best_greedy(work: _Work) -> list[tuple[int, Action]]:
    """The rule of preference that is through first for these lengths; the earlier one of equals."""
    found = [_greedy(work, Rule(*switches)) for switches in product((True, False), repeat=len(fields(Rule)))]
    return min(found, key=lambda order: _length(work, order))


def _length(work: _Work, order: Sequence[tuple[int, Action]]) -> int:
    return max((start + _duration(work, action) for start, action in order), default=0)


def _duration(work: _Work, action: Action) -> int:
    forward, inputs, weights = work.lengths[action.tile] if work.lengths else UNIT
    return {Op.FORWARD: forward, Op.INPUT: inputs, Op.WEIGHT: weights, Op.BACKWARD: inputs + weights}[action.op]


@dataclass(frozen=True)
class Rule:
    """What a rank prefers where several actions are ready."""

    eager: bool = False
    """Forwards before backwards, as far as a tile's warm-up allows."""
    patient: bool = False
    """Gradients of weights do not begin where a backward will be ready before they are half done."""
    late: bool = False
    """Forwards of the tiles that are nearest to the loss come first."""


def _greedy(work: _Work, rule: Rule | None) -> list[tuple[int, Action]]:
    """(start, action) by start: whenever ranks are free, the most urgent action that is ready; without a rule for split
    backwards, whole ones.

    Backwards and forwards, as far as a tile's warm-up allows, then the gradients of weights.

    It never locks, whatever tiles share: of the oldest micro-batch that is not through, either the next forward can
    run, since all older ones have left that tile, or the next backward can, or what fills the tile is gradients of
    weights, which wait for nothing.
    """
    return _Greedy(work, rule).run()


class _Greedy:
    """Where a part of a plan is, in whole units of time."""

    def __init__(self, work: _Work, rule: Rule | None) -> None:
        self._work = work
        self._rule = rule or Rule()
        self._back = Op.INPUT if rule else Op.BACKWARD
        self._ops = (Op.FORWARD, Op.INPUT, Op.WEIGHT) if rule else (Op.FORWARD, Op.BACKWARD)
        num = len(work.ranks)
        self._begun = {op: [0] * num for op in self._ops}
        self._held = longest_paths(work.ranks, work.bridges)
        self._sources: dict[tuple[Op, int], list[int]] = defaultdict(list)
        for bridge in work.bridges:
            self._sources[Op.FORWARD, bridge.after].append(bridge.before)
            self._sources[self._back, bridge.before].append(bridge.after)
        self._over: dict[Action, int] = {}
        """By action that has begun, its end."""
        self._free: dict[int, int] = defaultdict(int)
        """By rank."""
        most = max(Counter(rank for members in work.ranks for rank in members).values(), default=1)
        self._round = max(1, -(-max(work.warm_up, default=1) // most))

    def run(self) -> list[tuple[int, Action]]:
        order: list[tuple[int, Action]] = []
        total = sum(self._work.counts) * len(self._ops)
        events, now = [0], 0
        while len(order) < total:
            for action in sorted(self._ready(now), key=self._urgency):
                ranks = self._work.ranks[action.tile]
                if any(self._free[rank] > now for rank in ranks) or not self._may_begin(action):
                    continue
                end = now + _duration(self._work, action)
                self._over[action] = end
                self._begun[action.op][action.tile] += 1
                self._free.update(dict.fromkeys(ranks, end))
                order.append((now, action))
                heapq.heappush(events, end)
            while events and events[0] <= now:
                heapq.heappop(events)
            if len(order) < total:
                now = events[0]
        return order

    def _ready(self, now: int) -> list[Action]:
        """Each tile's next actions whose inputs are there."""
        return [a for a in self._next() if self._ready_at(a, now) <= now]

    def _next(self) -> Iterable[Action]:
        for op in self._ops:
            for tile, begun in enumerate(self._begun[op]):
                if begun < self._work.counts[tile]:
                    yield Action(tile, op, begun)

    def _ready_at(self, action: Action, now: int) -> int:
        """When the action has its inputs; later than any time where some have not begun."""
        never = now + (1 << 60)
        tile, op, micro_batch = action.tile, action.op, action.micro_batch
        if op is Op.WEIGHT:
            return self._over.get(Action(tile, Op.INPUT, micro_batch), never)
        at = 0 if op is Op.FORWARD else self._over.get(Action(tile, Op.FORWARD, micro_batch), never)
        for source in self._sources[op, tile]:
            if micro_batch < self._work.counts[source]:
                at = max(at, self._over.get(Action(source, op, micro_batch), never))
        return at

    def _may_begin(self, action: Action) -> bool:
        begun, tile = self._begun, action.tile
        if action.op is Op.FORWARD:
            ahead = begun[Op.FORWARD][tile] - begun[self._back][tile]
            held = begun[Op.FORWARD][tile] - begun[self._ops[-1]][tile]
            return ahead < self._work.warm_up[tile] and held < max(self._held[tile], self._work.warm_up[tile])
        if action.op is Op.WEIGHT and self._rule.patient:
            now = max(
                self._over[Action(tile, Op.INPUT, action.micro_batch)], *(self._free[r] for r in self._ranks(tile))
            )
            half = now + (_duration(self._work, action) + 1) // 2
            ranks = set(self._ranks(tile))
            return not any(
                now < self._ready_at(a, now) < half
                for a in self._next()
                if a.op is self._back and not ranks.isdisjoint(self._ranks(a.tile))
            )
        return True

    def _ranks(self, tile: int) -> Sequence[int]:
        return self._work.ranks[tile]

    def _urgency(self, action: Action) -> tuple[int, ...]:
        """Less is first."""
        depth, number = self._work.warm_up[action.tile], action.micro_batch // self._round
        if action.op is Op.FORWARD:
            return (
                -self._rule.eager or 1,
                *((depth, number) if self._rule.late else (number, -depth)),
                action.micro_batch,
                action.tile,
            )
        return (0 if action.op is self._back else 2, number, depth, action.micro_batch, action.tile)


# --- merging ---------------------------------------------------------------------------------------------------------


def _by_parts(work: _Work, order: Callable[[_Work], list[tuple[int, Action]]]) -> list[Action]:
    """The orders of the parts that know nothing of each other, merged by the actions' starts."""
    merged: list[tuple[int, int, Action]] = []
    for tiles in joined(work.ranks, work.bridges):
        place = {tile: i for i, tile in enumerate(tiles)}
        names: dict[int, int] = {}
        ranks = tuple(tuple(names.setdefault(r, len(names)) for r in work.ranks[t]) for t in tiles)
        bridges = tuple(Bridge(place[b.before], place[b.after]) for b in work.bridges if b.before in place)
        counts = tuple(work.counts[t] for t in tiles)
        lengths = tuple(work.lengths[t] for t in tiles) if work.lengths else ()
        found = _part_order(order, ranks, bridges, counts, lengths)
        merged += [(start, i, replace(a, tile=tiles[a.tile])) for i, (start, a) in enumerate(found)]
    merged.sort(key=lambda entry: entry[:2])
    return [action for _, _, action in merged]


@lru_cache(maxsize=4096)
def _part_order(
    order: Callable[[_Work], list[tuple[int, Action]]],
    ranks: tuple[tuple[int, ...], ...],
    bridges: tuple[Bridge, ...],
    counts: tuple[int, ...],
    lengths: tuple[Lengths, ...],
) -> tuple[tuple[int, Action], ...]:
    """Replicas are alike, and a plan is asked for its order many times."""
    return tuple(order(_Work(ranks, bridges, counts, lengths)))


def _list_schedule(work: _Work, sequences: Sequence[Sequence[Action]]) -> list[Action]:
    """Merge sequences into one order by running them in unit time: backwards first, then old micro-batches.

    An action is ready when it is the next of its sequence and what it needs ran in an earlier tick; it takes all ranks
    of its tile for one tick. Actions outside `sequences` count as done.
    """
    depth = work.warm_up
    # actions by number: the sequences one after the other
    actions = [action for sequence in sequences for action in sequence]
    ends: list[int] = []
    place: list[int] = []
    for sequence in sequences:
        place.append(ends[-1] if ends else 0)
        ends.append(place[-1] + len(sequence))
    missing, consumers = _dependencies(work.bridges, actions)
    urgency = [(a.op is Op.FORWARD, a.micro_batch, depth[a.tile], a.tile) for a in actions]
    running = [i for i, s in enumerate(sequences) if s]
    order: list[int] = []
    while running:
        ready = [(urgency[place[i]], i) for i in running if not missing[place[i]]]
        ready.sort()
        busy: set[int] = set()
        started = len(order)
        for _, i in ready:
            number = place[i]
            ranks = work.ranks[actions[number].tile]
            if busy.isdisjoint(ranks):
                busy.update(ranks)
                order.append(number)
                place[i] += 1
                if place[i] == ends[i]:
                    running.remove(i)
        assert len(order) > started, "the sequences contradict each other"
        for number in order[started:]:
            for consumer in consumers[number]:
                missing[consumer] -= 1
    return [actions[number] for number in order]


def _dependencies(bridges: Sequence[Bridge], actions: Sequence[Action]) -> tuple[list[int], list[list[int]]]:
    """For each action how many others it takes its inputs from, and which take theirs from it."""
    places: dict[tuple[int, Op], dict[int, int]] = defaultdict(dict)
    for number, action in enumerate(actions):
        places[action.tile, action.op][action.micro_batch] = number
    missing = [0] * len(actions)
    consumers: list[list[int]] = [[] for _ in actions]
    for bridge in bridges:
        ways = ((Op.FORWARD, bridge.before, bridge.after), (Op.BACKWARD, bridge.after, bridge.before))
        for op, source, target in ways:
            wanted = places[target, op]
            for micro_batch, producer in places[source, op].items():
                consumer = wanted.get(micro_batch)
                if consumer is not None:
                    missing[consumer] += 1
                    consumers[producer].append(consumer)
    return missing, consumers


_ORDERS: dict[str, Callable[[_Work], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "fitted": _fitted,
    EVALUATION: _forward_only,
}
