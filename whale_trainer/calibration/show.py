"""What was measured, as rich tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale_trainer.planning.costs.memory import size
from whale_trainer.planning.simulation.profile import KindTimes, LayerTimes, LinkTimes, Profile
from whale_trainer.validation import counted


def calibration_table(profile: Profile) -> Group:
    """Layers, optimizer and memory of each kind, then the links, then the notes."""
    parts: list[RenderableType] = []
    for kind, times in profile.kinds.items():
        parts += [_layers(kind, times, profile), *_facts(times)]
    if profile.links:
        parts.append(_links(profile.links))
    parts += [Text(f"- {note}", style="dim") for note in profile.notes]
    return Group(*parts)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _layers(kind: str, times: KindTimes, profile: Profile) -> Table:
    title = f"{kind}: {times.device} on {times.machine}, {profile.model.name} in {profile.precision}"
    table = _table(title, ("layer",), ("samples", "part", "forward", "backward", "spread", "repeats"))
    for layer in times.layers:
        for index, row in enumerate(_rows(layer)):
            table.add_row(_name(layer) if index == 0 else "", *row)
    return table


def _name(times: LayerTimes) -> str:
    return f"{times.layer} x {len(times.names)}" if times.same else times.layer


def _rows(times: LayerTimes) -> Iterator[tuple[RenderableType, ...]]:
    for row in times.rows:
        spread = max(row.forward_spread_s / row.forward_s, row.backward_spread_s / row.backward_s)
        yield (
            str(row.samples),
            f"{row.part:.3g}",
            duration(row.forward_s),
            duration(row.backward_s),
            f"{spread:.0%}",
            str(row.repeats),
        )
    for trial in times.failed:
        yield str(trial.samples), f"{trial.part:.3g}", Text("failed", style="red")


def _facts(times: KindTimes) -> Iterator[Text]:
    for layer in times.layers:
        for reason in dict.fromkeys(trial.reason for trial in layer.failed):
            count = sum(trial.reason == reason for trial in layer.failed)
            yield Text(f"{layer.layer}: {counted(count, 'trial')} failed: {reason}", style="red")
    if times.memory_bytes is not None:
        yield Text(f"memory that is free: {size(times.memory_bytes)}")
    if times.optimizer is not None:
        optimizer = times.optimizer
        each = duration(optimizer.element_s * 1e6)
        yield Text(f"{optimizer.optimizer}: {each} for a million weights, and {duration(optimizer.fixed_s)} a step")


def _links(links: tuple[LinkTimes, ...]) -> Table:
    table = _table("links", ("what", "between"), ("latency", "bandwidth", "1 MiB takes"))
    for link in links:
        what = "message" if link.what == "point_to_point" else "sum over all"
        names = ", ".join(f"{link.kinds.count(k)} x {k}" for k in dict.fromkeys(link.kinds))
        mebibyte = next((duration(row.seconds) for row in link.rows if row.num_bytes == 1 << 20), "")
        bandwidth = f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
        table.add_row(what, names, duration(link.latency_s), bandwidth, mebibyte)
    return table


def duration(seconds: float) -> str:
    """`12.3 us`, `4.56 ms`, `1.2 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
