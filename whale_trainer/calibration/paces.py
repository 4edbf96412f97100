"""The paces of a plan for `emulate=true`: what each of its passes takes on a quiet core, before the ranks start.

A device is emulated by a core whose matrix products it would make at its declared sustained speed: every action takes
its processor time on the core, by the ratio of the two speeds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from whale_trainer.calibration.core import Core
from whale_trainer.calibration.journal import Journal
from whale_trainer.calibration.layers import LayerBench, Segments
from whale_trainer.calibration.present import usable_cores
from whale_trainer.calibration.trials import optimizer_time
from whale_trainer.cluster import Cluster
from whale_trainer.config import Config
from whale_trainer.errors import ConfigError, PlanError, Problem
from whale_trainer.launch import Entry, launch, torchrun_rank
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.pieces import gradient_buckets, parameter_layouts
from whale_trainer.planning.plan import SPLIT_SCHEDULES, Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.schedule.actions import Op
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.paces import (
    ActionPace,
    Paces,
    gradient_sum_paces,
    least_stretch,
    link_paces,
    tensor_group_paces,
)
from whale_trainer.planning.simulation.times import TimeModel
from whale_trainer.rank_info import RankInfo
from whale_trainer.runtime.transfers import slowest_at_once
from whale_trainer.runtime.weight_gradients import WeightGradients

ROOM = 1.5
"""The stretch by the least one: what the cores do beside the arithmetic, and that they share caches, needs room."""
_TOGETHER_S = 0.4
"""For which all cores are timed together."""


@dataclass(frozen=True)
class PaceJob:
    """What the measuring processes of a plan's paces get."""

    config: Config
    plan: Plan
    batch: Any
    journal: Path

    @property
    def timeout_s(self) -> float:
        return self.config.timeout_s


@dataclass(frozen=True)
class _Part:
    """One tile on one rank, as it is measured; equal ones once."""

    layers: Interval
    weights: tuple[int, ...]
    shard: int
    samples: int

    @property
    def name(self) -> str:
        return (
            f"layers {self.layers.start}-{self.layers.stop}, shard {self.shard} of "
            f"{':'.join(map(str, self.weights))}, {self.samples} samples"
        )


def measure_paces(config: Config, plan: Plan, spec: ModelSpec, batch: Any, cluster: Cluster, folder: Path) -> Paces:
    """Measure what the plan does, in child processes.

    Raises `ConfigError` under torchrun, and `PlanError` when they fail.
    """
    if torchrun_rank() is not None:
        message = "true starts measuring processes on this machine: run the command without torchrun"
        raise ConfigError([Problem("emulate", message)])
    with tempfile.TemporaryDirectory(prefix="whale-paces-") as scratch:
        job = PaceJob(config, plan, batch, Path(scratch, "journal"))
        found = _run(job, spec, folder, 1, _measure)
        cores = usable_cores()
        together = _run(job, spec, folder, cores, _time_together)["together"]["seconds"]
    core = found["core"]
    num_cores = cores * min(1.0, core["wall_s"] / together)
    dtype = PRECISIONS[config.trainer.precision].dtype
    kinds = {device.kind.name: device.kind for device in cluster.devices}
    core_s = tuple(kinds[device.kind].speed(dtype) / core["flops"] for device in plan.devices)
    times = TimeModel(CostModel(spec, PRECISIONS[config.trainer.precision]), cluster)
    layouts = parameter_layouts(plan, spec)
    least = least_stretch(core_s, num_cores)
    return Paces(
        plan_fingerprint=plan.fingerprint,
        stretch=ROOM * least,
        least_stretch=least,
        core_s=core_s,
        actions=tuple(
            ActionPace(
                tile,
                rank,
                part.samples,
                {op: tuple(s / core_s[rank] for s in segments) for op, segments in found[part.name].items()},
            )
            for tile, rank, part in _parts(plan)
        ),
        optimizer_s=tuple(
            found[_optimizer_name(_sizes(plan, spec, rank))]["seconds"] / core_s[rank] for rank in range(plan.num_ranks)
        ),
        links=link_paces(plan, times),
        tensor_groups=tensor_group_paces(plan, times),
        sums=gradient_sum_paces(plan, times, layouts, gradient_buckets(layouts)),
        sums_wait=tuple(
            kinds[device.kind].is_gpu and any(len(plan.tiles[t].shards) > 1 for t in plan.tiles_of(device.rank))
            for device in plan.devices
        ),
    )


def _run(job: PaceJob, spec: ModelSpec, folder: Path, count: int, entry: Entry) -> dict[str, dict[str, Any]]:
    code = launch(job, _processes(count), spec, folder, entry=entry)
    if code:
        raise PlanError(f"the paces of the emulated devices could not be measured (exit code {code}, reason above)")
    return Journal(job.journal).found


def _processes(count: int) -> Plan:
    """A plan that does nothing, for the launcher."""
    tiles = (Tile(Interval(0, 1), Interval(i, i + 1), (Shard(i),)) for i in range(count))
    devices = (PlannedDevice(rank, "CPU", "here", 1) for rank in range(count))
    return Plan(tuple(tiles), ("all",), 1, count, "1f1b", tuple(devices))


def _parts(plan: Plan) -> Iterator[tuple[int, int, _Part]]:
    """(tile, rank, what to measure) of every tile and rank; for the samples of a full micro-batch."""
    for index, tile in enumerate(plan.tiles):
        for shard, rank in enumerate(tile.ranks):
            yield index, rank, _Part(tile.layers, tile.weights, shard, len(tile.samples))


def _sizes(plan: Plan, spec: ModelSpec, rank: int) -> tuple[int, ...]:
    """Elements of each tensor that the rank trains."""
    return tuple(
        layout.parameter.num_elements * len(piece) // max(1, layout.size)
        for layout in parameter_layouts(plan, spec)
        if layout.parameter.trainable
        for piece in layout.pieces(rank)
    )


def _optimizer_name(sizes: tuple[int, ...]) -> str:
    return f"optimizer {sum(sizes)} elements, {len(sizes)} tensors"


# --- in the measuring processes --------------------------------------------------------------------------------------


def _measure(job: PaceJob, _: Plan, spec: ModelSpec, run_dir: Path, info: RankInfo) -> None:
    """Every distinct part of the plan, forward and backward, and the optimizer of every rank."""
    plan, journal, core = job.plan, Journal(job.journal), Core()
    journal.end("core", {"flops": core.flops, "wall_s": _product_wall_s(core)})
    bench = LayerBench(job.config, spec, job.batch, info.device, core)
    waits = WeightGradients() if plan.schedule in SPLIT_SCHEDULES else None
    ops = (Op.FORWARD, Op.BACKWARD) if waits is None else (Op.FORWARD, Op.INPUT, Op.WEIGHT)
    for part in dict.fromkeys(part for _, _, part in _parts(plan)):
        tile = bench.shard(part.layers, part.weights, part.shard, waits)
        inputs, batch = bench.inputs(part.layers.start, part.samples), bench.batch(part.samples)
        run = partial(bench.run, tile, part.layers, inputs, batch, waits)
        lengths = [len(segments) for segments in run()]
        seconds = iter([figure.median_s for figure in bench.steady(partial(_joined, run))])
        journal.end(part.name, {op: list(islice(seconds, n)) for op, n in zip(ops, lengths, strict=True)})
    for sizes in dict.fromkeys(_sizes(plan, spec, rank) for rank in range(plan.num_ranks)):
        seconds_of_step = optimizer_time(bench, job.config, sizes, info.device).median_s if sizes else 0.0
        journal.end(_optimizer_name(sizes), {"seconds": seconds_of_step})


def _joined(run: Callable[[], tuple[Segments, ...]]) -> Segments:
    return tuple(chain.from_iterable(run()))


def _time_together(job: PaceJob, _: Plan, spec: ModelSpec, run_dir: Path, info: RankInfo) -> None:
    """A matrix product on every core at once: what the cores reach together."""
    seconds = slowest_at_once(partial(_product_wall_s, Core()))
    if info.rank == 0:
        Journal(job.journal).end("together", {"seconds": seconds})


def _product_wall_s(core: Core) -> float:
    """Median seconds of a matrix product, by the wall clock."""
    found, end = [], time.perf_counter() + _TOGETHER_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        core.usual(lambda: ())
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
