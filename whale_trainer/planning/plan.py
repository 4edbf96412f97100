"""The plan: a tiling of layers x samples, each tile held by one rank or split over several.

Holds decisions only (intervals, ranks, weights, schedule) and derives the rest. A plan is checked when it is made,
can be written as JSON and read back, and has a fingerprint that ranks compare before the first collective.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from whale_trainer.errors import PlanError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.shares import Interval, cut_units

SCHEMA_VERSION = 1
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "fitted")
SPLIT_SCHEDULES = ("zero_bubble", "fitted")
"""Those whose backward passes are in two parts."""
Lengths = tuple[int, int, int]
"""Lengths of a tile's forward, of the gradients of its inputs and of its weights, in units of the plan's own."""


@dataclass(frozen=True, order=True)
class Shard:
    """One rank's part of a tile; `weight` is its share among the tile's shards, a whole number."""

    rank: int
    weight: int = 1


@dataclass(frozen=True, order=True)
class Tile:
    """Layers x samples of a micro-batch, held by one rank or cut over a tensor group."""

    layers: Interval
    samples: Interval
    shards: tuple[Shard, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(s.rank for s in self.shards)

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(s.weight for s in self.shards)

    def shard_of(self, rank: int) -> int:
        """Position of `rank` among the shards."""
        return self.ranks.index(rank)

    def __str__(self) -> str:
        cut = "" if len(self.shards) == 1 else " shards " + ":".join(map(str, self.weights))
        ranks = ",".join(map(str, self.ranks))
        layers, samples = self.layers, self.samples
        return f"layers {layers.start}-{layers.stop}, samples {samples.start}-{samples.stop}, rank {ranks}{cut}"


@dataclass(frozen=True)
class PlannedDevice:
    """The device behind a rank, and what the plan puts on it."""

    rank: int
    kind: str
    node: str
    memory_bytes: int
    planned_memory_bytes: int | None = None
    framework_bytes: int = 0
    """Of the planned ones, what is taken before the first tensor."""


@dataclass(frozen=True)
class Prediction:
    """Times that the simulator gives for a plan; all None until there is one."""

    step_s: float | None = None
    bubble_fraction: float | None = None
    even_step_s: float | None = None
    whale_step_s: float | None = None
    ideal_step_s: float | None = None
    busy_fractions: tuple[float, ...] = ()
    """By rank, the part of the step in which it computes; () without a prediction."""


@dataclass(frozen=True)
class Plan:
    """Who computes what. Raises `PlanError` unless the tiles cover every layer of every sample exactly once."""

    tiles: tuple[Tile, ...]
    layer_names: tuple[str, ...]
    micro_batches: int
    global_batch: int
    schedule: str
    devices: tuple[PlannedDevice, ...]
    lengths: tuple[Lengths, ...] = ()
    """By tile, what the order of `fitted` is made for; empty for other schedules."""
    left_out: tuple[str, ...] = ()
    """Devices that the plan does not use, by kind and node."""
    notes: tuple[str, ...] = ()
    """What the planner wants the user to know, one sentence each."""
    predicted: Prediction = field(default_factory=Prediction)
    model: ModelSpec | None = field(default=None, compare=False, repr=False)
    """What the plan was made for; not a decision, so it is neither written nor part of the fingerprint."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def num_layers(self) -> int:
        return len(self.layer_names)

    @property
    def micro_batch_size(self) -> int:
        """Height of the rectangle: samples of a full micro-batch."""
        return -(-self.global_batch // self.micro_batches)

    @cached_property
    def is_replicated_only(self) -> bool:
        """True when every tile holds all layers on one rank, so that any module can run under the plan."""
        return all(len(t.layers) == self.num_layers and len(t.shards) == 1 for t in self.tiles)

    def tiles_of(self, rank: int) -> tuple[int, ...]:
        """Indices of the tiles that `rank` holds a part of."""
        return tuple(i for i, t in enumerate(self.tiles) if rank in t.ranks)

    def micro_batches_of(self, batch_size: int) -> tuple[Interval, ...]:
        """Samples of a batch for each micro-batch: rows fill in order, the last one may be short, none is empty."""
        height = self.micro_batch_size
        return tuple(Interval(a, min(a + height, batch_size)) for a in range(0, batch_size, height))

    def rows(self, tile: int, micro_batch: int, batch_size: int) -> Interval:
        """Samples of the batch (counted from its start) that `tile` computes in `micro_batch`; may be empty."""
        samples = self.micro_batches_of(batch_size)[micro_batch]
        return self.tiles[tile].samples.shifted(samples.start).intersect(samples)

    def rows_to_read(self, rank: int, batch_size: int) -> tuple[int, ...]:
        """Samples of the batch that `rank` reads, ascending: those of its tiles with the first or the last layer."""
        ends = [
            i
            for i in self.tiles_of(rank)
            if self.tiles[i].layers.start == 0 or self.tiles[i].layers.stop == self.num_layers
        ]
        read: set[int] = set()
        for micro_batch in range(len(self.micro_batches_of(batch_size))):
            for tile in ends:
                read.update(range(*self.rows(tile, micro_batch, batch_size)))
        return tuple(sorted(read))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the decisions; two ranks with different fingerprints must not talk to each other."""
        decisions = {
            k: self.to_dict()[k] for k in ("tiles", "layer_names", "micro_batches", "global_batch", "schedule")
        }
        if self.lengths:
            decisions["lengths"] = self.lengths
        return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self, model: ModelSpec | None = None) -> dict[str, Any]:
        """Plain data for plan.json; with `model`, each tile also tells its derived `cuts` in whole units by dim."""
        kinds = {d.rank: d.kind for d in self.devices}
        tiles = []
        for tile in self.tiles:
            entry: dict[str, Any] = {
                "layers": list(tile.layers),
                "samples": list(tile.samples),
                "shards": [{"rank": s.rank, "device": kinds[s.rank], "weight": s.weight} for s in tile.shards],
            }
            if model is not None and len(tile.shards) > 1:
                entry["cuts"] = {
                    f"{dim.name}[{dim.units}]": [len(i) for i in cut_units(dim, tile.weights)]
                    for dim in model.split_dims(*tile.layers)
                }
            tiles.append(entry)
        return {
            "schema_version": SCHEMA_VERSION,
            "tiles": tiles,
            "layer_names": list(self.layer_names),
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "lengths": [list(three) for three in self.lengths],
            "global_batch": self.global_batch,
            "devices": [asdict(d) for d in self.devices],
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "predicted": asdict(self.predicted),
        }

    def to_json(self, model: ModelSpec | None = None) -> str:
        return json.dumps(self.to_dict(model), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that `to_dict` wrote. Raises `PlanError` for another schema version or a missing entry."""
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"plan.json has schema version {version!r}, this release reads {SCHEMA_VERSION}: plan again"
            )
        try:
            return cls(
                tiles=tuple(
                    Tile(
                        Interval(*t["layers"]),
                        Interval(*t["samples"]),
                        tuple(Shard(s["rank"], s["weight"]) for s in t["shards"]),
                    )
                    for t in data["tiles"]
                ),
                layer_names=tuple(data["layer_names"]),
                micro_batches=data["micro_batches"],
                global_batch=data["global_batch"],
                schedule=data["schedule"],
                devices=tuple(PlannedDevice(**d) for d in data["devices"]),
                lengths=tuple((forward, inputs, weights) for forward, inputs, weights in data.get("lengths", ())),
                left_out=tuple(data["left_out"]),
                notes=tuple(data["notes"]),
                predicted=_prediction(data["predicted"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"plan.json is not a whole plan ({error}): plan again") from error

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls.from_dict(json.loads(text))


def _check(plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"schedule {plan.schedule!r} is not one of {', '.join(SCHEDULES)}")
    if plan.lengths and (plan.schedule != "fitted" or len(plan.lengths) != len(plan.tiles)):
        raise PlanError(f"{len(plan.lengths)} lengths, but they belong to the tiles of schedule fitted, one to each")
    if any(length < 1 for three in plan.lengths for length in three):
        raise PlanError(f"lengths are whole numbers from 1, found {plan.lengths}")
    if plan.micro_batches < 1 or plan.global_batch < plan.micro_batches:
        raise PlanError(
            f"a global batch of {plan.global_batch} cannot be cut into {plan.micro_batches} micro-batches: "
            "each needs at least one sample (global_batch, strategy.micro_batches)"
        )
    if [d.rank for d in plan.devices] != list(range(len(plan.devices))):
        raise PlanError("devices must be listed by rank, from 0")
    area = 0
    bounds = (Interval(0, plan.num_layers), Interval(0, plan.micro_batch_size))
    for index, tile in enumerate(plan.tiles):
        if not (len(tile.layers) and len(tile.samples) and tile.shards):
            raise PlanError(f"tile {index} is empty ({tile})")
        if not (bounds[0].contains(tile.layers) and bounds[1].contains(tile.samples)):
            raise PlanError(
                f"tile {index} ({tile}) reaches outside {plan.num_layers} layers x {plan.micro_batch_size} samples"
            )
        if len(set(tile.ranks)) != len(tile.ranks) or not all(0 <= r < plan.num_ranks for r in tile.ranks):
            raise PlanError(f"tile {index} ({tile}) needs distinct ranks from 0 to {plan.num_ranks - 1}")
        if any(s.weight < 1 for s in tile.shards):
            raise PlanError(f"tile {index} ({tile}) has a weight below 1")
        area += len(tile.layers) * len(tile.samples)
    _check_overlaps(plan.tiles)
    if area != plan.num_layers * plan.micro_batch_size:
        raise PlanError(
            f"the tiles cover {area} of {plan.num_layers} layers x {plan.micro_batch_size} samples: "
            "every cell needs one tile"
        )


def _check_overlaps(tiles: Sequence[Tile]) -> None:
    """Walks along the layers; the tiles that cover a layer, by their samples, must not reach into each other."""
    order = sorted(range(len(tiles)), key=lambda i: (tiles[i].layers.start, i))
    open_tiles: list[tuple[int, int, int]] = []  # (first sample, sample after the last, tile), ascending
    layer = 0
    for index in order:
        tile = tiles[index]
        if tile.layers.start > layer:
            layer = tile.layers.start
            open_tiles = [o for o in open_tiles if tiles[o[2]].layers.stop > layer]
        place = bisect(open_tiles, (tile.samples.start, tile.samples.stop, index))
        for _, _, other in open_tiles[max(0, place - 1) : place + 1]:
            if len(tile.samples.intersect(tiles[other].samples)):
                a, b = sorted((other, index))
                raise PlanError(f"tiles {a} ({tiles[a]}) and {b} ({tiles[b]}) overlap")
        open_tiles.insert(place, (tile.samples.start, tile.samples.stop, index))


def _prediction(data: Mapping[str, Any]) -> Prediction:
    return Prediction(**{**data, "busy_fractions": tuple(data.get("busy_fractions", ()))})
