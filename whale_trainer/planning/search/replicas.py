"""The layout of one section: groups to replicas and stages, layers to stages, samples to replicas.

All three are chosen together so that the slowest replica is through all micro-batches as early as possible, each device
within its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations_with_replacement, islice
from math import comb, inf

from whale_trainer.cluster import Device
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.plan import Shard, Tile
from whale_trainer.planning.search.balance import SLACKS, allot, shard_weights
from whale_trainer.planning.search.cutting import Chain, Cutting, StageTable
from whale_trainer.planning.search.groups import Group
from whale_trainer.planning.shares import Interval, intervals
from whale_trainer.planning.simulation.times import Seconds

MOST_ARRANGEMENTS = 400
"""Ways of dealing groups to replicas that are tried, after the three obvious ones; fewer for large micro-batches."""
MOST_SHARES = 40_000
MOST_COMBINATIONS = 2000


@dataclass(frozen=True)
class Setting:
    """What all sections of a plan have in common."""

    costs: CostModel
    micro_batches: int
    height: int
    """Samples of a full micro-batch."""
    schedule: str
    speed: Callable[[Device], float]
    """By which shards are weighed and groups are ordered."""
    seconds: Callable[[tuple[Device, ...], tuple[int, ...], int], Seconds]
    """Prefix sums over the layers of a group's seconds, forward and backward, for a number of samples."""
    free: Callable[[Device], float] | None
    """Bytes that a device has left; None where memory does not count."""

    def in_flight(self, position: int, num_stages: int, stages_after: int) -> int:
        """Micro-batches whose activations a stage holds at once."""
        if self.schedule == "gpipe":
            return self.micro_batches
        return min(self.micro_batches, num_stages - position + stages_after)


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one group."""

    layers: Interval
    group: Group
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Replicas, each a list of stages, and the samples of a micro-batch that each computes."""

    replicas: tuple[tuple[Stage, ...], ...]
    samples: tuple[int, ...]
    pace_s: float
    """Seconds of compute of the slowest replica for a micro-batch, its part of filling the pipeline included."""

    @property
    def num_stages(self) -> int:
        return max(map(len, self.replicas))

    @property
    def devices(self) -> tuple[Device, ...]:
        found = {d.index: d for replica in self.replicas for stage in replica for d in stage.group.devices}
        return tuple(found[index] for index in sorted(found))

    def tiles(self) -> Iterator[Tile]:
        """The tiles, with the devices' indices in the cluster as ranks."""
        for replica, samples in zip(self.replicas, intervals(self.samples), strict=True):
            for stage in replica:
                pairs = zip(stage.group.devices, stage.weights, strict=True)
                yield Tile(stage.layers, samples, tuple(Shard(d.index, weight) for d, weight in pairs))


@dataclass
class ReplicaSolver:
    """Answers, for any choice of group types as one replica, how fast it is and how its layers are cut."""

    setting: Setting
    layers: Interval
    groups: Sequence[Group]
    stages_after: int
    samples: int
    """Of a replica, about: times are taken in proportion to it."""
    _tables: dict[float, list[StageTable]] = field(default_factory=dict)
    _chains: dict[tuple[tuple[int, ...], int], tuple[Chain, float] | None] = field(default_factory=dict)
    _paces: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)
    _free_chains: dict[tuple[tuple[int, ...], float], Chain | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [self._key(group) for group in self.groups]
        self.types = list(dict.fromkeys(keys))
        self.type_of = [self.types.index(key) for key in keys]
        self.examples = [next(g for g, key in zip(self.groups, keys, strict=True) if key == k) for k in self.types]
        self._type_by_first = {group.first: kind for group, kind in zip(self.groups, self.type_of, strict=True)}

    def _key(self, group: Group) -> tuple[tuple[float, ...], tuple[float, ...], int]:
        free = self.setting.free
        speeds = tuple(self.setting.speed(d) for d in group.devices)
        return speeds, tuple(free(d) if free else inf for d in group.devices), len(group.nodes)

    def tables(self, slack: float) -> list[StageTable]:
        """One table for each group type, with shard weights that keep to the free memory as `slack` says."""
        if slack not in self._tables:
            made = []
            for (speeds, free, _), group in zip(self.types, self.examples, strict=True):
                weights = shard_weights(speeds, free, slack)
                room = free if self.setting.free else None
                seconds = self.setting.seconds(group.devices, weights, self.samples) / self.samples
                made.append(StageTable(self.setting.costs.tile(weights), seconds, room, self.layers))
            self._tables[slack] = made
        return self._tables[slack]

    def chain(self, counts: tuple[int, ...], samples: int) -> tuple[Chain, float] | None:
        """The best stages for a replica of `counts[t]` groups of each type, and the slack; None if nothing fits."""
        key = (counts, samples)
        if key not in self._chains:
            self._chains[key] = self._solve(counts, samples)
        return self._chains[key]

    def _solve(self, counts: tuple[int, ...], samples: int) -> tuple[Chain, float] | None:
        tried: set[tuple[tuple[int, ...], ...]] = set()
        for slack in SLACKS if self.setting.free else SLACKS[:1]:
            tables = self.tables(slack)
            weights = tuple(table.costs.weights for table in tables)
            if weights in tried:
                continue
            tried.add(weights)
            cutting = self._cutting(tables, counts, samples)
            if (counts, slack) not in self._free_chains:
                free_tables = [StageTable(t.costs, t.seconds, None, t.layers) for t in tables]
                self._free_chains[counts, slack] = self._cutting(free_tables, counts, samples).best()
            chain = self._free_chains[counts, slack]
            if chain is None or not cutting.fits(chain):
                chain = cutting.best()
            if chain is not None:
                return chain, slack
        return None

    def _cutting(self, tables: Sequence[StageTable], counts: tuple[int, ...], samples: int) -> Cutting:
        in_flight = partial(self.setting.in_flight, num_stages=sum(counts), stages_after=self.stages_after)
        return Cutting(tables, counts, samples, in_flight, self.setting.micro_batches)

    def cost(self, counts: tuple[int, ...], samples: int) -> float:
        """Seconds of a micro-batch on the replica, its part of filling the pipeline included; inf where it does not
        fit."""
        if samples == 0:
            return 0.0
        key = (counts, samples)
        if key not in self._paces:
            found = self.chain(counts, samples)
            chain, slack = found or (None, 0.0)
            self._paces[key] = (
                inf if chain is None else self._cutting(self.tables(slack), counts, samples).pace_s(chain)
            )
        return samples * self._paces[key]

    def stages(self, members: Sequence[Group], counts: tuple[int, ...], samples: int) -> tuple[Stage, ...]:
        """The stages of a replica made of these groups, as equal as they can be."""
        found = self.chain(counts, samples)
        assert found is not None
        chain, slack = found
        tables = self.tables(slack)
        waiting: dict[int, list[Group]] = {}
        for group in members:
            waiting.setdefault(self._type_by_first[group.first], []).append(group)
        return tuple(
            Stage(part, waiting[kind].pop(0), tables[kind].costs.weights)
            for kind, part in zip(chain.order, chain.layers, strict=True)
        )


def best_layout(
    setting: Setting, layers: Interval, groups: Sequence[Group], num_stages: int, *, stages_after: int, least_share: int
) -> Layout | None:
    """The best way to run `layers` on `groups` as replicas of `num_stages` groups each; None if nothing fits in memory.

    `least_share` 0 lets replicas that would only slow the step down go without samples; they are not in the layout.
    """
    samples = max(1, setting.height // max(1, len(groups) // num_stages))
    solver = ReplicaSolver(setting, layers, groups, stages_after, samples)
    return _best_of(solver, _arrangements(solver, num_stages), least_share)


def separate_layout(
    setting: Setting, layers: Interval, groups: Sequence[Group], stages_of: Mapping[str, int]
) -> Layout | None:
    """Replicas that each have groups of one kind only, with as many stages as `stages_of` says for the kind."""
    replicas = sum(sum(g.devices[0].kind.name == kind for g in groups) // stages for kind, stages in stages_of.items())
    solver = ReplicaSolver(setting, layers, groups, 0, max(1, setting.height // max(1, replicas)))
    arrangement: list[tuple[int, ...]] = []
    for number, group in enumerate(solver.examples):
        stages = stages_of[group.devices[0].kind.name]
        counts = tuple(stages if i == number else 0 for i in range(len(solver.types)))
        arrangement += [counts] * (solver.type_of.count(number) // stages)
    return _best_of(solver, [arrangement], 0) if arrangement else None


def _best_of(solver: ReplicaSolver, arrangements: Iterable[list[tuple[int, ...]]], least_share: int) -> Layout | None:
    """The arrangement with the least time of the slowest stage."""
    setting = solver.setting
    best: tuple[float, list[tuple[int, ...]], list[int]] | None = None
    for arrangement in arrangements:
        costs = [partial(solver.cost, counts) for counts in arrangement]
        shares = allot(setting.height, costs, minimum=least_share)
        if shares is None:
            continue
        slowest = max(cost(share) for cost, share in zip(costs, shares, strict=True))
        if best is None or slowest < best[0] * (1 - 1e-9):
            best = (slowest, arrangement, shares)
    return None if best is None else _layout(solver, *best)


def _layout(
    solver: ReplicaSolver, pace_s: float, arrangement: Sequence[tuple[int, ...]], shares: Sequence[int]
) -> Layout:
    waiting: dict[int, list[Group]] = {}
    for group, kind in zip(solver.groups, solver.type_of, strict=True):
        waiting.setdefault(kind, []).append(group)
    made = []
    for counts, share in zip(arrangement, shares, strict=True):
        members = [waiting[kind].pop(0) for kind, count in enumerate(counts) for _ in range(count)]
        if share:
            made.append((solver.stages(members, counts, share), share))
    made.sort(key=lambda replica: min(stage.group.first for stage in replica[0]))
    return Layout(tuple(stages for stages, _ in made), tuple(share for _, share in made), pace_s)


def _arrangements(solver: ReplicaSolver, num_stages: int) -> Iterator[list[tuple[int, ...]]]:
    """Ways to deal the groups to replicas, each replica told by how many groups of each type it has."""
    num_replicas, num_types = len(solver.groups) // num_stages, len(solver.types)
    ordered = sorted(solver.type_of, key=lambda t: (-sum(solver.types[t][0]), t))
    alike = [ordered[i : i + num_stages] for i in range(0, len(ordered), num_stages)]
    striped = [ordered[i::num_replicas] for i in range(num_replicas)]
    rows = [
        ordered[i : i + num_replicas][:: 1 - 2 * (i // num_replicas % 2)] for i in range(0, len(ordered), num_replicas)
    ]
    seen = set()
    for dealt in (alike, striped, [list(column) for column in zip(*rows, strict=True)]):
        arrangement = [tuple(Counter(members)[t] for t in range(num_types)) for members in dealt]
        if tuple(sorted(arrangement)) not in seen:
            seen.add(tuple(sorted(arrangement)))
            yield arrangement
    if num_replicas > 1 and comb(num_types + num_stages - 1, num_stages) <= MOST_COMBINATIONS:
        options = [
            tuple(members.count(t) for t in range(num_types))
            for members in combinations_with_replacement(range(num_types), num_stages)
        ]
        available = tuple(Counter(solver.type_of)[t] for t in range(num_types))
        most = min(MOST_ARRANGEMENTS, max(4, MOST_SHARES // solver.setting.height))
        for arrangement in islice(_dealings(options, available, num_replicas), most):
            if tuple(sorted(arrangement)) not in seen:
                yield arrangement


def _dealings(
    options: Sequence[tuple[int, ...]], available: tuple[int, ...], num_replicas: int
) -> Iterator[list[tuple[int, ...]]]:
    """All multisets of `num_replicas` options that use up exactly what is available; as many of the first as possible
    come first."""
    if num_replicas == 0:
        if not any(available):
            yield []
        return
    if not options:
        return
    most = [max(option[t] for option in options) for t in range(len(available))]
    if any(a > m * num_replicas for a, m in zip(available, most, strict=True)):
        return
    first = options[0]
    count = min([num_replicas, *(a // o for a, o in zip(available, first, strict=True) if o)])
    for times in range(count, -1, -1):
        left = tuple(a - times * o for a, o in zip(available, first, strict=True))
        for rest in _dealings(options[1:], left, num_replicas - times):
            yield [first] * times + rest
