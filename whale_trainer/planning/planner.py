"""From model, cluster and strategy to a plan: the decisions, or the reason why there is none.

Each section of layers (a scope, or the default) is laid out on its devices by `replicas.best_layout`; what stands here
is the order of the questions, the degrees that are left to the planner, and the final accounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whale_trainer.cluster import Cluster, Device
from whale_trainer.errors import ConfigError, PlanError, Problem
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.allocation import Claim, degree_choices, hand_out
from whale_trainer.planning.costs import CostModel
from whale_trainer.planning.groups import form_groups
from whale_trainer.planning.load import step_s
from whale_trainer.planning.memory import check_memory, rank_memory, usable_bytes, with_memory
from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.precision import check_dtype, precision_of
from whale_trainer.planning.replicas import Layout, Setting, Stage, best_layout
from whale_trainer.planning.scopes import DEFAULT, Section, fixed, sections_of
from whale_trainer.planning.strategy import PRESETS, Degrees, StrategySpec, load_strategy
from whale_trainer.planning.times import Seconds, TimeModel

AUTO_ORDER = ("replicate", "hybrid", "pipeline", "split", "single")
"""Presets that `strategy=auto` compares; of equally fast ones the first is taken."""


@dataclass(frozen=True)
class _Job:
    """The whole question."""

    model: ModelSpec
    cluster: Cluster
    strategy: StrategySpec
    global_batch: int
    costs: CostModel
    times: TimeModel

    @property
    def micro_batches(self) -> int:
        return self.strategy.micro_batches

    @property
    def may_leave(self) -> bool:
        return self.strategy.left_over == "allow"

    def speed(self, device: Device) -> float:
        """FLOP/s by which work is shared; the base line takes all devices as equal."""
        return 1.0 if self.strategy.balance == "even" else device.kind.speed(self.costs.precision.dtype)

    def seconds(self, devices: tuple[Device, ...], weights: tuple[int, ...], samples: int) -> Seconds:
        """Prefix sums over the layers of a group's time; the base line takes all devices as its first one."""
        if self.strategy.balance == "even":
            kind = self.cluster.devices[0].kind
            devices = tuple(device.model_copy(update={"kind": kind}) for device in devices)
        return self.times.group(devices, weights, samples).both


def build_plan(
    model: ModelSpec,
    cluster: Cluster,
    strategy: StrategySpec,
    *,
    global_batch: int,
    precision: str = "32-true",
    optimizer_bytes_per_element: int = 8,
) -> Plan:
    """The plan that the strategy's scopes give on this cluster, each device's part proportional to what it can do.

    Deterministic. Raises `ConfigError` or `PlanError`, with the numbers and a remedy, when there is no such plan.
    """
    if cluster.is_auto:
        raise ConfigError([Problem("cluster.nodes", "auto has not been filled in with what is found on this machine")])
    costs = CostModel(model, precision_of(precision), optimizer_bytes_per_element)
    job = _Job(model, cluster, strategy, global_batch, costs, TimeModel(costs, cluster))
    return _best_preset(job) if strategy.is_auto else _plan(job)


def _best_preset(job: _Job) -> Plan:
    found: list[tuple[float, str, Plan]] = []
    failures: list[ConfigError | PlanError] = []
    for name in AUTO_ORDER:
        changes = {"schedule": job.strategy.schedule, "balance": job.strategy.balance}
        own = {"micro_batches": job.micro_batches} if job.micro_batches > 1 else {}
        try:
            plan = _plan(replace(job, strategy=load_strategy({**PRESETS[name], **changes, **own})))
        except (ConfigError, PlanError) as error:
            failures.append(error)
            continue
        kinds = {d.kind.name: d.kind for d in job.cluster.devices}
        speeds = [kinds[d.kind].speed(job.costs.precision.dtype) for d in plan.devices]
        found.append((step_s(plan, job.model, speeds), name, plan))
    if not found:
        raise failures[0]
    least = min(time for time, _, _ in found)
    _, name, plan = next(entry for entry in found if entry[0] <= least * (1 + 1e-9))
    note = f"strategy=auto fell back to the preset with the least compute time: {name}."
    return replace(plan, notes=(note, *plan.notes))


def _plan(job: _Job) -> Plan:
    _check_batch(job)
    sections = sections_of(job.strategy, job.model)
    claims = _claims(job, sections)
    devices = hand_out(claims, job.cluster, may_leave=job.may_leave, speed=job.speed)
    layouts = _lay_out(job, sections, devices, with_limits=True) or _lay_out(job, sections, devices, with_limits=False)
    assert layouts is not None
    used = {d.index: d for _, layout in layouts for d in layout.devices}
    ordered = [used[index] for index in sorted(used)]
    check_dtype(job.costs.precision, ordered)
    plan = _assemble(job, layouts, ordered)
    items = rank_memory(plan, job.costs)
    check_memory(plan, items, [usable_bytes(d.kind) for d in ordered])
    return with_memory(plan, items)


def _check_batch(job: _Job) -> None:
    batch, micro_batches = job.global_batch, job.micro_batches
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ConfigError([Problem("global_batch", f"{batch!r} is not a number of samples; allowed: integers from 1")])
    degrees: list[Degrees] = [*job.strategy.scopes, *([job.strategy.default] if job.strategy.default else [])]
    replicas = max(fixed(d.replicate) for d in degrees)
    needed = micro_batches * replicas
    if batch < needed:
        product = f"{micro_batches} micro-batches" + (f" x {replicas} replicas = {needed}" if replicas > 1 else "")
        message = (
            f"{batch} samples are fewer than {product}, each of which needs at least one: "
            f"use global_batch={needed} or more, or strategy.micro_batches={max(1, batch // replicas)} or less"
        )
        raise ConfigError([Problem("global_batch", message)])


def _claims(job: _Job, sections: Sequence[Section]) -> list[Claim]:
    """One claim for each scope that has devices of its own, in the order of the layers."""
    claims: dict[int, Claim] = {}
    for section in sections:
        if not section.is_colocated:
            flops = sum(layer.forward_flops for layer in job.model.layers[slice(*section.layers)])
            before = claims.get(section.scope, Claim(section, 0.0))
            claims[section.scope] = Claim(before.section, before.flops + flops)
    return list(claims.values())


def _lay_out(
    job: _Job, sections: Sequence[Section], given: Mapping[int, tuple[Device, ...]], *, with_limits: bool
) -> list[tuple[Section, Layout]] | None:
    """A layout for each section; None when one does not fit in memory."""
    free = {d.index: float(usable_bytes(d.kind)) for d in job.cluster.devices}
    setting = Setting(
        job.costs,
        job.micro_batches,
        -(-job.global_batch // job.micro_batches),
        job.strategy.schedule,
        job.speed,
        job.seconds,
        (lambda device: free[device.index]) if with_limits else None,
    )
    after = _stages_after(sections, job.cluster)
    found: dict[int, Layout] = {}
    homes: dict[int, tuple[Device, ...]] = dict(given)
    for position in sorted(range(len(sections)), key=lambda p: sections[p].scope):
        section = sections[position]
        if section.is_colocated:
            homes.setdefault(section.scope, homes[_base(section, job.strategy)])
        layout = _best(job, section, homes[section.scope], setting, after[position])
        if layout is None:
            return None
        found[position] = layout
        homes[section.scope] = layout.devices
        for stage_position, stage, samples in _stages(layout):
            flying = setting.in_flight(stage_position, layout.num_stages, after[position])
            for shard, device in enumerate(stage.group.devices):
                costs = job.costs.tile(stage.weights).shards[shard]
                free[device.index] -= costs.memory(stage.layers.start, stage.layers.stop, samples, flying)
    return [(sections[position], found[position]) for position in range(len(sections))]


def _base(section: Section, strategy: StrategySpec) -> int:
    """The scope whose devices a colocated scope shares: the one before it, or the default."""
    return section.scope - 1 if section.scope > 0 else DEFAULT


def _stages_after(sections: Sequence[Section], cluster: Cluster) -> list[int]:
    """For each section, the most stages that may come after it."""
    counts = [
        min(len(s.layers), len(cluster.devices)) if s.degrees.stages == "auto" else fixed(s.degrees.stages)
        for s in sections
    ]
    return [sum(counts[position + 1 :]) for position in range(len(sections))]


def _stages(layout: Layout) -> Iterator[tuple[int, Stage, int]]:
    """Position in its replica, stage, and samples of a micro-batch, for every stage of the layout."""
    for replica, samples in zip(layout.replicas, layout.samples, strict=True):
        for position, stage in enumerate(replica):
            yield position, stage, samples


def _best(job: _Job, section: Section, devices: Sequence[Device], setting: Setting, after: int) -> Layout | None:
    """The layout with the least compute time of a step, over the degrees that are left to the planner."""
    best: tuple[float, Layout] | None = None
    most_replicas = job.global_batch // job.micro_batches
    choices = degree_choices(section, devices, job.model, most_replicas, must_fill=not job.may_leave)
    for replicas, stages, split in choices:
        groups = form_groups(devices, split, replicas * stages, job.speed)
        least_share = 0 if section.degrees.replicate == "auto" else 1
        layout = best_layout(setting, section.layers, groups, stages, stages_after=after, least_share=least_share)
        if layout is not None:
            time = layout.slowest_s * (job.micro_batches + stages - 1)
            if best is None or time < best[0] * (1 - 1e-9):
                best = (time, layout)
    return None if best is None else best[1]


def _assemble(job: _Job, layouts: Sequence[tuple[Section, Layout]], devices: Sequence[Device]) -> Plan:
    """The plan with ranks counted over the used devices, in the order of the cluster."""
    rank_of = {device.index: rank for rank, device in enumerate(devices)}
    tiles = [
        Tile(tile.layers, tile.samples, tuple(Shard(rank_of[s.rank], s.weight) for s in tile.shards))
        for _, layout in layouts
        for tile in layout.tiles()
    ]
    return Plan(
        tiles=tuple(sorted(tiles, key=lambda t: (t.layers.start, t.samples.start))),
        layer_names=job.model.layer_names,
        micro_batches=job.micro_batches,
        global_batch=job.global_batch,
        schedule=job.strategy.schedule,
        devices=tuple(PlannedDevice(r, d.kind.name, d.node, d.kind.memory_bytes) for r, d in enumerate(devices)),
        left_out=tuple(str(d) for d in job.cluster.devices if d.index not in rank_of),
        notes=tuple(_notes(job, layouts, devices)),
    )


def _notes(job: _Job, layouts: Sequence[tuple[Section, Layout]], devices: Sequence[Device]) -> list[str]:
    notes = []
    for section, layout in layouts:
        spanning = [stage.group for replica in layout.replicas for stage in replica if len(stage.group.nodes) > 1]
        for group in dict.fromkeys(spanning):
            nodes = ", ".join(group.nodes)
            notes.append(f"A tensor group of {len(group.devices)} spans the nodes {nodes}: its sums cross the network.")
        split = len(layout.replicas[0][0].group.devices)
        taken = {"replicate": len(layout.replicas), "stages": layout.num_stages, "split": split}
        chosen = [f"{key} {value}" for key, value in taken.items() if getattr(section.degrees, key) == "auto"]
        if chosen:
            notes.append(f"{section.path}: auto became {', '.join(chosen)}.")
    if len(devices) < len(job.cluster.devices):
        used = f"{len(devices)} of {len(job.cluster.devices)} devices"
        notes.append(f"{used} are used: under these degrees the others would not make a step faster.")
    return notes
