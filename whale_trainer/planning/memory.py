"""Memory of every rank under a plan, item by item, and the refusal of a plan that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale_trainer.device_kinds import GIB, DeviceKind
from whale_trainer.errors import PlanError
from whale_trainer.planning.costs import CostModel, MemoryItems, shard_activations, shard_elements
from whale_trainer.planning.load import tile_depths
from whale_trainer.planning.pieces import BUCKET_BYTES
from whale_trainer.planning.plan import Plan, PlannedDevice, Tile
from whale_trainer.planning.shares import Interval, cut_elements
from whale_trainer.validation import counted

CONTEXT_BYTES = GIB // 2
"""What the CUDA context and its libraries take on each GPU before the first tensor."""


def usable_bytes(kind: DeviceKind) -> int:
    """Memory of a device that a plan may fill."""
    return kind.memory_bytes - (CONTEXT_BYTES if kind.is_gpu else 0)


def in_flight(plan: Plan) -> tuple[int, ...]:
    """For each tile, the micro-batches whose activations it holds at once.

    With `gpipe` all of them; with `1f1b` the longest path of bridges from the tile to the loss, plus one.
    """
    if plan.schedule == "gpipe":
        return (plan.micro_batches,) * len(plan.tiles)
    return tuple(min(plan.micro_batches, depth) for depth in tile_depths(plan))


def rank_memory(plan: Plan, costs: CostModel) -> tuple[MemoryItems, ...]:
    """What each rank holds; a parameter that several tiles of a rank use is there once."""
    flying = in_flight(plan)
    held: list[list[int]] = [[] for _ in plan.devices]
    for index, tile in enumerate(plan.tiles):
        for rank in tile.ranks:
            held[rank].append(index)
    known: dict[tuple[object, ...], MemoryItems] = {}
    found = []
    for rank, indices in enumerate(held):
        tiles = [plan.tiles[i] for i in indices]
        counts = [flying[i] for i in indices]
        # ranks that do the same need the same; large plans have few different ones
        key = tuple(
            (t.layers, len(t.samples), t.weights, t.shard_of(rank), n) for t, n in zip(tiles, counts, strict=True)
        )
        if key not in known:
            known[key] = _one_rank(tiles, counts, costs, rank)
        found.append(known[key])
    return tuple(found)


def _one_rank(tiles: Sequence[Tile], flying: Sequence[int], costs: CostModel, rank: int) -> MemoryItems:
    items = _state(tiles, costs, rank)
    activations = buffers = 0.0
    for tile, count in zip(tiles, flying, strict=True):
        shard, samples = tile.shard_of(rank), len(tile.samples)
        layers = range(*tile.layers)
        each = sum(shard_activations(costs.model.layers[i], costs.shares[i], tile.weights, shard) for i in layers)
        activations += each * costs.precision.activation_factor * samples * count
        buffers += costs.boundary_bytes(*tile.layers, samples)
    buffers += min(BUCKET_BYTES, items.gradients)
    return replace(items, activations=activations, buffers=buffers)


def _state(tiles: Sequence[Tile], costs: CostModel, rank: int) -> MemoryItems:
    items = MemoryItems()
    for parameter in costs.model.parameters:
        users = [t for t in tiles if any(t.layers.start <= x < t.layers.stop for x in parameter.layers)]
        if len(users) == 1 or (users and parameter.cut is None):
            count = shard_elements(parameter, users[0].weights, users[0].shard_of(rank))
        elif users and parameter.cut is not None:
            size = parameter.shape[parameter.cut.dim]
            parts = [cut_elements(parameter.cut, t.weights, t.shard_of(rank)) for t in users]
            count = _union(parts) * (parameter.num_elements / size)
        else:
            continue
        items += costs.state_of(parameter, count)
    return items


def _union(parts: Sequence[Interval]) -> int:
    total = reached = 0
    for part in sorted(parts):
        total += max(0, part.stop - max(part.start, reached))
        reached = max(reached, part.stop)
    return total


def with_memory(plan: Plan, items: Sequence[MemoryItems]) -> Plan:
    """The plan with the planned memory of each device written down."""
    devices = [replace(d, planned_memory_bytes=i.total) for d, i in zip(plan.devices, items, strict=True)]
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
