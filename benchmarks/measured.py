"""Predicted step times beside measurements that others made on real clusters.

    python -m benchmarks.measured benchmarks/data/gh200_opt350m.yaml

reads a file of the form `measured-plans/1` (its header tells what each field means), plays every plan with
`planning.simulate` on the file's own profiles and link measurements, and prints a row for each plan beside what other
planners predict. The last line is `mean N % max N %`, the errors of our step times.

The engine that was measured differs from ours: it blocks on sends and receives and sums gradients after the last
backward pass. Five constants describe the rest; `python -m benchmarks.measured_fit` fitted them on OPT-350M, by least
squares, and they hold for every other file unchanged.
"""

from __future__ import annotations

import argparse
import math
import sys
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.schedule.actions import Op
from whale_trainer.planning.schedule.schedule import Bridge
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.simulate import Crossing, Engine, GradientSum, simulate

FORMAT = "measured-plans/1"


class BadFileError(Exception):
    """The file is not of the form; the text says where and what."""


@dataclass(frozen=True)
class EngineCosts:
    """What the measured engine takes beyond kernels and links."""

    sum_bandwidth_share: float = 0.44
    """Part of the point-to-point bandwidth that a gradient sum reaches over several nodes."""
    launch_share: float = 0.76
    """Of the time by which a layer's profile at a small micro-batch exceeds its part of the largest one, this is real:
    the GPU waits for launches. The rest are the profiler's hooks, which keep the host from running ahead."""
    layer_sum_s: float = 0.34e-3
    """Host time of summing a layer's gradients, also where there is one replica: copies into buckets and back."""
    transfer_host_s: float = 0.75e-3
    """Host time of a blocking send and receive: handing over, synchronising, cutting and joining the tensor."""
    boundary_start_s: float = 45e-3
    """Of every boundary between stages, once a step: until the first micro-batch's transfers run."""


ENGINE = EngineCosts()


@dataclass(frozen=True)
class Curve:
    """Bandwidth of `pairs` pairs of devices that send at once, by message size (see the file's header)."""

    pairs: int
    coefficients: tuple[float, float, float]
    usable_from_bytes: float

    def seconds(self, num_bytes: float) -> float:
        """For every pair to move `num_bytes`."""
        if num_bytes <= 0:
            return 0.0
        size = max(num_bytes, self.usable_from_bytes)
        m = math.log2(size / 1e6)
        a, b, c = self.coefficients
        # beyond the vertex the fit would fall again: the bandwidth stays at its best
        if a < 0:
            m = min(m, -b / (2 * a))
        return self.pairs * size / ((a * m * m + b * m + c) * 1e9)


@dataclass(frozen=True)
class LayerTime:
    """(forward, backward) seconds of every layer kind for one micro-batch size and tensor-parallel degree."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]


@dataclass
class Hardware:
    """Profiles and links of a file."""

    data: Mapping[str, Any]
    costs: EngineCosts
    profiles: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, entry in enumerate(_list(self.data, "profiles")):
            where = f"profiles[{index}]"
            key = (str(_of(entry, "gpu", where)), int(_of(entry, "tensor_parallel", where)))
            self.profiles.setdefault(key, {})[int(_of(entry, "micro_batch", where))] = entry
        links = _of(self.data, "links", "")
        self._curves = {c["name"]: c for c in _list(links, "curves", "links.")}
        self._intra = {(c["gpu"], c["gpus"]): c["curve"] for c in links.get("intra_node") or ()}
        self._inter = {(c["sender"], c["receiver"], c["pairs"]): c["curve"] for c in links.get("inter_node") or ()}

    def _profile(self, gpu: str, degree: int) -> tuple[dict[int, Mapping[str, Any]], float]:
        """The profile by micro-batch, and what its times are multiplied by: of a degree that was not profiled, the
        nearest one that was, in proportion."""
        known = sorted(d for g, d in self.profiles if g == gpu)
        if not known:
            raise BadFileError(f"profiles: none of {gpu}; there are {', '.join(sorted({g for g, _ in self.profiles}))}")
        nearest = min(known, key=lambda d: (abs(math.log(d / degree)), d))
        return self.profiles[gpu, nearest], nearest / degree

    def layer_s(self, gpu: str, degree: int, kind: str, micro_batch: float, key: str) -> float:
        """Seconds of a layer kind, forward or backward (`key`); between profiled micro-batches in proportion."""
        table, factor = self._profile(gpu, degree)
        sizes = sorted(table)
        largest = sizes[-1]
        per_sample = float(table[largest][key][kind]) / largest
        if micro_batch >= largest:
            return factor * per_sample * micro_batch
        place = bisect_left(sizes, micro_batch)
        high = sizes[place]
        measured = float(table[high][key][kind])
        if high != micro_batch:
            low = sizes[max(0, place - 1)]
            below = float(table[low][key][kind])
            measured = below + (measured - below) * max(0.0, micro_batch - low) / max(1e-9, high - low)
        kernels_s = min(measured, per_sample * micro_batch)
        return factor * (kernels_s + self.costs.launch_share * (measured - kernels_s))

    def optimizer_s(self, gpu: str, degree: int, num_bytes: float) -> float:
        """Seconds of the optimizer for parameters of so many bytes on each rank."""
        entry = next(iter(self._profile(gpu, degree)[0].values()))
        return float(entry["optimizer_step_s"]) * num_bytes / float(entry["optimizer_step_parameter_bytes"])

    def _curve(self, name: str, pairs: int) -> Curve:
        entry = self._curves[name]
        a, b, c = (float(x) for x in entry["coefficients"])
        return Curve(pairs, (a, b, c), float(entry["usable_from_bytes"]))

    def inter_node(self, sender: str, receiver: str, pairs: int) -> Curve:
        """The curve for `pairs` pairs, or the nearest number that was measured."""
        for ends in ((sender, receiver), (receiver, sender)):
            known = sorted(p for s, r, p in self._inter if (s, r) == ends)
            if known:
                nearest = min(known, key=lambda p: (abs(p - pairs), p))
                return self._curve(self._inter[*ends, nearest], nearest)
        raise BadFileError(f"links.inter_node: nothing between {sender} and {receiver}")

    def intra_node(self, gpu: str, gpus: int) -> Curve | None:
        """The curve inside a node, or None where none was measured."""
        known = sorted(n for g, n in self._intra if g == gpu)
        if not known or gpus < 2:
            return None
        nearest = min(known, key=lambda n: (abs(n - gpus), n))
        return self._curve(self._intra[gpu, nearest], max(1, nearest // 2))


@dataclass(frozen=True)
class Group:
    """The devices of one tile."""

    node: int
    gpu: str
    gpus: int


class MeasuredTimes:
    """What `simulate` asks for, from the file's profiles and links."""

    def __init__(self, plan: Plan, groups: Sequence[Group], entry: Mapping[str, Any], hardware: Hardware) -> None:
        self.plan = plan
        self.groups = groups
        self.hardware = hardware
        self.micro_batch = float(entry["micro_batch"])
        model = hardware.data["model"]
        self._kinds: list[str] = list(model["layers"])
        self._sizes: Mapping[str, Any] = model["layer_kinds"]

    def _layer_kinds(self, tile: int) -> list[str]:
        return self._kinds[slice(*self.plan.tiles[tile].layers)]

    def pass_s(self, tile: int, samples: int) -> tuple[float, float]:
        group = self.groups[tile]
        forward, backward = (
            sum(self.hardware.layer_s(group.gpu, group.gpus, kind, samples, key) for kind in self._layer_kinds(tile))
            for key in ("forward_s", "backward_s")
        )
        return forward, backward

    def backward_part(self, tile: int, layer: int) -> float:
        return 1.0

    def sums_overlap(self, tile: int) -> bool:
        return False

    def crossing(self, bridge: Bridge, op: Op, samples: int) -> Crossing | None:
        source, target = (bridge.before, bridge.after) if op is Op.FORWARD else (bridge.after, bridge.before)
        first, second = self.groups[source], self.groups[target]
        kind = self._layer_kinds(bridge.before)[-1]
        whole = float(self._sizes[kind]["boundary_output_bytes_per_sample"]) * samples
        # every rank sends its part, and the receivers gather the parts inside their node
        pairs = min(first.gpus, second.gpus)
        if first.node == second.node:
            curve = self.hardware.intra_node(first.gpu, first.gpus + second.gpus)
            seconds = curve.seconds(whole / pairs) if curve else 0.0
        else:
            seconds = self.hardware.inter_node(first.gpu, second.gpu, pairs).seconds(whole / pairs)
        gather = self.hardware.intra_node(second.gpu, second.gpus)
        if gather is not None and second.gpus > 1:
            seconds += gather.seconds(whole * (second.gpus - 1) / second.gpus / gather.pairs)
        links: tuple[Hashable, ...] = (("out", first.node), ("in", second.node))
        return Crossing(seconds, self.hardware.costs.transfer_host_s, links, whole)

    def _bytes(self, tile: int) -> float:
        group = self.groups[tile]
        total = 0.0
        for kind in self._layer_kinds(tile):
            sizes = {int(k): float(v) for k, v in self._sizes[kind]["parameter_bytes"].items()}
            total += sizes.get(group.gpus, sizes[1] / group.gpus if 1 in sizes else 0.0)
        return total

    def sums(self) -> Sequence[GradientSum]:
        found = []
        stages: dict[Interval, list[int]] = {}
        for index, tile in enumerate(self.plan.tiles):
            stages.setdefault(tile.layers, []).append(index)
        for layers, tiles in stages.items():
            seconds = len(layers) * self.hardware.costs.layer_sum_s
            if len(tiles) > 1:
                seconds += max(self.ring_s(tiles, tile) for tile in tiles)
            found.append(GradientSum(tuple(tiles), layers.start, seconds, self._bytes(tiles[0])))
        return found

    def ring_s(self, tiles: Sequence[int], tile: int) -> float:
        """Of the slowest neighbour of a tile in the ring; each rank of its group has a ring of its own."""
        group, count = self.groups[tile], len(tiles)
        share = 2 * (count - 1) / count * self._bytes(tile)
        others = [self.groups[t] for t in tiles if t != tile]
        away = [o for o in others if o.node != group.node]
        if not away:
            curve = self.hardware.intra_node(group.gpu, group.gpus * count)
            return curve.seconds(share) if curve else 0.0
        pairs = group.gpus
        seconds = max(self.hardware.inter_node(group.gpu, o.gpu, min(pairs, o.gpus)).seconds(share) for o in away)
        return seconds / self.hardware.costs.sum_bandwidth_share

    def optimizer_s(self, tile: int) -> float:
        group = self.groups[tile]
        return self.hardware.optimizer_s(group.gpu, group.gpus, self._bytes(tile))


def plan_of(entry: Mapping[str, Any], layer_names: Sequence[str]) -> tuple[Plan, list[Group]]:
    """The measured plan as ours: a row of tiles for each replica, a shard for each device."""
    where = f"plans: {entry.get('name', '?')}"
    stages = _list(entry, "stages", f"{where}.")
    count = int(_of(entry, "num_micro_batches", where))
    micro_batch, replicas = int(_of(entry, "micro_batch", where)), int(_of(entry, "data_parallel", where))
    tiles: list[Tile] = []
    groups: list[Group] = []
    devices: list[PlannedDevice] = []
    for stage in stages:
        members = _list(stage, "replicas", f"{where}.stages.")
        if len(members) != replicas:
            raise BadFileError(f"{where}: data_parallel is {replicas}, a stage has {len(members)} replicas")
        for row, member in enumerate(members):
            group = Group(int(member["node"]), str(member["gpu"]), int(member["gpus"]))
            ranks = range(len(devices), len(devices) + group.gpus)
            devices += [PlannedDevice(r, group.gpu, str(group.node), 0) for r in ranks]
            rows = Interval(row * micro_batch, (row + 1) * micro_batch)
            tiles.append(Tile(Interval(*stage["layers"]), rows, tuple(Shard(r) for r in ranks)))
            groups.append(group)
    names = tuple(f"{index}.{name}" for index, name in enumerate(layer_names))
    plan = Plan(tuple(tiles), names, count, count * micro_batch * replicas, "1f1b", tuple(devices))
    return plan, groups


def predict(entry: Mapping[str, Any], hardware: Hardware) -> float:
    """Seconds of a step of a measured plan."""
    plan, groups = plan_of(entry, hardware.data["model"]["layers"])
    times = MeasuredTimes(plan, groups, entry, hardware)
    step_s = simulate(plan, times, engine=Engine(blocking=True)).step_s
    return step_s + hardware.costs.boundary_start_s * (len(entry["stages"]) - 1)


def load(path: Path) -> Mapping[str, Any]:
    """The file's contents. Raises `BadFileError` when it is not of the form."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise BadFileError(f"{path}: format is {found!r}, this reads {FORMAT}")
    for key in ("model", "links", "profiles", "plans"):
        _of(data, key, "")
    return data


def _of(data: Mapping[str, Any], key: str, where: str) -> Any:
    if not isinstance(data, Mapping) or key not in data:
        raise BadFileError(f"{where or 'the file'} has no {key}")
    return data[key]


def _list(data: Mapping[str, Any], key: str, where: str = "") -> list[Any]:
    found = _of(data, key, where)
    if not isinstance(found, list) or not found:
        raise BadFileError(f"{where}{key} is not a list with entries")
    return found


def errors(data: Mapping[str, Any], costs: EngineCosts = ENGINE) -> list[tuple[Mapping[str, Any], float, float]]:
    """(plan, predicted seconds, error against the measurement) of every plan."""
    hardware = Hardware(data, costs)
    found = []
    for entry in _list(data, "plans"):
        try:
            predicted, measured = predict(entry, hardware), float(entry["measured"]["iteration_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadFileError(f"plans: {entry.get('name', '?')}: {error!r} is missing or wrong") from error
        found.append((entry, predicted, predicted / measured - 1))
    return found


def show(data: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], float, float]]) -> None:
    """A row for each plan, ours beside the others."""
    others = list(dict.fromkeys(name for entry, _, _ in rows for name in entry.get("predicted_by_others") or {}))
    table = Table(title=str(data["model"].get("name", "")), title_justify="left")
    for heading in ("plan", "measured s", "ours s", "ours", *others):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    sums: dict[str, list[float]] = {name: [] for name in others}
    for entry, predicted, error in rows:
        measured = float(entry["measured"]["iteration_s"])
        cells = []
        for name in others:
            other = (entry.get("predicted_by_others") or {}).get(name)
            if other is None or other.get("iteration_s") is None:
                cells.append("")
                continue
            sums[name].append(abs(float(other["iteration_s"]) / measured - 1))
            cells.append(f"{float(other['iteration_s']) / measured - 1:+.1%}")
        table.add_row(str(entry["name"]), f"{measured:.4f}", f"{predicted:.4f}", f"{error:+.1%}", *cells)
    table.add_section()
    ours = sum(abs(error) for _, _, error in rows) / len(rows)
    means = [f"{sum(values) / len(values):.1%}" if values else "" for values in sums.values()]
    table.add_row("mean error", "", "", f"{ours:.1%}", *means)
    Console(width=max(100, 28 + 12 * (len(others) + 2))).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file of the form measured-plans/1")
    arguments = parser.parse_args(argv)
    try:
        data = load(arguments.file)
        rows = errors(data)
    except BadFileError as error:
        print(error, file=sys.stderr)
        return 2
    show(data, rows)
    sizes = [abs(error) for _, _, error in rows]
    print(f"mean {sum(sizes) / len(sizes):.1%} max {max(sizes):.1%}".replace("%", " %"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
