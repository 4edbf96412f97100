"""`mode=calibrate`: measure what is here, one kind after another and then the links, and write it down.

All arithmetic is done in child processes, which the launcher starts: one for each kind, so that nothing else runs
beside it, and one for each device for the links. A trial that takes its process down is noted as failed, and a new
process goes on with the next one.
"""

from __future__ import annotations

import platform
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from whale_trainer.calibration.journal import Journal
from whale_trainer.calibration.links import LinkJob, measure_links
from whale_trainer.calibration.present import CPU, Present, present_devices
from whale_trainer.calibration.results import Occasion, cluster_section, kind_times, link_times
from whale_trainer.calibration.trials import DeviceJob, measure_device
from whale_trainer.cluster import load_cluster
from whale_trainer.config import Config
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.launch import launch, torchrun_rank
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.profile import KindTimes, LinkTimes, Profile, identity_of
from whale_trainer.validation import counted

PROFILE, CLUSTER = "profile.yaml", "cluster.yaml"
MOST_LAUNCHES = 24
"""Processes that one kind may use up; what is not measured by then is left out."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, where it was written, and the exit code."""

    code: int
    profile: Profile | None = None
    cluster: dict[str, Any] | None = None
    """The `cluster` section of this machine."""
    note: str = ""
    """What the user should know of the devices, a sentence."""


def calibrate(config: Config, spec: ModelSpec, batch: Any, folder: Path) -> Calibration:
    """Measure the layers of the config's model, the links and the free memory, on the devices that are present.

    `batch` is an example as the loader makes it. Writes `profile.yaml` and `cluster.yaml` into `folder`. Raises
    `ConfigError` for what cannot be measured.
    """
    _check_launcher()
    if config.emulate:
        return _calibrate_emulated(config, spec, batch, folder)
    present = present_devices(config.cluster, config.trainer.accelerator)
    occasion = Occasion(_machine(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    samples = sample_sizes(_height(config))
    kinds: dict[str, KindTimes] = {}
    journals: dict[str, Any] = {}
    on_cpu = present[0].device == "cpu"
    cores = counted(len(present), "core")
    notes = (
        [f"CPU stands for one of the {cores} of {occasion.machine}, with its part of the free memory."]
        if on_cpu
        else []
    )
    with tempfile.TemporaryDirectory(prefix="whale-calibrate-") as scratch:
        for number, device in enumerate({d.kind: d for d in present}.values()):
            journal = Path(scratch, f"device{number}")
            job = DeviceJob(config, batch, journal, samples, num_ranks=len(present))
            code = _measure(job, device, spec, folder)
            if code and not (code == 1 and "layers" in Journal(journal).found):
                return Calibration(code)
            if code:
                notes.append(
                    f"{device.kind}: not all was measured, as {MOST_LAUNCHES} measuring processes were killed."
                )
            journals[device.kind] = Journal(journal).found
            kinds[device.kind], told = kind_times(
                journals[device.kind], spec, samples, config.optimizer.target.rpartition(".")[2], occasion
            )
            notes += [f"{device.kind}, {note}" for note in told]
        links, code = _measure_links(config, present, folder, Path(scratch, "links"), occasion)
        if code >= 128:
            return Calibration(code)
        if code:
            notes.append("The links could not be measured.")
    profile = Profile(
        model=identity_of(spec),
        precision=config.trainer.precision,
        kinds=kinds,
        links=tuple(links),
        notes=tuple(notes),
    )
    cluster = cluster_section(present, journals, links, occasion)
    load_cluster(cluster)  # what is written can be read
    title = f"Measured by mode=calibrate on {occasion.machine}, {occasion.measured_at}"
    _write(folder / PROFILE, f"{title}; use it with cluster.profile=PATH", profile.to_dict())
    _write(folder / CLUSTER, f"{title}; use it with cluster=PATH", cluster)
    has_times = any(times.rows for kind in kinds.values() for times in kind.layers)
    note = "No GPU is used here: the kind CPU was measured, one core for each rank." if on_cpu else ""
    return Calibration(0 if has_times else 1, profile, cluster, note)


def _calibrate_emulated(config: Config, spec: ModelSpec, batch: Any, folder: Path) -> Calibration:
    """Measure the layers once, on a core, and tell what each declared kind takes at its pace; links are as declared."""
    cluster = config.cluster
    occasion = Occasion(_machine(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    samples = finer_sizes(_height(config))
    optimizer = config.optimizer.target.rpartition(".")[2]
    dtype = PRECISIONS[config.trainer.precision].dtype
    kinds: dict[str, KindTimes] = {}
    notes = [f"Emulated: {occasion.machine}'s core at the pace of each declared kind; links are the declared ones."]
    with tempfile.TemporaryDirectory(prefix="whale-calibrate-") as scratch:
        journal = Path(scratch, "core")
        is_cut = config.mode == "calibrate" or config.strategy.may_split
        job = DeviceJob(config, batch, journal, samples, num_ranks=1, is_cut=is_cut, is_emulated=True)
        code = _measure(job, Present(CPU, "cpu"), spec, folder)
        found = Journal(journal).found
        if code and not (code == 1 and "layers" in found):
            return Calibration(code)
        core_flops = found["core"]["flops"]
        for kind in {device.kind.name: device.kind for device in cluster.devices}.values():
            times, told = kind_times(found, spec, samples, optimizer, occasion)
            kinds[kind.name] = times.at_pace(core_flops / kind.speed(dtype), f"{kind.name}, emulated")
            notes += told if len(kinds) == 1 else []
    profile = Profile(
        model=identity_of(spec), precision=config.trainer.precision, kinds=kinds, links=(), notes=tuple(notes)
    )
    title = f"Emulated by mode=calibrate on {occasion.machine}, {occasion.measured_at}"
    _write(folder / PROFILE, f"{title}; use it with emulate=true cluster.profile=PATH", profile.to_dict())
    has_times = any(times.rows for kind in kinds.values() for times in kind.layers)
    return Calibration(0 if has_times else 1, profile)


def sample_sizes(height: int) -> tuple[int, ...]:
    """1, 2, 4, … and `height`, the samples of a whole micro-batch."""
    return (*(1 << i for i in range((height - 1).bit_length())), height)


def finer_sizes(height: int) -> tuple[int, ...]:
    """Those of `sample_sizes` with one between each two, where it is cheap to measure.

    >>> finer_sizes(8)
    (1, 2, 3, 4, 6, 8)
    """
    sizes = sample_sizes(height)
    return tuple(sorted({*sizes, *(size + size // 2 for size in sizes if size + size // 2 <= height)}))


def _height(config: Config) -> int:
    """Samples of a whole micro-batch."""
    micro_batches = config.strategy.micro_batches
    return -(-config.global_batch // (1 if micro_batches == "auto" else micro_batches))


def _check_launcher() -> None:
    if torchrun_rank() is not None:
        message = (
            "calibrate starts its own processes: run it without torchrun, once on each kind of machine, and give all "
            "profiles as cluster.profile=[PATH,PATH]"
        )
        raise ConfigError([Problem("mode", message)])


def _measure(job: DeviceJob, device: Present, spec: ModelSpec, folder: Path) -> int:
    """Start measuring processes for a device until no trial is left; the exit code of the last one."""
    plan = _plan([device.kind])
    code = 1
    for _ in range(MOST_LAUNCHES):
        code = launch(job, plan, spec, folder, entry=measure_device, devices=[device.device])
        journal = Journal(job.journal)
        if code != 1 or journal.unfinished is None:
            return code
        journal.end(journal.unfinished, {"failed": "the process was killed, as when memory runs out"})
    return code


def _measure_links(
    config: Config, present: Sequence[Present], folder: Path, journal: Path, occasion: Occasion
) -> tuple[list[LinkTimes], int]:
    if len(present) < 2:
        return [], 0
    kinds = [device.kind for device in present]
    devices = [device.device for device in present]
    code = launch(LinkJob(config, journal), _plan(kinds), None, folder, entry=measure_links, devices=devices)
    return link_times(Journal(journal).found, kinds, occasion), code


def _plan(kinds: Sequence[str]) -> Plan:
    """A plan that names the devices and does nothing with them, for the launcher."""
    tiles = (Tile(Interval(0, 1), Interval(i, i + 1), (Shard(i),)) for i in range(len(kinds)))
    devices = (PlannedDevice(rank, kind, "here", 1) for rank, kind in enumerate(kinds))
    return Plan(tuple(tiles), ("all",), 1, len(kinds), "1f1b", tuple(devices))


def _machine() -> str:
    return re.sub(r"[^\w.-]", "-", platform.node()) or "here"


def _write(path: Path, title: str, data: dict[str, Any]) -> None:
    text = f"# {title}\n{yaml.safe_dump(data, sort_keys=False, width=200, default_flow_style=None)}"
    path.write_text(text)
