"""Plays a plan's schedule against the times of devices and links: how long a step takes, and where the time goes.

The same order of actions that the executor runs, with its semantics: a rank computes one action at a time, a split tile
waits for all its ranks, a transfer starts when its producer ends and waits for nothing but the links that it shares, a
gradient sum starts when all its holders have the gradient, beside the backward passes that are left. All ranks meet at
the end of their sums, and then step their optimizers.

Tiles that neither bridges nor ranks join (replicas) play on their own; those with equal times are played once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from whale_trainer.planning.plan import SPLIT_SCHEDULES, Lengths, Plan
from whale_trainer.planning.schedule.actions import Action, Op
from whale_trainer.planning.schedule.bridges import Bridge, bridges_between, joined
from whale_trainer.planning.schedule.orders import order_of
from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline


@dataclass(frozen=True)
class Crossing:
    """What it takes to bring a micro-batch's activations, or their gradients, over a bridge."""

    busy_s: float
    """For which the links are taken."""
    latency_s: float = 0.0
    links: tuple[Hashable, ...] = ()
    """What is shared with other transfers: ports of devices and nodes, by direction."""
    num_bytes: float = 0.0


@dataclass(frozen=True)
class GradientSum:
    """One bucket: the gradients of some layers, summed over the tiles that hold them."""

    tiles: tuple[int, ...]
    layer: int
    """The earliest of its layers; when the last backward pass has left it, the bucket is full."""
    seconds: float
    num_bytes: float = 0.0
    label: str = "gradient sum"


class Times(Protocol):
    """The seconds that a simulation asks for."""

    def pass_s(self, tile: int, samples: int) -> tuple[float, float]:
        """(forward, backward) of a tile for `samples` samples, its collectives included."""
        ...

    def weight_part(self, tile: int) -> float:
        """The part of a tile's backward pass, from 0 to 1, that is gradients of weights which can wait; asked for where
        the schedule splits backward passes."""
        ...

    def backward_part(self, tile: int, layer: int) -> float:
        """The part of a tile's backward pass after which the gradients of `layer` are there, from 0 to 1."""
        ...

    def crossing(self, bridge: Bridge, op: Op, samples: int) -> Crossing | None:
        """What a bridge costs; None where the same ranks hold both sides."""
        ...

    def sums(self) -> Sequence[GradientSum]:
        """All gradient sums, in the order in which the ranks start them."""
        ...

    def optimizer_s(self, tile: int) -> float:
        """Of the slowest rank of a tile, for all that the rank holds."""
        ...

    def sums_overlap(self, tile: int) -> bool:
        """Whether sums of the tile's gradients run beside its last backward pass."""
        ...


@dataclass(frozen=True)
class Engine:
    """How an engine differs from ours, for comparing with measurements of others."""

    blocking: bool = False
    """Sends and receives take the time of both ranks."""


OURS = Engine()


@dataclass
class Played:
    """When the actions of one part run. Times by action, in the order of the program."""

    program: Program
    starts: list[float]
    stops: list[float]
    transfers: list[tuple[int, int, float, float]] = field(default_factory=list)
    """(crossing, producer's action, start, stop)."""
    last: dict[int, int] = field(default_factory=dict)
    """By tile of the part, its last action."""

    def last_pass(self, tile: int) -> tuple[float, float]:
        """(start, stop) of the action that leaves the tile's gradients whole."""
        return self.starts[self.last[tile]], self.stops[self.last[tile]]


@dataclass(frozen=True, eq=False)
class Program:
    """The order of one part, compiled: what each action takes its time from, what it waits for, what it starts."""

    actions: tuple[Action, ...]
    """With tiles counted within the part."""
    ops: tuple[int, ...]
    """Of each action, the place of its op among all."""
    lanes: tuple[tuple[int, ...], ...]
    """For each tile, the sets of ranks that it occupies, by number."""
    num_lanes: int
    outputs: tuple[tuple[tuple[int, int], ...], ...]
    """For each action (crossing, consumer's place) of what it sends."""
    crossings: tuple[tuple[int, Op], ...]
    """(bridge, direction) by number."""


@lru_cache(maxsize=4096)
def compiled(
    ranks: tuple[tuple[int, ...], ...],
    bridges: tuple[Bridge, ...],
    counts: tuple[int, ...],
    schedule: str,
    lengths: tuple[Lengths, ...] = (),
) -> Program:
    """The program of a part; `ranks` and `counts` by tile. Structure only, so that many plans share it."""
    actions = tuple(order_of(ranks, bridges, counts, schedule, lengths))
    place = {action: i for i, action in enumerate(actions)}
    back = Op.INPUT if schedule in SPLIT_SCHEDULES else Op.BACKWARD
    holders: dict[int, tuple[int, ...]] = {}
    for tile, members in enumerate(ranks):
        for rank in members:
            holders[rank] = (*holders.get(rank, ()), tile)
    numbers = {held: i for i, held in enumerate(dict.fromkeys(holders.values()))}
    lanes = tuple(tuple(sorted({numbers[holders[r]] for r in members})) for members in ranks)
    crossings: dict[tuple[int, Op], int] = {}
    outputs: list[list[tuple[int, int]]] = [[] for _ in actions]
    for index, bridge in enumerate(bridges):
        for op, source, target in (
            (Op.FORWARD, bridge.before, bridge.after),
            (back, bridge.after, bridge.before),
        ):
            number = crossings.setdefault((index, op), len(crossings))
            for micro_batch in range(min(counts[source], counts[target])):
                producer = place[Action(source, op, micro_batch)]
                outputs[producer].append((number, place[Action(target, op, micro_batch)]))
    numbered = {op: i for i, op in enumerate(Op)}
    return Program(
        actions,
        tuple(numbered[a.op] for a in actions),
        lanes,
        len(numbers),
        tuple(map(tuple, outputs)),
        tuple(crossings),
    )


def play(
    program: Program,
    durations: Sequence[Sequence[float]],
    crossings: Sequence[Crossing | None],
    engine: Engine = OURS,
) -> Played:
    """Run a part: `durations` by tile and op, `crossings` as in `program.crossings`."""
    free = [0.0] * program.num_lanes
    arrived = [0.0] * len(program.actions)
    owed: list[list[float]] = [[] for _ in program.actions] if engine.blocking else []
    taken: dict[Hashable, float] = {}
    starts, stops = [], []
    transfers = []
    for index, action in enumerate(program.actions):
        lanes = program.lanes[action.tile]
        start = arrived[index]
        for lane in lanes:
            if free[lane] > start:
                start = free[lane]
        if engine.blocking:
            start += sum(owed[index])
        stop = start + durations[action.tile][program.ops[index]]
        starts.append(start)
        stops.append(stop)
        busy_until = stop
        for number, consumer in program.outputs[index]:
            crossing = crossings[number]
            begin = stop
            if crossing is None:
                arrival = stop
            elif engine.blocking:
                seconds = crossing.busy_s + crossing.latency_s
                transfers.append((number, index, busy_until, busy_until + seconds))
                arrival = busy_until
                busy_until += seconds
                owed[consumer].append(seconds)
            else:
                for link in crossing.links:
                    begin = max(begin, taken.get(link, 0.0))
                end = begin + crossing.busy_s
                for link in crossing.links:
                    taken[link] = end
                arrival = end + crossing.latency_s
                transfers.append((number, index, begin, arrival))
            if arrival > arrived[consumer]:
                arrived[consumer] = arrival
        for lane in lanes:
            free[lane] = busy_until
    last = {action.tile: i for i, action in enumerate(program.actions)}
    return Played(program, starts, stops, transfers, last)


@dataclass
class Alike:
    """Parts that play alike: one play, and the plan's tiles of each of them."""

    played: Played
    crossings: Sequence[Crossing | None]
    bridges: tuple[Bridge, ...]
    """Between tiles counted within the part."""
    members: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class Simulation:
    """A played plan: its parts, and what follows their last backward passes."""

    plan: Plan
    step_s: float
    parts: list[Alike]
    sums: list[tuple[GradientSum, float, float]]
    """(bucket, start, stop)."""
    optimizer: dict[int, tuple[float, float]]
    """(start, seconds) of the optimizer step, for the tiles of the first of each alike parts."""

    def busy_fractions(self) -> tuple[float, ...]:
        """By rank, the part of the step that it computes."""
        tiles_of = self.plan.tiles
        busy = [0.0] * self.plan.num_ranks
        for alike in self.parts:
            played = alike.played
            seconds: dict[int, float] = defaultdict(float)
            for action, start, stop in zip(played.program.actions, played.starts, played.stops, strict=True):
                seconds[action.tile] += stop - start
            for tiles in alike.members:
                ends: dict[int, float] = {}
                for local, tile in enumerate(tiles):
                    for rank in tiles_of[tile].ranks:
                        busy[rank] += seconds[local]
                        ends[rank] = self.optimizer[alike.members[0][local]][1]
                for rank, spent in ends.items():
                    busy[rank] += spent
        return tuple(min(1.0, b / self.step_s) if self.step_s else 0.0 for b in busy)

    def timeline(self, *, most_parts: int = 64) -> Timeline:
        """The spans of every rank; of more than `most_parts` parts, only the first of those that play alike."""
        spans: list[Span] = []
        tiles_of = self.plan.tiles
        shown: set[int] = set()
        for alike in self.parts:
            for number, tiles in enumerate(alike.members):
                if number and sum(len(a.members) for a in self.parts) > most_parts:
                    break
                shown |= {rank for t in tiles for rank in tiles_of[t].ranks}
                spans += _part_spans(self.plan, alike, tiles)
                ends: dict[int, tuple[float, float]] = {}
                for local, tile in enumerate(tiles):
                    ends |= dict.fromkeys(tiles_of[tile].ranks, self.optimizer[alike.members[0][local]])
                spans += [Span(r, Activity.OPTIMIZER, "optimizer", at, at + spent) for r, (at, spent) in ends.items()]
        for entry, start, stop in self.sums:
            ranks = sorted({rank for t in entry.tiles for rank in tiles_of[t].ranks} & shown)
            spans += [Span(rank, Activity.SUM, entry.label, start, stop, entry.num_bytes) for rank in ranks]
        spans.sort(key=lambda s: (s.rank, s.start_s, s.stop_s))
        return Timeline(self.step_s, tuple(spans), self.busy_fractions())


def _part_spans(plan: Plan, alike: Alike, tiles: tuple[int, ...]) -> list[Span]:
    played = alike.played
    spans = []
    for action, start, stop in zip(played.program.actions, played.starts, played.stops, strict=True):
        label = str(Action(tiles[action.tile], action.op, action.micro_batch))
        spans += [
            Span(rank, ACTIVITIES[action.op], label, start, stop) for rank in plan.tiles[tiles[action.tile]].ranks
        ]
    for number, producer, start, stop in played.transfers:
        index, op = played.program.crossings[number]
        bridge = alike.bridges[index]
        action = played.program.actions[producer]
        source, target = tiles[action.tile], tiles[bridge.after if op is Op.FORWARD else bridge.before]
        label = f"{Action(source, action.op, action.micro_batch)} to tile {target}"
        crossing = alike.crossings[number]
        assert crossing is not None
        sender = plan.tiles[source].ranks[0]
        spans.append(Span(sender, Activity.TRANSFER, label, start, stop, crossing.num_bytes))
    return spans


def simulate(plan: Plan, times: Times, *, engine: Engine = OURS) -> Simulation:
    """Play one training step of a full global batch."""
    rows = _row_counts(plan)
    alike: dict[object, Alike] = {}
    for tiles, bridges in parts_of(plan):
        local = {tile: i for i, tile in enumerate(tiles)}
        inner = tuple(Bridge(local[b.before], local[b.after]) for b in bridges)
        numbers: dict[int, int] = {}
        ranks = tuple(tuple(numbers.setdefault(r, len(numbers)) for r in plan.tiles[t].ranks) for t in tiles)
        counts = tuple(rows[t][0] for t in tiles)
        lengths = tuple(plan.lengths[t] for t in tiles) if plan.lengths else ()
        program = compiled(ranks, inner, counts, plan.schedule, lengths)
        durations = tuple(_seconds(plan, times, t, rows[t][1]) for t in tiles)
        crossings = []
        names: dict[Hashable, int] = {}
        for index, op in program.crossings:
            bridge = bridges[index]
            shared = len(plan.tiles[bridge.before].samples.intersect(plan.tiles[bridge.after].samples))
            crossings.append(_numbered(times.crossing(bridge, op, shared), names))
        layers = tuple(plan.tiles[t].layers for t in tiles)
        key = (layers, ranks, inner, counts, lengths, durations, tuple(crossings))
        if key not in alike:
            alike[key] = Alike(play(program, durations, crossings, engine), crossings, inner)
        alike[key].members.append(tiles)
    parts = list(alike.values())
    ends = {}
    for part in parts:
        for local_tile, tile in enumerate(part.members[0]):
            ends[tile] = part.played.last_pass(local_tile)
    sums, after = _play_sums(plan, times, ends)
    # the global count of samples and the norm of all gradients are known only when the last rank has its sums
    met = max(after.values())
    optimizer = {tile: (met, times.optimizer_s(tile)) for tile in ends}
    step_s = met + max(seconds for _, seconds in optimizer.values())
    return Simulation(plan, step_s, parts, sums, optimizer)


ACTIVITIES = {
    Op.FORWARD: Activity.FORWARD,
    Op.BACKWARD: Activity.BACKWARD,
    Op.INPUT: Activity.INPUT,
    Op.WEIGHT: Activity.WEIGHT,
}


def _seconds(plan: Plan, times: Times, tile: int, samples: int) -> tuple[float, float, float, float]:
    """What a tile takes for each op, in their order."""
    forward, backward = times.pass_s(tile, samples)
    weights = backward * times.weight_part(tile) if plan.schedule in SPLIT_SCHEDULES else 0.0
    return forward, backward, backward - weights, weights


def _numbered(crossing: Crossing | None, names: dict[Hashable, int]) -> Crossing | None:
    """The crossing with its links counted within the part, so that alike parts compare equal."""
    if crossing is None:
        return None
    links = tuple(names.setdefault(link, len(names)) for link in crossing.links)
    return Crossing(crossing.busy_s, crossing.latency_s, links, crossing.num_bytes)


def _row_counts(plan: Plan) -> list[tuple[int, int]]:
    """For each tile (micro-batches of a full global batch that it computes in, samples of a full one)."""
    batches = plan.micro_batches_of(plan.global_batch)
    last = len(batches[-1])
    return [(len(batches) - (tile.samples.start >= last), len(tile.samples)) for tile in plan.tiles]


def parts_of(plan: Plan) -> list[tuple[tuple[int, ...], tuple[Bridge, ...]]]:
    """The tiles that bridges and common ranks join, ascending, each part with its bridges."""
    bridges = bridges_between(plan.tiles)
    parts = joined([tile.ranks for tile in plan.tiles], bridges)
    part_of = {tile: number for number, members in enumerate(parts) for tile in members}
    inside: list[list[Bridge]] = [[] for _ in parts]
    for bridge in bridges:
        inside[part_of[bridge.before]].append(bridge)
    return list(zip(parts, map(tuple, inside), strict=True))


def _play_sums(
    plan: Plan, times: Times, ends: dict[int, tuple[float, float]]
) -> tuple[list[tuple[GradientSum, float, float]], dict[int, float]]:
    """The sums in their order, and for each tile of `ends` the moment at which its gradients are whole.

    `ends` has one of each alike tiles; the others take part in the same sums at the same times.
    """
    free: dict[int, float] = defaultdict(float)
    done: dict[int, float] = defaultdict(float)
    for tile, (_, stop) in ends.items():
        for rank in plan.tiles[tile].ranks:
            done[rank] = max(done[rank], stop)
    sums = []
    holders: dict[tuple[int, ...], list[int]] = {}
    for entry in times.sums():
        if entry.tiles not in holders:
            holders[entry.tiles] = [t for t in entry.tiles if t in ends]
        start = 0.0
        for tile in holders[entry.tiles]:
            begin, stop = ends[tile]
            ranks = plan.tiles[tile].ranks
            if times.sums_overlap(tile):
                start = max(start, begin + (stop - begin) * times.backward_part(tile, entry.layer))
            else:
                start = max(start, *(done[r] for r in ranks))
            start = max(start, *(free[r] for r in ranks))
        stop = start + entry.seconds
        for tile in holders[entry.tiles]:
            for rank in plan.tiles[tile].ranks:
                free[rank] = stop
        sums.append((entry, start, stop))
    return sums, {t: max(max(done[r], free[r]) for r in plan.tiles[t].ranks) for t in ends}
