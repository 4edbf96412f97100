"""Plans of strategies with scopes: each section of layers laid out on its devices, over the degrees it leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale_trainer.cluster import Cluster, Device
from whale_trainer.errors import ConfigError, PlanError, Problem
from whale_trainer.planning.costs.memory import check_memory, rank_memory, usable_bytes
from whale_trainer.planning.plan import Plan, Tile
from whale_trainer.planning.precision import check_dtype
from whale_trainer.planning.scopes import DEFAULT, Section, fixed, sections_of
from whale_trainer.planning.search.allocation import Claim, degree_choices, hand_out
from whale_trainer.planning.search.candidates import Candidate
from whale_trainer.planning.search.chunks import in_chunks
from whale_trainer.planning.search.groups import form_groups
from whale_trainer.planning.search.job import Job
from whale_trainer.planning.search.replicas import Layout, Setting, Stage, best_layout
from whale_trainer.planning.search.whale import whale_layout
from whale_trainer.planning.strategy import Degrees, StrategySpec

Choice = tuple[int, int, int]
"""Degrees (replicate, stages, split)."""
Layouts = list[tuple[Section, Layout]]


@dataclass(frozen=True)
class Found:
    """A plan that answers the question, with its simulated step, and what the user should know of it."""

    candidate: Candidate
    notes: tuple[str, ...] = ()


def from_scopes(job: Job) -> list[Found]:
    """The layouts of the strategy's scopes that fit, over all that they leave open, the fastest first.

    Raises `ConfigError` or `PlanError` where there is none.
    """
    found: list[Found] = []
    failures: list[ConfigError | PlanError] = []
    for variant in job.variants():
        try:
            found += _layouts(variant)
        except (ConfigError, PlanError) as error:
            failures.append(error)
    if not found:
        raise failures[0] if failures else _over_full(job)
    return sorted(found, key=lambda f: f.candidate.rank_key)


def tightest(job: Job) -> tuple[float, Plan, Sequence[Device]]:
    """The plan when memory is no limit, with the part of a device's memory that it needs at worst, and its devices."""
    plans: list[tuple[float, int, Plan, list[Device]]] = []
    for variant in job.variants():
        try:
            sections, devices = _sections(variant)
            layouts = _lay_out(variant, sections, devices, None, with_limits=False)
        except (ConfigError, PlanError):
            continue
        if layouts is None:
            continue
        used = _devices_of(layouts)
        plan = variant.weigher.plan(_tiles(layouts), variant.micro_batches, variant.strategy.schedule)
        items = rank_memory(plan, variant.costs)
        excess = max(i.total / usable_bytes(d.kind) for i, d in zip(items, used, strict=True))
        plans.append((excess, len(plans), plan, used))
    if not plans:
        raise PlanError("these devices cannot run this model in any way: use other degrees or other devices")
    excess, _, plan, used = min(plans, key=lambda p: p[:2])
    return excess, plan, used


def _sections(job: Job) -> tuple[tuple[Section, ...], dict[int, tuple[Device, ...]]]:
    check_batch(job)
    sections = sections_of(job.strategy, job.model)
    return sections, hand_out(_claims(job, sections), job.cluster, may_leave=job.may_leave, speed=job.speed)


def _layouts(job: Job) -> list[Found]:
    """The layouts for one number of micro-batches and one schedule: of a single section for all its degrees, of
    several sections the one with the least compute time in each."""
    sections, devices = _sections(job)
    found = []
    for choice in _choices(job, sections, devices):
        layouts = _lay_out(job, sections, devices, choice, with_limits=True)
        if layouts is None:
            continue
        layouts = [(section, _in_chunks(job, section, layout)) for section, layout in layouts]
        used = _devices_of(layouts)
        check_dtype(job.costs.precision, used)
        candidate = job.weigher.weigh(_tiles(layouts), job.micro_batches, job.strategy.schedule)
        if candidate is not None:
            found.append(Found(candidate, tuple(_notes(job, layouts, used))))
    return found


def _in_chunks(job: Job, section: Section, layout: Layout) -> Layout:
    """The layout with as many chunks as the scope wants; where it leaves them open, as many as there are layers for."""
    degrees = section.degrees
    most = len(section.layers) // layout.num_stages
    wanted = degrees.chunks or (2 if job.strategy.schedule == "interleaved" else 1)
    if layout.num_stages == 1:
        return layout
    return in_chunks(layout, min(wanted, most), degrees.placement, job.seconds)


def _over_full(job: Job) -> PlanError:
    """The refusal of the plan that is nearest to fitting, with its numbers."""
    _, plan, devices = tightest(job)
    check_dtype(job.costs.precision, devices)
    try:
        check_memory(plan, rank_memory(plan, job.costs), [usable_bytes(d.kind) for d in devices])
    except PlanError as error:
        return error
    return PlanError("no layout of these degrees fits: allow more micro-batches (strategy.micro_batches) or devices")


def _choices(job: Job, sections: Sequence[Section], devices: Mapping[int, tuple[Device, ...]]) -> list[Choice | None]:
    """Degrees to try for a single section; None: each section takes what is best for it."""
    if len(sections) > 1 or sections[0].degrees.is_fixed:
        return [None]
    most = job.global_batch // job.micro_batches
    own = devices[sections[0].scope]
    return list(degree_choices(sections[0], own, job.model, most, must_fill=not job.may_leave))


def _tiles(layouts: Layouts) -> tuple[Tile, ...]:
    tiles = (tile for _, layout in layouts for tile in layout.tiles())
    return tuple(sorted(tiles, key=lambda t: (t.layers.start, t.samples.start)))


def _devices_of(layouts: Layouts) -> list[Device]:
    used = {d.index: d for _, layout in layouts for d in layout.devices}
    return [used[index] for index in sorted(used)]


def check_batch(job: Job) -> None:
    batch = job.global_batch
    micro_batches = job.micro_batches if job.strategy.micro_batches != "auto" else 1
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ConfigError([Problem("global_batch", f"{batch!r} is not a number of samples; allowed: integers from 1")])
    degrees: list[Degrees] = [*job.strategy.scopes, *([job.strategy.default] if job.strategy.default else [])]
    replicas = max((fixed(d.replicate) for d in degrees), default=1)
    needed = micro_batches * replicas
    if batch < needed:
        product = f"{micro_batches} micro-batches" + (f" x {replicas} replicas = {needed}" if replicas > 1 else "")
        message = (
            f"{batch} samples are fewer than {product}, each of which needs at least one: "
            f"use global_batch={needed} or more, or strategy.micro_batches={max(1, batch // replicas)} or less"
        )
        raise ConfigError([Problem("global_batch", message)])


def _claims(job: Job, sections: Sequence[Section]) -> list[Claim]:
    """One claim for each scope that has devices of its own, in the order of the layers."""
    claims: dict[int, Claim] = {}
    for section in sections:
        if not section.is_colocated:
            flops = sum(layer.forward_flops for layer in job.model.layers[slice(*section.layers)])
            before = claims.get(section.scope, Claim(section, 0.0))
            claims[section.scope] = Claim(before.section, before.flops + flops)
    return list(claims.values())


def _lay_out(
    job: Job,
    sections: Sequence[Section],
    given: Mapping[int, tuple[Device, ...]],
    choice: Choice | None,
    *,
    with_limits: bool,
) -> Layouts | None:
    """A layout for each section, under the degrees of `choice` where given; None when one does not fit in memory."""
    free = job.usable()
    setting = job.setting(free if with_limits else None)
    after = _stages_after(sections, job.cluster)
    found: dict[int, Layout] = {}
    homes: dict[int, tuple[Device, ...]] = dict(given)
    for position in sorted(range(len(sections)), key=lambda p: sections[p].scope):
        section = sections[position]
        if section.is_colocated:
            homes.setdefault(section.scope, homes[_base(section, job.strategy)])
        layout = _best(job, section, homes[section.scope], setting, after[position], choice)
        if layout is None:
            return None
        found[position] = layout
        homes[section.scope] = layout.devices
        for stage_position, stage, samples in _stages(layout):
            flying = setting.in_flight(stage_position, layout.num_stages, after[position])
            for shard, device in enumerate(stage.group.devices):
                costs = job.costs.tile(stage.weights).shards[shard]
                free[device.index] -= costs.memory(*stage.layers, samples, flying, setting.micro_batches)
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


def _best(
    job: Job, section: Section, devices: Sequence[Device], setting: Setting, after: int, choice: Choice | None
) -> Layout | None:
    """The layout with the least compute time of a step, over the degrees that are left to the planner."""
    best: tuple[float, Layout] | None = None
    most_replicas = job.global_batch // job.micro_batches
    choices = (
        [choice] if choice else degree_choices(section, devices, job.model, most_replicas, must_fill=not job.may_leave)
    )
    for replicas, stages, split in choices:
        groups = form_groups(devices, split, replicas * stages, job.speed)
        if job.strategy.balance == "whale":
            layout = whale_layout(setting, section.layers, groups, stages)
        else:
            # equal parts for all is what the even base line means, also for devices that would better be left out
            is_open = section.degrees.replicate == "auto" and job.strategy.balance == "hardware"
            layout = best_layout(
                setting, section.layers, groups, stages, stages_after=after, least_share=0 if is_open else 1
            )
        if layout is not None and (best is None or layout.pace_s < best[0] * (1 - 1e-9)):
            best = (layout.pace_s, layout)
    return None if best is None else best[1]


def _notes(job: Job, layouts: Sequence[tuple[Section, Layout]], devices: Sequence[Device]) -> list[str]:
    notes = []
    for section, layout in layouts:
        spanning = [stage.group for replica in layout.replicas for stage in replica if len(stage.group.nodes) > 1]
        for group in dict.fromkeys(spanning):
            nodes = ", ".join(group.nodes)
            notes.append(f"A tensor group of {len(group.devices)} spans the nodes {nodes}: its sums cross the network.")
        split = len(layout.replicas[0][0].group.devices)
        groups = len({stage.group.first for stage in layout.replicas[0]})
        taken = {"replicate": len(layout.replicas), "stages": groups, "split": split}
        chosen = [f"{key} {value}" for key, value in taken.items() if getattr(section.degrees, key) == "auto"]
        if chosen:
            notes.append(f"{section.path}: auto became {', '.join(chosen)}.")
    if len(devices) < len(job.cluster.devices):
        used = f"{len(devices)} of {len(job.cluster.devices)} devices"
        notes.append(f"{used} are used: under these degrees the others would not make a step faster.")
    return notes
