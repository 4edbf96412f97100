"""The paces of an emulated run: how long the declared devices and links take for what one plan does. Data only.

Seconds are those of the declared hardware. An emulated run stretches all of them, compute and links alike, by one
factor, the least with which this machine's cores keep up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whale_trainer.errors import PlanError
from whale_trainer.planning.pieces import Bucket, ParameterLayout
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.schedule import build_schedule, messages
from whale_trainer.planning.simulation.plan_times import PlanTimes
from whale_trainer.planning.simulation.times import TimeModel

SCHEMA_VERSION = 1
FILE = "emulation.json"
MOST_LATE = 0.02
"""With a larger part of late actions the figures of a run do not hold."""


@dataclass(frozen=True)
class ActionPace:
    """One tile on one rank: seconds of each kind of pass for `samples` samples.

    A pass of a split tile is cut where its group meets: the first entry is the work before the first meeting.
    """

    tile: int
    rank: int
    samples: int
    passes: Mapping[str, tuple[float, ...]]
    """By the letter of the action, such as `F`."""


@dataclass(frozen=True)
class LinkPace:
    """What a message from one rank to another takes."""

    source: int
    target: int
    latency_s: float
    bytes_per_s: float
    ports: tuple[str, ...]
    """What it shares with others, such as `node out volta`: one message after the other."""


@dataclass(frozen=True)
class SumPace:
    """What a sum over some ranks takes, to start and for each byte."""

    ranks: tuple[int, ...]
    latency_s: float
    byte_s: float


@dataclass(frozen=True)
class Paces:
    """Everything that ranks need to run at the pace of the declared hardware."""

    plan_fingerprint: str
    stretch: float
    """Seconds of this machine for one of the declared hardware."""
    least_stretch: float
    """With which the cores are busy without a pause."""
    core_s: tuple[float, ...]
    """By rank, seconds of a core of this machine for one of the rank's device."""
    actions: tuple[ActionPace, ...]
    optimizer_s: tuple[float, ...]
    """By rank."""
    links: tuple[LinkPace, ...]
    tensor_groups: tuple[SumPace, ...]
    sums: tuple[SumPace, ...]
    """Of gradients, by the ranks that sum."""
    sums_wait: tuple[bool, ...]
    """By rank: its gradient sums wait for its last action, as those of tensor groups do on GPUs."""

    @property
    def in_words(self) -> str:
        """A line for the user."""
        return (
            f"emulated: one second of the declared devices takes {self.stretch:,.4g} s here, "
            f"{self.stretch / self.least_stretch:.2g} times the least that the cores keep up with"
        )

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path, plan: Plan) -> Paces:
        """Raises `PlanError` where the file in `folder` is missing, or of another plan or release."""
        path = folder / FILE
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            message = f"{path} cannot be read ({error}); it is written at the start of a run with emulate=true"
            raise PlanError(message) from error
        if data.pop("schema_version", None) != SCHEMA_VERSION or data.get("plan_fingerprint") != plan.fingerprint:
            raise PlanError(f"{path} was made for another plan or release; start the run again with emulate=true")
        return cls(
            plan_fingerprint=data["plan_fingerprint"],
            stretch=data["stretch"],
            least_stretch=data["least_stretch"],
            core_s=tuple(data["core_s"]),
            actions=tuple(
                ActionPace(a["tile"], a["rank"], a["samples"], {op: tuple(s) for op, s in a["passes"].items()})
                for a in data["actions"]
            ),
            optimizer_s=tuple(data["optimizer_s"]),
            links=tuple(LinkPace(**(entry | {"ports": tuple(entry["ports"])})) for entry in data["links"]),
            tensor_groups=tuple(_sum_pace(entry) for entry in data["tensor_groups"]),
            sums=tuple(_sum_pace(entry) for entry in data["sums"]),
            sums_wait=tuple(data["sums_wait"]),
        )


def _sum_pace(entry: dict[str, Any]) -> SumPace:
    return SumPace(tuple(entry["ranks"]), entry["latency_s"], entry["byte_s"])


def link_paces(plan: Plan, times: TimeModel) -> tuple[LinkPace, ...]:
    """Of every pair of ranks between which a step's messages travel, over the declared links."""
    devices = PlanTimes(plan, times).devices
    pairs = sorted({(m.source_rank, m.target_rank) for m in messages(build_schedule(plan, plan.global_batch))})
    found = []
    for source, target in pairs:
        first, second = devices[source], devices[target]
        link = times.link(first, second)
        is_inside = first.node == second.node
        ports = (
            (f"device out {source}", f"device in {target}")
            if is_inside
            else (f"node out {first.node}", f"node in {second.node}")
        )
        found.append(LinkPace(source, target, link.latency_s, link.bandwidth_bytes_per_s, ports))
    return tuple(found)


def tensor_group_paces(plan: Plan, times: TimeModel) -> tuple[SumPace, ...]:
    """Of the group of every split tile."""
    groups = {tile.ranks for tile in plan.tiles if len(tile.ranks) > 1}
    return _sum_paces(plan, times, groups, sharers=1)


def gradient_sum_paces(
    plan: Plan, times: TimeModel, layouts: Iterable[ParameterLayout], buckets: Iterable[Bucket]
) -> tuple[SumPace, ...]:
    """Of the ranks of every bucket. The shards of a tensor group sum at the same time, over the same ports."""
    widest = max(len(tile.shards) for tile in plan.tiles)
    return _sum_paces(plan, times, {bucket.ranks for bucket in buckets}, sharers=widest)


def _sum_paces(plan: Plan, times: TimeModel, groups: set[tuple[int, ...]], *, sharers: int) -> tuple[SumPace, ...]:
    devices = PlanTimes(plan, times).devices
    return tuple(
        SumPace(ranks, *times.sum_costs([devices[r] for r in ranks], sharers=sharers)) for ranks in sorted(groups)
    )


def least_stretch(core_s: Iterable[float], num_cores: float) -> float:
    """The factor with which `num_cores` cores are busy without a pause while all ranks compute at once.

    A rank whose device does in one second what takes a core `core_s` seconds needs that part of a core; nobody can use
    more than one.

    >>> least_stretch([0.25, 0.5, 1.5], 2.0)
    1.5
    >>> least_stretch([3.0, 3.0, 2.0], 2.0)
    4.0
    """
    needs = list(core_s)
    return max(sum(needs) / num_cores, *needs)
