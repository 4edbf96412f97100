"""Memory of every rank under a plan, item by item, and the refusal of a plan that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from whale_trainer.device_kinds import GIB, DeviceKind
from whale_trainer.errors import PlanError
from whale_trainer.model_spec import Cut, ModelSpec, ParameterSpec
from whale_trainer.planning.costs.cost_model import CostModel, MemoryItems, shard_elements
from whale_trainer.planning.costs.footprints import Flow, State
from whale_trainer.planning.costs.load import tile_depths
from whale_trainer.planning.plan import SPLIT_SCHEDULES, Plan, PlannedDevice, Tile
from whale_trainer.planning.schedule.schedule import Op, Schedule, build_schedule
from whale_trainer.planning.shares import Interval, cut_elements
from whale_trainer.validation import counted

CONTEXT_BYTES = GIB // 2
"""What the CUDA context and its libraries take on each GPU before the first tensor."""


def framework_bytes(kind: DeviceKind) -> int:
    """What is taken on a device before the first tensor."""
    return CONTEXT_BYTES if kind.is_gpu else 0


def usable_bytes(kind: DeviceKind) -> int:
    """Memory of a device that a plan may fill; no more than what was measured to be free."""
    whole = kind.memory_bytes - framework_bytes(kind)
    return whole if kind.free_bytes is None else min(whole, kind.free_bytes)


def in_flight(plan: Plan) -> tuple[int, ...]:
    """For each tile, the micro-batches whose activations it holds at once.

    With `gpipe` all of them; with `1f1b` the longest path of bridges from the tile to the loss, plus one; else counted
    in the schedule. Those that wait for the gradients of weights are not among them.
    """
    if plan.schedule == "gpipe":
        return (plan.micro_batches,) * len(plan.tiles)
    if plan.schedule == "1f1b":
        return tuple(min(plan.micro_batches, depth) for depth in tile_depths(plan))
    flying, most = [0] * len(plan.tiles), [0] * len(plan.tiles)
    for action in build_schedule(plan, plan.global_batch).order:
        flying[action.tile] += (action.op is Op.FORWARD) - action.op.gives_back
        most[action.tile] = max(most[action.tile], flying[action.tile])
    return tuple(most)


def flow_of(plan: Plan, tile: Tile, flying: int) -> Flow:
    """How micro-batches pass through a tile of the plan, with this many in flight."""
    height = plan.micro_batch_size
    micro_batches = -(-plan.global_batch // height)
    is_alone = len(tile.samples) == height
    return Flow(len(tile.samples), min(flying, micro_batches), micro_batches, is_alone)


def rank_memory(plan: Plan, costs: CostModel) -> tuple[MemoryItems, ...]:
    """What each rank holds; a parameter that several tiles of a rank use is there once."""
    flying = in_flight(plan)
    held: list[list[int]] = [[] for _ in plan.devices]
    for index, tile in enumerate(plan.tiles):
        for rank in tile.ranks:
            held[rank].append(index)
    others = _others(plan, costs.model)
    splits = plan.schedule in SPLIT_SCHEDULES
    needs_order = splits or any(len(indices) > 1 for indices in held)
    schedule = build_schedule(plan, plan.global_batch) if needs_order else None
    known: dict[tuple[object, ...], MemoryItems] = {}
    found = []
    for rank, indices in enumerate(held):
        tiles = [plan.tiles[i] for i in indices]
        parts = tuple(
            _Part(t.layers, t.weights, t.shard_of(rank), flow_of(plan, t, flying[i]), others[t.layers, t.weights])
            for i, t in zip(indices, tiles, strict=True)
        )
        moments: Sequence[Moment] = [Moment(0, (parts[0].flow.in_flight,), (0,))]
        if schedule is not None and (splits or len(parts) > 1):
            moments = _moments(schedule, rank, indices)
        # ranks that do the same need the same; large plans have few different ones
        key = (parts, tuple(moments))
        if key not in known:
            known[key] = _one_rank(parts, moments, costs)
        found.append(known[key])
    return tuple(found)


def _moments(schedule: Schedule, rank: int, indices: Sequence[int]) -> list[Moment]:
    """What happens on a rank, each once, without the gradients of weights, which only give memory back."""
    places = {tile: place for place, tile in enumerate(indices)}
    flying, waiting = [0] * len(indices), [0] * len(indices)
    found: dict[Moment, None] = {}
    for action in schedule.actions_of(rank):
        place = places[action.tile]
        flying[place] += action.op is Op.FORWARD
        waiting[place] -= action.op is Op.WEIGHT
        if action.op is not Op.WEIGHT:
            found[Moment(place, tuple(flying), tuple(waiting), action.op is Op.INPUT)] = None
        flying[place] -= action.op.gives_back
        waiting[place] += action.op is Op.INPUT
    return list(found)


class Moment(NamedTuple):
    """What a rank is at."""

    at_work: int
    """Which of its tiles."""
    flying: tuple[int, ...]
    """Micro-batches in flight on each tile, that at work included."""
    waiting: tuple[int, ...]
    """Micro-batches on each tile whose weights' gradients wait."""
    splits: bool = False
    """Whether the one at work will wait as well."""


Sort = tuple[Interval, tuple[int, ...]]
"""Layers and weights of a tile."""


@dataclass(frozen=True)
class _Part:
    """What a rank holds of one tile."""

    layers: Interval
    weights: tuple[int, ...]
    shard: int
    flow: Flow
    others: tuple[Sort, ...]
    """Tiles that cut some of its parameters in another way."""


def _others(plan: Plan, model: ModelSpec) -> dict[Sort, tuple[Sort, ...]]:
    """For each sort of tile those that use some of the same parameters and are cut otherwise."""
    sorts = list(dict.fromkeys((t.layers, t.weights) for t in plan.tiles))
    tied = [p.layers for p in model.parameters if len(p.layers) > 1]

    def meet(a: Interval, b: Interval) -> bool:
        is_tied = any(any(x in range(*a) for x in layers) and any(x in range(*b) for x in layers) for layers in tied)
        return bool(len(a.intersect(b))) or is_tied

    return {
        (layers, weights): tuple((o, cut) for o, cut in sorts if cut != weights and meet(layers, o))
        for layers, weights in sorts
    }


def _one_rank(parts: Sequence[_Part], moments: Sequence[Moment], costs: CostModel) -> MemoryItems:
    shards = [costs.tile(p.weights).shards[p.shard] for p in parts]
    items = _items(shards[0].state(*parts[0].layers)) if len(parts) == 1 else _state(parts, costs)
    held = [s.footprints.held(*p.layers, p.flow.samples) for p, s in zip(parts, shards, strict=True)]
    waiting = [s.footprints.buffers(*p.layers, p.flow) for p, s in zip(parts, shards, strict=True)]
    kept = [s.footprints.waiting(*p.layers, p.flow.samples) for p, s in zip(parts, shards, strict=True)]
    peak, flying, still = -inf, moments[0].flying, moments[0].waiting
    for at_work, counts, put_off, splits in moments:
        part, shard = parts[at_work], shards[at_work]
        state = shard.state(*part.layers)
        flow = part.flow._replace(in_flight=counts[at_work])
        most = shard.moment(*part.layers, flow, state) - state.gradients
        if splits:
            most = shard.split_moment(*part.layers, flow)
        above = most - held[at_work] * counts[at_work]
        # while one tile is at work, the others hold what they have in flight, and what waits for them
        total = sum(h * c for h, c in zip(held, counts, strict=True)) + above + sum(waiting) - waiting[at_work]
        total += sum(k * c for k, c in zip(kept, put_off, strict=True))
        if total > peak:
            peak, flying, still = total, counts, put_off
    peak = max(peak, *(s.optimizer_peak(*p.layers, items.gradients) for p, s in zip(parts, shards, strict=True)))
    activations = sum(h * c for h, c in zip(held, flying, strict=True))
    activations += sum(k * c for k, c in zip(kept, still, strict=True))
    casts = sum(s.footprints.casts(*p.layers) * c for p, s, c in zip(parts, shards, flying, strict=True))
    temporary = peak - activations - sum(waiting)
    return replace(
        items,
        cast_copy=casts,
        # where the peak comes before all gradients are there, they take the place of activations
        activations=activations - casts + min(0.0, temporary),
        temporary_peak=max(0.0, temporary),
        bridge_buffers=sum(waiting),
        bucket_buffers=_bucket_copies(parts, costs),
        batch=sum(s.batch(*p.layers, p.flow) for p, s in zip(parts, shards, strict=True)),
    )


def _items(state: State) -> MemoryItems:
    return MemoryItems(state.parameters, state.gradients, state.optimizer)


def _bucket_copies(parts: Sequence[_Part], costs: CostModel) -> float:
    """Bytes of the gradients that other ranks share in parts only, so that they are copied to buckets and back."""
    found = 0.0
    if not any(part.others or len(part.weights) > 1 for part in parts):
        return found
    inside: dict[tuple[int, Cut, tuple[tuple[int, ...], ...]], bool] = {}
    for parameter in costs.model.parameters:
        if parameter.cut is None or not parameter.trainable:
            continue
        for number, part in enumerate(parts):
            if not _uses(parameter, part.layers):
                continue
            # shards of one tile share a part where they share a key and value head
            cuts = (part.weights, *dict.fromkeys(w for layers, w in part.others if _uses(parameter, layers)))
            key = (number, parameter.cut, cuts)
            if key not in inside:
                inside[key] = _is_divided(part, parameter.cut, cuts)
            if inside[key]:
                count = shard_elements(parameter, part.weights, part.shard)
                found += costs.state_of(parameter, count).gradients
                break
    return found


def _is_divided(part: _Part, cut: Cut, cuts: Sequence[tuple[int, ...]]) -> bool:
    """Whether a shard of a tile that is cut by one of `cuts` begins or ends within the rank's part."""
    own = cut_elements(cut, part.weights, part.shard)
    return any(
        own.start < edge < own.stop
        for weights in cuts
        if len(weights) > 1
        for shard in range(len(weights))
        for edge in cut_elements(cut, weights, shard)
    )


def _uses(parameter: ParameterSpec, layers: Interval) -> bool:
    return any(layers.start <= x < layers.stop for x in parameter.layers)


def _state(parts: Sequence[_Part], costs: CostModel) -> MemoryItems:
    """What does not depend on the batch."""
    items = MemoryItems()
    for parameter in costs.model.parameters:
        users = [p for p in parts if _uses(parameter, p.layers)]
        if len(users) == 1 or (users and parameter.cut is None):
            count = shard_elements(parameter, users[0].weights, users[0].shard)
        elif users and parameter.cut is not None:
            size = parameter.shape[parameter.cut.dim]
            count = _union([cut_elements(parameter.cut, p.weights, p.shard) for p in users])
            count *= parameter.num_elements / size
        else:
            continue
        items += costs.state_of(parameter, count)
    return items


def _union(parts: Sequence[Interval]) -> float:
    total = reached = 0
    for part in sorted(parts):
        total += max(0, part.stop - max(part.start, reached))
        reached = max(reached, part.stop)
    return total


def with_framework(
    plan: Plan, items: Sequence[MemoryItems], kinds: Mapping[str, DeviceKind]
) -> tuple[MemoryItems, ...]:
    """The items with what each rank's device needs besides, by the names of kinds."""
    bases = [framework_bytes(kinds[d.kind]) for d in plan.devices]
    return tuple(replace(i, framework=base) for i, base in zip(items, bases, strict=True))


def with_memory(plan: Plan, items: Sequence[MemoryItems]) -> Plan:
    """The plan with the planned memory of each device written down."""
    devices = [
        replace(d, planned_memory_bytes=i.total, framework_bytes=round(i.framework))
        for d, i in zip(plan.devices, items, strict=True)
    ]
    return replace(plan, devices=tuple(devices))


def check_memory(plan: Plan, items: Sequence[MemoryItems], usable: Sequence[int]) -> None:
    """Raises `PlanError` with needed and available bytes of every device that the plan overfills, and what to do."""
    over = [rank for rank, item in enumerate(items) if item.total > usable[rank]]
    if not over:
        return
    worst = max(over, key=lambda r: items[r].total / max(1, usable[r]))
    index = next(i for i, t in enumerate(plan.tiles) if worst in t.ranks)
    tile, device = plan.tiles[index], plan.devices[worst]
    flying = in_flight(plan)[index]
    biggest = ", ".join(f"{size(value)} {name}" for name, value in items[worst].biggest())
    lines = [
        f"the plan does not fit: rank {worst} ({device.kind} on {device.node}) needs {size(items[worst].total)}, "
        f"{size(usable[worst])} of its {size(device.memory_bytes)} can be used.",
        f"  {counted(len(tile.layers), 'layer')} of {counted(len(tile.samples), 'sample')}, "
        f"{counted(flying, 'micro-batch')} in flight: {biggest}.",
    ]
    others = [r for r in over if r != worst]
    if others:
        named = ", ".join(_need(plan.devices[r], items[r], usable[r]) for r in others[:4])
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        lines.append(f"  Too much also on {named}{more}.")
    lines.append(f"  {_remedy(items[worst])}")
    raise PlanError("\n".join(lines))


def _need(device: PlannedDevice, items: MemoryItems, usable: int) -> str:
    return f"rank {device.rank} ({device.kind}: {size(items.total)} of {size(usable)})"


def _remedy(items: MemoryItems) -> str:
    if items.activations > items.total / 2:
        return "Raise strategy.micro_batches or lower global_batch, or use more stages or shards (strategy.scopes)."
    return "Use more stages or shards (strategy.scopes), more devices, or a smaller model."


def size(num_bytes: float) -> str:
    """`12.3 GiB`, `40 MiB`, `512 B`."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
