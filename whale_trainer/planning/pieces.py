"""Which part of each parameter every rank holds, and over which ranks each part's gradient is summed.

One rule covers data parallelism, unequal tensor shards, another split degree in each replica and tied weights: take
the cut points of all holders of a logical parameter; each segment between two cut points is summed over the ranks that
hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from whale_trainer.model_spec import ModelSpec, ParameterSpec
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.shares import Interval, cut_elements

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Sizes after which a bucket is closed; the first one is small so that its sum starts early in the backward pass."""


@dataclass(frozen=True)
class Use:
    """The part of a parameter that one shard of one tile computes with."""

    tile: int
    rank: int
    interval: Interval
    contributes: bool
    """False where another shard of the tile already has the whole gradient (a *full* parameter of a tensor group)."""


@dataclass(frozen=True)
class Segment:
    """Part of a parameter between two neighbouring cut points, and the ranks that hold it, ascending."""

    interval: Interval
    ranks: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The rank that speaks for the segment where it must count once (norms, checkpoints)."""
        return self.ranks[0]


@dataclass(frozen=True)
class ParameterLayout:
    """Where one logical parameter lives under a plan. Intervals run along `dim`; an uncut one has one."""

    parameter: ParameterSpec
    uses: tuple[Use, ...]

    @property
    def dim(self) -> int:
        return self.parameter.cut.dim if self.parameter.cut else 0

    @property
    def size(self) -> int:
        """Elements along `dim`; 1 for a scalar."""
        return self.parameter.shape[self.dim] if self.parameter.shape else 1

    def pieces(self, rank: int) -> tuple[Interval, ...]:
        """The separate stretches that `rank` stores, each the union of what its tiles use."""
        merged: list[Interval] = []
        for part in sorted({u.interval for u in self.uses if u.rank == rank}):
            if merged and part.start <= merged[-1].stop:
                merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, part.stop))
            else:
                merged.append(part)
        return tuple(merged)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        points = sorted({p for u in self.uses for p in u.interval})
        found = []
        for start, stop in pairwise(points):
            interval = Interval(start, stop)
            ranks = tuple(sorted({u.rank for u in self.uses if u.interval.contains(interval)}))
            if ranks:
                found.append(Segment(interval, ranks))
        return tuple(found)

    def piece_of(self, rank: int, interval: Interval) -> int:
        """Index of the piece of `rank` that contains `interval`."""
        return next(i for i, piece in enumerate(self.pieces(rank)) if piece.contains(interval))


def parameter_layouts(plan: Plan, model: ModelSpec) -> tuple[ParameterLayout, ...]:
    """The layout of every parameter of the model, in the order of `model.parameters`."""
    return tuple(ParameterLayout(p, tuple(_uses(plan, p))) for p in model.parameters)


def _uses(plan: Plan, parameter: ParameterSpec) -> Iterable[Use]:
    size = 1 if not parameter.shape else parameter.shape[parameter.cut.dim if parameter.cut else 0]
    for index, tile in enumerate(plan.tiles):
        if not any(tile.layers.start <= layer < tile.layers.stop for layer in parameter.layers):
            continue
        for position, shard in enumerate(tile.shards):
            if parameter.cut is not None:
                yield Use(index, shard.rank, cut_elements(parameter.cut, tile.weights, position), contributes=True)
            else:
                yield Use(index, shard.rank, Interval(0, size), contributes=parameter.is_partial or position == 0)


@dataclass(frozen=True)
class BucketEntry:
    """A segment of a parameter, by the parameter's position in `ModelSpec.parameters`."""

    parameter: int
    segment: Segment


@dataclass(frozen=True)
class Bucket:
    """Segments that the same ranks hold, summed in one collective."""

    ranks: tuple[int, ...]
    entries: tuple[BucketEntry, ...]


def gradient_buckets(layouts: Sequence[ParameterLayout]) -> tuple[Bucket, ...]:
    """Buckets in the one order in which all ranks start their sums.

    Parameters of late layers come first, since their last backward action ends first; a tied weight counts by its
    earliest layer, where its gradient becomes whole. Segments with a single holder need no sum and are in no bucket.
    """
    order = sorted(range(len(layouts)), key=lambda i: (-min(layouts[i].parameter.layers, default=0), -i))
    open_buckets: dict[tuple[tuple[int, ...], int], list[BucketEntry]] = {}
    open_bytes: dict[tuple[tuple[int, ...], int], int] = {}
    closed: list[tuple[int, Bucket]] = []
    opened: set[tuple[tuple[int, ...], int]] = set()
    for position, index in enumerate(order):
        parameter = layouts[index].parameter
        if not parameter.trainable:
            continue
        row_bytes = parameter.size_bytes // max(1, layouts[index].size)
        for segment in layouts[index].segments:
            if len(segment.ranks) == 1:
                continue
            key = (segment.ranks, parameter.element_bytes)
            open_buckets.setdefault(key, []).append(BucketEntry(index, segment))
            open_bytes[key] = open_bytes.get(key, 0) + len(segment.interval) * row_bytes
            if open_bytes[key] >= (BUCKET_BYTES if key in opened else FIRST_BUCKET_BYTES):
                closed.append((position, Bucket(segment.ranks, tuple(open_buckets.pop(key)))))
                open_bytes[key] = 0
                opened.add(key)
    last = len(order)
    closed += [(last, Bucket(key[0], tuple(entries))) for key, entries in open_buckets.items()]
    return tuple(bucket for _, bucket in sorted(closed, key=lambda item: item[0]))
