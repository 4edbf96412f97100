"""Plans for tests of schedules: straight pipelines, grids, and any tiling at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import strategies as st

from whale_trainer.planning.plan import SCHEDULES, Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.shares import Interval, intervals

KIND = ("V100-SXM2-32GB", "node0", 32 << 30)


def plan_of(
    tiles: Sequence[Tile],
    *,
    micro_batches: int,
    global_batch: int,
    schedule: str = "1f1b",
    num_ranks: int | None = None,
) -> Plan:
    """A plan over the ranks that the tiles name."""
    num_layers = max(t.layers.stop for t in tiles)
    num_ranks = num_ranks or 1 + max(r for t in tiles for r in t.ranks)
    return Plan(
        tiles=tuple(tiles),
        layer_names=tuple(f"layer{i}" for i in range(num_layers)),
        micro_batches=micro_batches,
        global_batch=global_batch,
        schedule=schedule,
        devices=tuple(PlannedDevice(rank, *KIND) for rank in range(num_ranks)),
    )


def tile(layers: tuple[int, int], samples: tuple[int, int], *shards: int | tuple[int, int]) -> Tile:
    """A tile; a shard is a rank, or (rank, weight)."""
    return Tile(
        Interval(*layers), Interval(*samples), tuple(Shard(s) if isinstance(s, int) else Shard(*s) for s in shards)
    )


def pipeline(stages: int, micro_batches: int, schedule: str = "1f1b") -> Plan:
    """One layer and one rank a stage, one sample a micro-batch."""
    tiles = [tile((s, s + 1), (0, 1), s) for s in range(stages)]
    return plan_of(tiles, micro_batches=micro_batches, global_batch=micro_batches, schedule=schedule)


def grid_plan(
    samples: Sequence[int], layers: Sequence[int], split: int, micro_batches: int, schedule: str = "1f1b"
) -> Plan:
    """Replicas with the given samples x stages with the given layers, each tile over `split` ranks."""
    tiles = []
    for row, column in product(intervals(samples), intervals(layers)):
        first = split * len(tiles)
        tiles.append(Tile(column, row, tuple(Shard(first + i, split - i) for i in range(split))))
    return plan_of(tiles, micro_batches=micro_batches, global_batch=sum(samples) * micro_batches, schedule=schedule)


def irregular(schedule: str = "1f1b") -> Plan:
    """The tiling of the design's picture: two cuts at different layers, a split tile, 4 micro-batches of 32 samples."""
    tiles = [
        tile((0, 7), (0, 20), (0, 5), (1, 3)),
        tile((0, 4), (20, 32), 2),
        tile((7, 12), (0, 20), 4),
        tile((4, 12), (20, 32), 3),
    ]
    return plan_of(tiles, micro_batches=4, global_batch=128, schedule=schedule)


@st.composite
def rectangles(draw: st.DrawFn, num_layers: int, height: int) -> list[tuple[Interval, Interval]]:
    """Any tiling: from the first free cell on, each rectangle takes as much as is drawn and still free."""
    free = set(product(range(height), range(num_layers)))
    found = []
    while free:
        row, column = min(free)
        widest = next(w for w in range(1, num_layers + 1) if (row, column + w) not in free)
        width = draw(st.integers(1, widest))
        cells = range(column, column + width)
        highest = next(h for h in range(1, height + 1) if not free.issuperset((row + h, c) for c in cells))
        tall = draw(st.integers(1, highest))
        free.difference_update(product(range(row, row + tall), cells))
        found.append((Interval(column, column + width), Interval(row, row + tall)))
    return found


@st.composite
def pinwheels(draw: st.DrawFn, num_layers: int, height: int) -> list[tuple[Interval, Interval]]:
    """Four rectangles around a fifth: no cut from edge to edge can begin such a tiling."""
    a, b = sorted(draw(st.sets(st.integers(1, num_layers - 1), min_size=2, max_size=2)))
    c, d = sorted(draw(st.sets(st.integers(1, height - 1), min_size=2, max_size=2)))
    return [
        (Interval(0, b), Interval(0, c)),
        (Interval(b, num_layers), Interval(0, d)),
        (Interval(a, num_layers), Interval(d, height)),
        (Interval(0, a), Interval(c, height)),
        (Interval(a, b), Interval(c, d)),
    ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to 6 layers x 8 samples over up to 6 ranks; a rank may hold several tiles, a tile several ranks."""
    num_ranks, num_layers, height = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    shard = st.builds(Shard, st.integers(0, num_ranks - 1), st.integers(1, 5))
    shards = st.lists(shard, min_size=1, max_size=3, unique_by=lambda s: s.rank)
    kinds = [rectangles, pinwheels] if min(num_layers, height) >= 3 else [rectangles]
    kind = draw(st.sampled_from(kinds))
    tiles = [Tile(*r, tuple(draw(shards))) for r in draw(kind(num_layers, height))]
    micro_batches = draw(st.integers(1, 6))
    # the least batch that still has micro-batches of this height, and holds a sample for each
    least = max(micro_batches, (height - 1) * micro_batches + 1)
    global_batch = draw(st.integers(least, height * micro_batches))
    return plan_of(
        tiles,
        micro_batches=micro_batches,
        global_batch=global_batch,
        schedule=draw(st.sampled_from(SCHEDULES)),
        num_ranks=num_ranks,
    )


def is_grid(plan: Plan) -> bool:
    """True when the tiles are all pairs of some layer intervals and some sample intervals."""
    columns, rows = {t.layers for t in plan.tiles}, {t.samples for t in plan.tiles}
    return {(t.layers, t.samples) for t in plan.tiles} == set(product(columns, rows))


def is_guillotine(tiles: Sequence[Tile]) -> bool:
    """True when cuts from edge to edge, one after the other, make the tiling."""
    if len(tiles) == 1:
        return True
    for side in ("layers", "samples"):
        spans = [getattr(t, side) for t in tiles]
        for cut in sorted({s.stop for s in spans})[:-1]:
            if not any(s.start < cut < s.stop for s in spans):
                low = [t for t, s in zip(tiles, spans, strict=True) if s.stop <= cut]
                high = [t for t, s in zip(tiles, spans, strict=True) if s.start >= cut]
                return is_guillotine(low) and is_guillotine(high)
    return False
