"""A plan as plain text: what each device does, and the picture of the tiling. Reads decisions, makes none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.answer import Answer
from whale_trainer.planning.costs.load import rank_flops
from whale_trainer.planning.costs.memory import size
from whale_trainer.planning.picture import drawing
from whale_trainer.planning.plan import Plan, PlannedDevice
from whale_trainer.planning.shares import cut_units
from whale_trainer.validation import counted

MOST_RANKS = 64
"""Rows of the table; alike ranks of larger plans are left out and counted."""


@dataclass(frozen=True)
class DeviceRow:
    """What one rank does, in words."""

    device: PlannedDevice
    tiles: tuple[int, ...]
    layers: str
    layer_range: str
    samples: str
    shards: str
    """Units of each cut dim, such as `4/6 heads, 256/384 columns`; empty when nothing is cut."""
    weights: str
    """Its weight of all weights of its tiles, such as `5/8`; empty when nothing is cut."""
    work: float
    """Part of the FLOPs of a step, from 0 to 1."""

    @property
    def memory(self) -> str:
        planned = self.device.planned_memory_bytes
        return f"{'?' if planned is None else size(planned)}/{size(self.device.memory_bytes)}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of the row, in the order of `HEADINGS`."""
        tiles = ",".join(map(str, self.tiles))
        return (
            str(self.device.rank),
            self.device.kind,
            self.device.node,
            tiles,
            self.layers,
            self.samples,
            self.shards,
            f"{self.work:.1%}",
            self.memory,
        )

    @property
    def narrow_cells(self) -> tuple[str, ...]:
        """The same with indices for layer names and weights for units, to fit 80 characters."""
        cells = list(self.cells)
        cells[4], cells[6] = self.layer_range, self.weights
        return tuple(cells)


HEADINGS = ("rank", "device", "node", "tile", "layers", "samples", "shard", "work", "memory")


def device_rows(plan: Plan, model: ModelSpec) -> tuple[DeviceRow, ...]:
    """One row for each rank."""
    flops = rank_flops(plan, model)
    total = sum(flops) or 1.0
    held: list[list[int]] = [[] for _ in plan.devices]
    for index, tile in enumerate(plan.tiles):
        for rank in tile.ranks:
            held[rank].append(index)
    rows = []
    for device, tiles in zip(plan.devices, held, strict=True):
        parts = [plan.tiles[i] for i in tiles]
        rows.append(
            DeviceRow(
                device,
                tuple(tiles),
                " + ".join(_span(plan, t.layers.start, t.layers.stop) for t in parts),
                "+".join(f"{t.layers.start}-{t.layers.stop}" for t in parts),
                " + ".join(f"{len(t.samples)}/{plan.micro_batch_size}" for t in parts),
                " + ".join(filter(None, (_units(plan, model, i, device.rank) for i in tiles))),
                "+".join(f"{t.weights[t.shard_of(device.rank)]}/{sum(t.weights)}" for t in parts if len(t.shards) > 1),
                flops[device.rank] / total,
            )
        )
    return tuple(rows)


def _span(plan: Plan, start: int, stop: int) -> str:
    names = plan.layer_names
    return names[start] if stop == start + 1 else f"{names[start]} … {names[stop - 1]}"


def _units(plan: Plan, model: ModelSpec, tile_index: int, rank: int) -> str:
    tile = plan.tiles[tile_index]
    if len(tile.shards) == 1:
        return ""
    position = tile.shard_of(rank)
    dims = model.split_dims(*tile.layers)
    return ", ".join(f"{len(cut_units(d, tile.weights)[position])}/{d.units} {d.name}" for d in dims) or "whole copy"


def title(plan: Plan) -> str:
    """The plan in one line."""
    ranks, tiles = counted(plan.num_ranks, "rank"), counted(len(plan.tiles), "tile")
    batches = counted(plan.micro_batches, "micro-batch")
    return (
        f"plan {plan.fingerprint[:8]}: {ranks}, {tiles}; global batch {plan.global_batch} in {batches} "
        f"of {plan.micro_batch_size}; schedule {plan.schedule}"
    )


def figures(answer: Answer) -> tuple[str, ...]:
    """The predicted step, how it compares, and the best other plans; one line each."""
    plan, timeline = answer.plan, answer.timeline
    step_s = timeline.step_s
    lines = [
        f"predicted: {seconds(step_s)} a step, {plan.global_batch / step_s:.4g} samples/s, "
        f"{timeline.bubble_fraction:.0%} of the ranks' time without compute"
    ]
    if timeline.bound_by:
        lines.append(f"bound by: {timeline.bound_by}")
    predicted = plan.predicted
    compared = [
        f"{_gain(predicted.even_step_s, step_s)} over an even split",
        f"{_gain(predicted.whale_step_s, step_s)} over Whale's algorithm",
    ]
    if predicted.ideal_step_s:
        compared.append(f"{predicted.ideal_step_s / step_s:.0%} of the sum of the devices' speeds")
    lines.append(f"gain: {', '.join(compared)}")
    if answer.num_simulated > 1:
        lines.append(f"searched: {answer.num_simulated} plans simulated")
    for number, other in enumerate(answer.alternatives, 1):
        loss = f"{other.step_s / step_s - 1:+.1%}"
        lines.append(f"alternative {number}: {other.description}: {seconds(other.step_s)} a step ({loss})")
    return tuple(lines)


def _gain(other_s: float | None, step_s: float) -> str:
    return "(does not fit)" if other_s is None else f"{other_s / step_s:.2f}x"


def seconds(value: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 us`."""
    for unit, size_ in (("s", 1.0), ("ms", 1e-3)):
        if value >= size_:
            return f"{value / size_:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def plan_text(plan: Plan, model: ModelSpec) -> str:
    """Everything that a user reads of a plan: its devices and their parts, the picture, what is left out and why."""
    rows = device_rows(plan, model)
    lines = [title(plan), "", *_columns([HEADINGS, *(row.cells for row in rows[:MOST_RANKS])])]
    if len(rows) > MOST_RANKS:
        lines.append(f"… and {len(rows) - MOST_RANKS} more ranks")
    lines += ["", drawing(plan)]
    if plan.left_out:
        names = dict.fromkeys(plan.left_out)
        listed = ", ".join(f"{plan.left_out.count(name)} x {name}" for name in names)
        lines += ["", f"left out: {listed}"]
    if plan.notes:
        lines += ["", *(f"- {note}" for note in plan.notes)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells in columns; a column without any text is not shown."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return ["  ".join(f"{row[i]:<{widths[i]}}" for i in kept) for row in rows]
