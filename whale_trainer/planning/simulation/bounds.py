"""What a step is bound by, and the least that the devices could need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isclose

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.simulate import Alike, Simulation
from whale_trainer.planning.simulation.times import TimeModel


def ideal_step_s(times: TimeModel, global_batch: int) -> float:
    """Seconds of a step if all devices shared the work without any loss: the sum of their speeds, each with the whole
    model and as many samples at a time as suit it best."""
    rate = 0.0
    for name, number in Counter(d.kind.name for d in times.cluster.devices).items():
        device = next(d for d in times.cluster.devices if d.kind.name == name)
        counts = [1 << i for i in range(global_batch.bit_length())]
        rate += number * max(n / float(times.group((device,), (1,), n).both[-1]) for n in counts)
    return global_batch / rate


def bound_by(simulation: Simulation) -> str:
    """What the critical path is mostly made of: from the last moment of the step back through what made it so late."""
    plan = simulation.plan
    last = max(simulation.optimizer, key=lambda t: (sum(simulation.optimizer[t]), -t))
    spent: dict[str, float] = defaultdict(float)
    start, seconds = simulation.optimizer[last]
    spent[_compute(plan, last)] += seconds
    # all wait for the rank whose sums end last, and that sum may have waited for another part
    end_of = {tile: (part, local) for part in simulation.parts for local, tile in enumerate(part.members[0])}
    moment, tile = start, max(end_of, key=lambda t: (_end(end_of[t]), -t))
    has_waited = False
    for entry, begin, stop in reversed(simulation.sums):
        if isclose(stop, moment) and (tile in entry.tiles or not has_waited):
            has_waited = True
            spent["the sum of gradients"] += stop - begin
            moment = begin
            holders = [t for t in entry.tiles if t in end_of]
            tile = max(holders, key=lambda t: (_end(end_of[t]), -t))
    part, local = end_of[tile]
    for what, amount in _critical(plan, part, part.played.last[local]):
        spent[what] += amount
    what, amount = max(spent.items(), key=lambda item: (item[1], item[0]))
    return f"{what} ({amount / simulation.step_s:.0%} of the step)" if simulation.step_s else ""


def _compute(plan: Plan, tile: int) -> str:
    device = plan.devices[plan.tiles[tile].ranks[0]]
    return f"compute of rank {device.rank}, {device.kind}"


def _end(place: tuple[Alike, int]) -> float:
    part, local = place
    return part.played.stops[part.played.last[local]]


def _critical(plan: Plan, part: Alike, index: int) -> Iterator[tuple[str, float]]:
    """(what, seconds) from an action back to the start of the step."""
    played, tiles = part.played, part.members[0]
    program = played.program
    arrivals: dict[int, list[tuple[float, int]]] = {}
    for producer, outputs in enumerate(program.outputs):
        for number, consumer in outputs:
            if part.crossings[number] is None:
                arrivals.setdefault(consumer, []).append((played.stops[producer], producer))
    sent = {(number, producer): arrival for number, producer, _, arrival in played.transfers}
    for producer, outputs in enumerate(program.outputs):
        for number, consumer in outputs:
            if (number, producer) in sent:
                arrivals.setdefault(consumer, []).append((sent[number, producer], producer))
    on_lane: dict[int, list[int]] = {}
    before: list[list[int]] = []
    for i, action in enumerate(program.actions):
        before.append([on_lane[lane][-1] for lane in program.lanes[action.tile] if on_lane.get(lane)])
        for lane in program.lanes[action.tile]:
            on_lane.setdefault(lane, []).append(i)
    while True:
        start = played.starts[index]
        yield _compute(plan, tiles[program.actions[index].tile]), played.stops[index] - start
        earlier = [(played.stops[i], 1, i) for i in before[index]]
        earlier += [(arrival, 0, producer) for arrival, producer in arrivals.get(index, ())]
        if not earlier or start <= 0:
            return
        _, _, previous = max(earlier)
        gap = start - played.stops[previous]
        if gap > 0:
            yield "transfers between stages", gap
        index = previous
