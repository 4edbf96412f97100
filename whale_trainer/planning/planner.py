"""From model, cluster and strategy to a plan: the decisions, or the reason why there is none.

A strategy without scopes is searched (`planning.search.search`); one with scopes is laid out
(`planning.search.scoped`). What stands here is the comparison with the base lines, the prediction, and the final
accounts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from whale_trainer.cluster import Cluster
from whale_trainer.errors import ConfigError, PlanError, Problem
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.answer import Alternative, Answer
from whale_trainer.planning.costs.cost_model import ADAMW, CostModel, MemoryItems, OptimizerBytes
from whale_trainer.planning.costs.memory import check_memory, rank_memory, usable_bytes, with_framework, with_memory
from whale_trainer.planning.plan import Plan, Prediction
from whale_trainer.planning.precision import check_dtype, precision_of
from whale_trainer.planning.scopes import DEFAULT, Section, most_shards, sections_of
from whale_trainer.planning.search.candidates import Candidate, Weigher, describe_tiles
from whale_trainer.planning.search.job import Job
from whale_trainer.planning.search.moves import improve
from whale_trainer.planning.search.scoped import Found, check_batch, from_scopes, tightest
from whale_trainer.planning.search.search import Limits, SearchSpace, search
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.bounds import bound_by, ideal_step_s
from whale_trainer.planning.simulation.times import LayerProfile, TimeModel
from whale_trainer.planning.strategy import PRESETS, SCHEDULES_TO_TRY, Degrees, StrategySpec, load_strategy
from whale_trainer.validation import counted

BASE_PRESETS = ("replicate", "hybrid", "pipeline", "split", "single")
"""What a base line of `strategy=auto` may choose from."""
BASE_COUNTS = (1, 4, 16)
"""Micro-batches that it tries where the strategy leaves them open."""
NUM_ALTERNATIVES = 3


@dataclass(frozen=True)
class _Decision:
    """The best plan that was found, and the best of the others."""

    best: Found
    others: tuple[Candidate, ...] = ()


def build_plan(
    model: ModelSpec,
    cluster: Cluster,
    strategy: StrategySpec,
    *,
    global_batch: int,
    precision: str = "32-true",
    optimizer: OptimizerBytes = ADAMW,
    profile: LayerProfile | None = None,
) -> Plan:
    """The plan of `answer` alone, without base lines and prediction."""
    job = _job(model, cluster, strategy, global_batch, precision, optimizer, profile)
    return _settle(job, _decide(job).best)[0]


def answer(
    model: ModelSpec,
    cluster: Cluster,
    strategy: StrategySpec,
    *,
    global_batch: int,
    precision: str = "32-true",
    optimizer: OptimizerBytes = ADAMW,
    profile: LayerProfile | None = None,
) -> Answer:
    """The plan that the strategy gives on this cluster, what its step is expected to take, and what else was weighed.

    Deterministic. Raises `ConfigError` or `PlanError`, with the numbers and a remedy, when there is no such plan.
    """
    begin = time.perf_counter()
    job = _job(model, cluster, strategy, global_batch, precision, optimizer, profile)
    decision = _decide(job)
    search_s = time.perf_counter() - begin
    base = {balance: _base_line(job, balance, decision) for balance in ("even", "whale")}
    best = decision.best
    if strategy.balance == "hardware":
        # the planner never ends behind a base line: one that is ahead is where it goes on from
        for other in base.values():
            if other is not None and other.step_s < best.candidate.step_s * (1 - 1e-9):
                best = replace(best, candidate=_improved(job, other))
        for other in _base_lines_by_schedule(job, decision):
            candidate = _improved(job, other)
            if candidate.step_s < best.candidate.step_s * (1 - 1e-9):
                best = replace(best, candidate=candidate)
    plan, memory = _settle(job, best)
    simulation = job.weigher.simulation(plan)
    timeline = replace(simulation.timeline(), bound_by=bound_by(simulation))
    predicted = Prediction(
        step_s=simulation.step_s,
        bubble_fraction=timeline.bubble_fraction,
        even_step_s=base["even"].step_s if base["even"] else None,
        whale_step_s=base["whale"].step_s if base["whale"] else None,
        ideal_step_s=ideal_step_s(job.times, global_batch),
        busy_fractions=timeline.busy_fractions,
    )
    kinds = {d.kind.name: d.kind for d in cluster.devices}
    return Answer(
        replace(plan, predicted=predicted),
        timeline,
        memory,
        tuple(kinds[d.kind].memory_bytes for d in plan.devices),
        _alternatives(job, decision),
        job.weigher.num_simulated,
        search_s,
    )


def _job(
    model: ModelSpec,
    cluster: Cluster,
    strategy: StrategySpec,
    global_batch: int,
    precision: str,
    optimizer: OptimizerBytes,
    profile: LayerProfile | None,
) -> Job:
    if cluster.is_auto:
        raise ConfigError([Problem("cluster.nodes", "auto has not been filled in with what is found on this machine")])
    costs = CostModel(model, precision_of(precision), optimizer)
    times = TimeModel(costs, cluster, profile)
    weigher = Weigher(costs, cluster, times, global_batch, strategy.max_candidates)
    return Job(model, cluster, strategy, global_batch, costs, times, weigher)


def _decide(job: Job) -> _Decision:
    check_batch(job)
    if not job.strategy.is_auto:
        found = from_scopes(job)
        best = found[0]
        if job.strategy.balance == "hardware":
            # of each schedule the best is improved, so that leaving it open is never worse than naming one
            first = {f.candidate.schedule: f for f in reversed(found)}.values()
            improved = [replace(f, candidate=_improved(job, f.candidate)) for f in first]
            best = min(improved, key=lambda f: f.candidate.rank_key)
        return _Decision(best, tuple(f.candidate for f in found if f.candidate != best.candidate))
    check_dtype(job.costs.precision, job.cluster.devices)
    if job.strategy.balance != "hardware":
        found = _from_presets(job)
        return _Decision(found[0], tuple(f.candidate for f in found[1:]))
    candidates = search(_space(job))
    if not candidates:
        raise _nothing_fits(job)
    return _Decision(Found(candidates[0]), tuple(candidates[1:]))


def _improved(job: Job, candidate: Candidate) -> Candidate:
    """The candidate with its cuts moved; where several scopes meet, they stay where the user set them."""
    if not job.strategy.is_auto and len(sections_of(job.strategy, job.model)) > 1:
        return candidate
    moves = Limits.of(len(job.cluster.devices), job.model.num_layers).moves
    return improve(job.weigher, candidate, moves, keep_rows=not job.strategy.is_auto)


def _space(job: Job) -> SearchSpace:
    whole = Section(Interval(0, job.model.num_layers), DEFAULT, Degrees())
    return SearchSpace(
        job.weigher,
        lambda micro_batches, schedule: job.with_variant(micro_batches, schedule).setting(job.usable()),
        job.strategy.variants,
        job.speed,
        most_shards(whole, job.model),
        job.model.can_be_cut,
    )


def _presets(job: Job) -> Iterator[Job]:
    """The job with each preset in place of a strategy that leaves everything open; a pipeline has all devices."""
    stages = min(job.model.num_layers, len(job.cluster.devices))
    for name in BASE_PRESETS:
        preset = dict(PRESETS[name], balance=job.strategy.balance, schedule=job.strategy.variants[0][1])
        if name == "pipeline":
            preset["scopes"] = [{"layers": "*", "stages": stages}]
        counts = BASE_COUNTS if job.strategy.micro_batches == "auto" else (job.micro_batches,)
        for micro_batches in counts:
            yield replace(job, strategy=load_strategy({**preset, "micro_batches": micro_batches}))


def _from_presets(job: Job) -> list[Found]:
    found: list[Found] = []
    failures: list[ConfigError | PlanError] = []
    for preset in _presets(job):
        try:
            found += from_scopes(preset)
        except (ConfigError, PlanError) as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return sorted(found, key=lambda f: f.candidate.rank_key)


def _nothing_fits(job: Job) -> PlanError:
    """The refusal of the plan that is nearest to fitting."""
    plans: list[tuple[float, Plan, int]] = []
    for preset in _presets(job):
        try:
            plans.append((*tightest(preset)[:2], len(plans)))
        except (ConfigError, PlanError):
            continue
    if not plans:
        return PlanError("no plan was found: use other devices (cluster) or a smaller model")
    _, plan, _ = min(plans, key=lambda p: (p[0], p[2]))
    kinds = {d.kind.name: d.kind for d in job.cluster.devices}
    try:
        check_memory(plan, rank_memory(plan, job.costs), [usable_bytes(kinds[d.kind]) for d in plan.devices])
    except PlanError as error:
        return PlanError(f"no plan of this model fits on this cluster. Of the nearest, {error}")
    return PlanError("no plan was found: use other devices (cluster) or a smaller model")


def _base_line(job: Job, balance: str, decision: _Decision) -> Candidate | None:
    """What the same strategy gives under another balance; None where it gives nothing that fits."""
    if job.strategy.balance == balance:
        return decision.best.candidate
    changes: dict[str, object] = {"balance": balance}
    if not job.strategy.is_auto and job.strategy.micro_batches == "auto":
        changes["micro_batches"] = decision.best.candidate.micro_batches
    weigher = Weigher(job.costs, job.cluster, job.times, job.global_batch)
    try:
        other = replace(job, strategy=job.strategy.model_copy(update=changes), weigher=weigher)
        return _decide(other).best.candidate
    except (ConfigError, PlanError):
        return None


def _base_lines_by_schedule(job: Job, decision: _Decision) -> Iterator[Candidate]:
    """The base lines of each schedule, where the strategy leaves it open: naming one would go on from its own."""
    if job.strategy.schedule == "auto" and not job.strategy.is_auto:
        for schedule in SCHEDULES_TO_TRY:
            named = replace(job, strategy=job.strategy.model_copy(update={"schedule": schedule}))
            for balance in ("even", "whale"):
                candidate = _base_line(named, balance, decision)
                if candidate is not None:
                    yield candidate


def _alternatives(job: Job, decision: _Decision) -> tuple[Alternative, ...]:
    """The best plans of other shapes."""
    own = describe_tiles(decision.best.candidate, job.model.num_layers).split(",")[0]
    found: dict[str, Alternative] = {}
    for candidate in decision.others:
        name = describe_tiles(candidate, job.model.num_layers)
        shape = name.split(",")[0]
        if shape != own:
            found.setdefault(shape, Alternative(name, candidate.step_s))
    return tuple(found.values())[:NUM_ALTERNATIVES]


def _settle(job: Job, found: Found) -> tuple[Plan, tuple[MemoryItems, ...]]:
    """The plan with its exact memory. Raises `PlanError` where that does not fit."""
    candidate = found.candidate
    plan = job.weigher.plan(candidate.tiles, candidate.micro_batches, candidate.schedule)
    plan = replace(plan, notes=_notes(job, plan, found.notes))
    items = rank_memory(plan, job.costs)
    kinds = {d.kind.name: d.kind for d in job.cluster.devices}
    check_memory(plan, items, [usable_bytes(kinds[d.kind]) for d in plan.devices])
    items = with_framework(plan, items, kinds)
    return with_memory(plan, items), items


def _notes(job: Job, plan: Plan, notes: Sequence[str]) -> tuple[str, ...]:
    found = list(notes)
    if job.strategy.is_auto and plan.left_out:
        used = f"{plan.num_ranks} of {len(job.cluster.devices)} devices"
        found.append(f"{used} are used: the others would only slow the step down.")
    if job.weigher.was_stopped:
        limit = counted(job.weigher.limit or 0, "plan")
        found.append(f"The search stopped after {limit} (strategy.max_candidates): this is the best so far.")
    return tuple(found)
