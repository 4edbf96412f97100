"""Plans that are weighed: made from tiles on devices of the cluster, checked against memory, timed by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from whale_trainer.cluster import Cluster
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.costs.memory import flow_of, in_flight, rank_memory, usable_bytes
from whale_trainer.planning.plan import SPLIT_SCHEDULES, Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.plan_times import PlanTimes
from whale_trainer.planning.simulation.simulate import Simulation, simulate
from whale_trainer.planning.simulation.times import TimeModel
from whale_trainer.validation import counted


@dataclass(frozen=True)
class Candidate:
    """Tiles with indices of the cluster's devices as ranks, and what their step takes."""

    tiles: tuple[Tile, ...]
    micro_batches: int
    schedule: str
    step_s: float

    @property
    def rank_key(self) -> tuple[float, int, tuple[Tile, ...], int, str]:
        """By time; of equally fast ones the simplest first, so that the choice is the same on every run."""
        return (float(f"{self.step_s:.9e}"), len(self.tiles), self.tiles, self.micro_batches, self.schedule)


@dataclass
class Weigher:
    """Times candidates, each once, and remembers them."""

    costs: CostModel
    cluster: Cluster
    times: TimeModel
    global_batch: int
    limit: int | None = None
    """The most simulations; what comes after is not looked at."""
    weighed: dict[tuple[tuple[Tile, ...], int, str], Candidate | None] = field(default_factory=dict)
    num_simulated: int = 0
    was_stopped: bool = False
    """True when the limit kept a candidate from being looked at."""

    def __post_init__(self) -> None:
        self._usable = [usable_bytes(d.kind) for d in self.cluster.devices]

    def weigh(self, tiles: Sequence[Tile], micro_batches: int, schedule: str) -> Candidate | None:
        """The candidate with its predicted step; None where it does not fit in memory."""
        ordered = tuple(sorted(tiles, key=lambda t: (t.layers.start, t.samples.start)))
        key = (ordered, micro_batches, schedule)
        if key not in self.weighed:
            if self.limit is not None and self.num_simulated >= self.limit:
                self.was_stopped = True
                return None
            plan = self.plan(ordered, micro_batches, schedule)
            candidate = None
            if self.fits(plan, ordered):
                self.num_simulated += 1
                candidate = Candidate(ordered, micro_batches, schedule, self.simulation(plan).step_s)
            self.weighed[key] = candidate
        return self.weighed[key]

    def simulation(self, plan: Plan) -> Simulation:
        """One step of a plan on the cluster."""
        return simulate(plan, PlanTimes(plan, self.times))

    def plan(self, tiles: Sequence[Tile], micro_batches: int, schedule: str) -> Plan:
        """The plan, with ranks counted over the devices in use, in the order of the cluster."""
        plan = self._plan(tiles, micro_batches, schedule)
        return replace(plan, lengths=PlanTimes(plan, self.times).lengths()) if schedule == "fitted" else plan

    def _plan(self, tiles: Sequence[Tile], micro_batches: int, schedule: str) -> Plan:
        devices = self.cluster.devices
        used = sorted({index for tile in tiles for index in tile.ranks})
        rank_of = {index: rank for rank, index in enumerate(used)}
        return Plan(
            tiles=tuple(replace(t, shards=tuple(Shard(rank_of[s.rank], s.weight) for s in t.shards)) for t in tiles),
            layer_names=self.costs.model.layer_names,
            micro_batches=micro_batches,
            global_batch=self.global_batch,
            schedule=schedule,
            devices=tuple(
                PlannedDevice(rank, devices[i].kind.name, devices[i].node, devices[i].kind.memory_bytes)
                for rank, i in enumerate(used)
            ),
            left_out=tuple(str(d) for d in devices if d.index not in rank_of),
        )

    def fits(self, plan: Plan, tiles: Sequence[Tile]) -> bool:
        """Whether every rank's tiles fit."""
        if plan.schedule in SPLIT_SCHEDULES:
            usable = [self._usable[index] for index in sorted({i for t in tiles for i in t.ranks})]
            return all(i.total <= room for i, room in zip(rank_memory(plan, self.costs), usable, strict=True))
        needed: dict[int, float] = {}
        # an upper bound first: what several tiles of a rank share counts for each, and where tiles are cut in several
        # ways, or share key and value heads, all of them may sum their gradients over copies
        dims = self.costs.model.split_dims(0, self.costs.model.num_layers)
        weights = {tile.weights for tile in tiles}
        most_shards = max(map(len, weights))
        shared = any(d.num_kv_heads is not None and d.num_kv_heads < most_shards for d in dims)
        copies = len(weights) > 1 or shared
        known: dict[tuple[object, ...], list[float]] = {}
        for tile, flying in zip(tiles, in_flight(plan), strict=True):
            flow = flow_of(plan, tile, flying)
            key = (tile.layers, tile.weights, flow)
            if key not in known:
                known[key] = [
                    shard.needs(*tile.layers, flow) + (shard.state(*tile.layers).gradients if copies else 0.0)
                    for shard in self.costs.tile(tile.weights).shards
                ]
            for bytes_, index in zip(known[key], tile.ranks, strict=True):
                needed[index] = needed.get(index, 0.0) + bytes_
        if all(bytes_ <= self._usable[index] for index, bytes_ in needed.items()):
            return True
        if not copies and sum(len(tile.ranks) for tile in tiles) == len(needed):
            return False
        usable = [self._usable[index] for index in sorted(needed)]
        return all(i.total <= room for i, room in zip(rank_memory(plan, self.costs), usable, strict=True))


def describe_tiles(candidate: Candidate, num_layers: int) -> str:
    """`2 replicas x 2 stages x split 2, 8 micro-batches, 1f1b`."""
    rows: dict[Interval, list[Tile]] = {}
    for tile in candidate.tiles:
        rows.setdefault(tile.samples, []).append(tile)
    tail = f", {counted(candidate.micro_batches, 'micro-batch')}, {candidate.schedule}"
    are_rows = all(sum(len(t.layers) for t in tiles) == num_layers for tiles in rows.values())
    if not are_rows:
        ranks = len({rank for t in candidate.tiles for rank in t.ranks})
        return f"{counted(len(candidate.tiles), 'tile')} on {counted(ranks, 'device')}{tail}"
    stages = sorted({len(tiles) for tiles in rows.values()})
    splits = sorted({len(t.shards) for t in candidate.tiles})
    parts = [counted(len(rows), "replica")]
    if stages != [1]:
        parts.append(f"{_listed(stages)} stages")
    if splits != [1]:
        parts.append(f"split {_listed(splits)}")
    return " x ".join(parts) + tail


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
