"""The search: layouts of every degree that the strategy leaves open, the best of them simulated and then improved.

Degrees of data, tensor and pipeline parallelism, by device kind where kinds differ, and the number of micro-batches
are ranked by a formula (slowest stage x slots of the pipeline + gradient sum); only the most promising are laid out and
simulated. Few devices are searched over all tilings besides. Every limit counts candidates, never seconds, so that the
answer does not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import inf

from whale_trainer.cluster import Device
from whale_trainer.planning.search.candidates import Candidate, Weigher
from whale_trainer.planning.search.groups import Group, form_groups
from whale_trainer.planning.search.moves import improve
from whale_trainer.planning.search.replicas import Layout, Setting, best_layout, separate_layout
from whale_trainer.planning.search.small import MOST_DEVICES, search_small
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.times import KERNEL_S

SPLITS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of stages that are tried with many devices; with up to 16, all are."""
MOST_MICRO_BATCHES = 128
MOST_SMALL_SIMULATIONS = 400
MOST_COUNTS = 6
"""Plans whose numbers of micro-batches the search over all tilings tries."""
WORTH_IMPROVING = 1.15
"""Moving cuts rarely gains more than this."""


@dataclass(frozen=True)
class Limits:
    """How many candidates are looked at; fewer where each takes longer."""

    layouts: int
    """Degrees that are laid out and simulated."""
    starts: int
    """Of these, the best that are improved."""
    moves: int
    """Simulations for improving each of them."""

    @classmethod
    def of(cls, num_devices: int, num_layers: int) -> Limits:
        work = num_devices * num_layers
        if work <= 256:
            return cls(24, 3, 40)
        if work <= 8192:
            return cls(16, 2, 24)
        return cls(10, 1, 12) if work <= 65536 else cls(6, 1, 4)


@dataclass(frozen=True)
class Shape:
    """Degrees, before any cut or share is decided."""

    splits: tuple[tuple[str, int], ...]
    """Shards of a tensor group by device kind."""
    stages: tuple[tuple[str, int], ...]
    """Stages of a replica by kind where each replica is of one kind; one entry `*` where replicas may mix kinds."""
    num_devices: int
    """The fastest of the cluster that are used."""
    micro_batches: int
    schedule: str

    @property
    def num_stages(self) -> int:
        return max(stages for _, stages in self.stages)


@dataclass
class SearchSpace:
    """What the search may choose from."""

    weigher: Weigher
    setting_of: Callable[[int, str], Setting]
    """The setting for (micro-batches, schedule)."""
    variants: tuple[tuple[int | None, str], ...]
    speed: Callable[[Device], float]
    most_shards: int
    can_be_cut: bool
    _paces: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _kinds: dict[int, dict[str, tuple[Device, int]]] = field(default_factory=dict)
    _sums: dict[tuple[int, int], float] = field(default_factory=dict)

    def kinds_of(self, num_devices: int) -> dict[str, tuple[Device, int]]:
        """By kind, one of the `num_devices` fastest devices and how many of them there are."""
        if num_devices not in self._kinds:
            found: dict[str, tuple[Device, int]] = {}
            for device in self.devices[:num_devices]:
                first, count = found.get(device.kind.name, (device, 0))
                found[device.kind.name] = (first, count + 1)
            self._kinds[num_devices] = found
        return self._kinds[num_devices]

    def sum_s(self, num_devices: int, copies: int) -> float:
        """Seconds per byte of a sum over so many of the slowest of the devices."""
        key = (num_devices, copies)
        if key not in self._sums:
            self._sums[key] = self.weigher.times.sum_costs(self.devices[:num_devices][::-1][:copies])[1]
        return self._sums[key]

    def pace(self, device: Device, degree: int) -> tuple[float, float]:
        """(fixed, per sample) seconds of all layers on a group of `degree` such devices."""
        key = (device.kind.name, degree)
        if key not in self._paces:
            few, many = 1.0, 9.0
            a, b = (float(self.weigher.times.group((device,) * degree, (1,) * degree, n).both[-1]) for n in (few, many))
            slope = (b - a) / (many - few)
            self._paces[key] = (max(0.0, a - slope * few), slope)
        return self._paces[key]

    @property
    def layers(self) -> Interval:
        return Interval(0, self.weigher.costs.model.num_layers)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Fastest kinds first, in the order of the cluster within a kind."""
        return tuple(sorted(self.weigher.cluster.devices, key=lambda d: (-self.speed(d), d.kind.name, d.index)))


def search(space: SearchSpace) -> list[Candidate]:
    """The candidates that were simulated, best first; empty when nothing fits in memory."""
    weigher = space.weigher
    limits = Limits.of(len(space.devices), len(space.layers))
    found: dict[Candidate, None] = {}
    # gpipe only needs more memory and has the same slots: it is tried where 1f1b has shown what is good
    first = space.variants[:1]
    for shape in _ranked(space, first)[: limits.layouts]:
        layout = _lay_out(space, shape)
        if layout is not None:
            candidate = weigher.weigh(tuple(layout.tiles()), shape.micro_batches, shape.schedule)
            if candidate is not None:
                found[candidate] = None
    best = sorted(found, key=lambda c: c.rank_key)
    for start in best[: limits.starts]:
        if start.step_s < best[0].step_s * WORTH_IMPROVING:
            found[improve(weigher, start, limits.moves)] = None
    if len(space.devices) <= MOST_DEVICES and space.can_be_cut:
        for candidate in _search_few(space, found):
            found[candidate] = None
    for _, schedule in space.variants[1:]:
        for start in sorted(found, key=lambda c: c.rank_key)[: limits.starts]:
            other = weigher.weigh(start.tiles, start.micro_batches, schedule)
            if other is not None:
                found[other] = None
                if other.step_s < start.step_s:
                    found[improve(weigher, other, limits.moves)] = None
    return sorted(found, key=lambda c: c.rank_key)


def _search_few(space: SearchSpace, known: Sequence[Candidate] | dict[Candidate, None]) -> list[Candidate]:
    best_s = min((c.step_s for c in known), default=inf)
    variants = []
    promising = {c.micro_batches for c in sorted(known, key=lambda c: c.rank_key)[:MOST_COUNTS]}
    # the bounds of that search are those of whole backward passes
    for micro_batches, schedule in (v for v in space.variants if v[1] in ("1f1b", "gpipe")):
        counts = [micro_batches] if micro_batches else sorted(promising or {1, 2, 4, 8})
        variants += [(m, schedule) for m in counts if m <= space.weigher.global_batch]
    found = search_small(space.weigher, variants, best_s, MOST_SMALL_SIMULATIONS, space.most_shards)
    if found:
        found.append(improve(space.weigher, found[0], Limits.of(1, 1).moves))
    return found


def _ranked(space: SearchSpace, variants: Sequence[tuple[int | None, str]]) -> list[Shape]:
    """All shapes, the most promising by the formula first; ties keep their order, in which simple ones come first."""
    estimated: list[tuple[float, int, Shape]] = []
    for shape in _shapes(space, variants):
        estimate = _estimate_s(space, shape)
        if estimate < inf:
            estimated.append((float(f"{estimate:.6e}"), len(estimated), shape))
    estimated.sort(key=lambda e: e[:2])
    # several numbers of micro-batches of one shape tell little: two of each are enough
    seen: dict[object, int] = {}
    kept = []
    for _, _, shape in estimated:
        key = (shape.splits, shape.stages, shape.num_devices)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2:
            kept.append(shape)
    return kept


def _shapes(space: SearchSpace, variants: Sequence[tuple[int | None, str]]) -> Iterator[Shape]:
    for num_devices in _prefixes(space):
        devices = space.devices[:num_devices]
        kinds = tuple(dict.fromkeys(d.kind.name for d in devices))
        for splits in _splits(space, devices, kinds):
            degrees = dict(splits)
            num_groups = {k: space.kinds_of(num_devices)[k][1] // degrees[k] for k in kinds}
            for stages in _stages(space, num_groups):
                for micro_batches, schedule in variants:
                    for count in _counts(space, stages, num_groups, micro_batches):
                        yield Shape(splits, stages, num_devices, count, schedule)


def _prefixes(space: SearchSpace) -> list[int]:
    """All devices, then without the slowest kind, and so on; one device at last."""
    speeds = [space.speed(d) for d in space.devices]
    ends = [i for i in range(1, len(speeds)) if speeds[i] < speeds[i - 1]]
    return list(dict.fromkeys([len(speeds), *reversed(ends), 1]))


def _splits(
    space: SearchSpace, devices: Sequence[Device], kinds: tuple[str, ...]
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Shards by kind: equal ones first, then unequal ones for up to three kinds."""
    most = {}
    for kind in kinds:
        nodes = Counter(d.node for d in devices if d.kind.name == kind)
        most[kind] = min(space.most_shards, max(nodes.values()))
    options = [[s for s in SPLITS if s <= most[k]] for k in kinds]
    choices = product(*options) if len(kinds) <= 3 else ((s,) * len(kinds) for s in options[0])
    for choice in sorted(choices, key=lambda c: (len(set(c)) > 1, sum(c), c)):
        yield tuple(zip(kinds, choice, strict=True))


def _stages(space: SearchSpace, num_groups: dict[str, int]) -> Iterator[tuple[tuple[str, int], ...]]:
    total = sum(num_groups.values())
    most = min(len(space.layers), total) if space.can_be_cut else 1
    options = [s for s in range(1, most + 1) if total <= 16 or s in STAGES]
    yield from ((("*", s),) for s in options)
    if 2 <= len(num_groups) <= 3:
        own = [[s for s in options if s <= count and count % s == 0] for count in num_groups.values()]
        for choice in product(*own):
            if len(set(choice)) > 1:
                yield tuple(zip(num_groups, choice, strict=True))


def _counts(
    space: SearchSpace, stages: tuple[tuple[str, int], ...], num_groups: dict[str, int], fixed: int | None
) -> list[int]:
    """Numbers of micro-batches worth a look: about four for each stage, fewer and more."""
    num_stages = max(s for _, s in stages)
    replicas = sum(num_groups.values()) // num_stages if stages[0][0] == "*" else 1
    most = min(MOST_MICRO_BATCHES, max(1, space.weigher.global_batch // max(1, replicas)))
    if fixed:
        return [fixed] if fixed <= space.weigher.global_batch else []
    counts = [m for m in (1, 2, 4, 8, 16, 32, 64, 128) if m <= most]
    # one stage has no bubble: more micro-batches only save memory
    return counts if num_stages == 1 else [m for m in counts if num_stages <= 2 * m <= 16 * num_stages] or counts[-1:]


def _estimate_s(space: SearchSpace, shape: Shape) -> float:
    """Slowest stage x slots + the sum of gradients, from averages: for ranking only; inf where too little memory."""
    weigher = space.weigher
    degrees = dict(shape.splits)
    stages = dict(shape.stages)
    height = -(-weigher.global_batch // shape.micro_batches)
    costs = weigher.costs
    rate = 0.0
    memory = 0.0
    for kind, degree in shape.splits:
        example, members = space.kinds_of(shape.num_devices)[kind]
        count = members // degree
        num_stages = stages.get(kind, stages.get("*", 1))
        samples = max(1.0, height * num_stages / max(1, shape.num_devices // degree))
        fixed_s, per_sample_s = space.pace(example, degree)
        rate += count / (per_sample_s + fixed_s / samples)
        memory += count * degree * example.kind.memory_bytes
    shard = costs.tile((1,) * max(degrees.values())).shards[0]
    copies = max(1, shape.num_devices // (max(degrees.values()) * shape.num_stages))
    if shard.memory(0, len(space.layers), 0, 0) * max(degrees.values()) * copies > 2 * memory:
        return inf
    compute_s = height / rate * (shape.micro_batches + shape.num_stages - 1)
    kernels = sum(layer.num_kernels for layer in costs.model.layers) / shape.num_stages
    overhead_s = 3 * KERNEL_S * kernels * shape.micro_batches if shape.num_stages > 1 else 0.0
    cut, whole, tied = weigher.times.gradient_bytes
    num_bytes = (sum(cut) + sum(whole) + sum(size for _, _, size in tied)) / shape.num_stages / max(degrees.values())
    sum_s = num_bytes * space.sum_s(shape.num_devices, copies) if copies > 1 else 0.0
    return compute_s + overhead_s + 0.7 * sum_s


def _lay_out(space: SearchSpace, shape: Shape) -> Layout | None:
    setting = space.setting_of(shape.micro_batches, shape.schedule)
    groups = _groups(space, shape)
    if shape.stages[0][0] == "*":
        num_stages = shape.num_stages
        if len(groups) < num_stages:
            return None
        # what makes no whole replica is left out, the slowest first
        ordered = sorted(groups, key=lambda g: (-sum(space.speed(d) for d in g.devices), g.first))
        groups = sorted(ordered[: len(groups) // num_stages * num_stages], key=lambda g: g.first)
        return best_layout(setting, space.layers, groups, num_stages, stages_after=0, least_share=0)
    return separate_layout(setting, space.layers, groups, dict(shape.stages))


def _groups(space: SearchSpace, shape: Shape) -> list[Group]:
    devices = sorted(space.devices[: shape.num_devices], key=lambda d: d.index)
    degrees = dict(shape.splits)
    if len(set(degrees.values())) == 1:
        size = next(iter(degrees.values()))
        return form_groups(devices, size, len(devices) // size, space.speed)
    groups: list[Group] = []
    for kind, size in degrees.items():
        own = [d for d in devices if d.kind.name == kind]
        groups += form_groups(own, size, len(own) // size, space.speed)
    return sorted(groups, key=lambda g: g.first)
