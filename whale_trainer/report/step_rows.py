"""A step as SVG: a row for each rank, what it computes above, what it sends and sums below.

Time is stretched over the width of the page: 1000 units are the whole scale. The page's script zooms by moving the
drawing's viewBox, so every span is drawn once, here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.show import MOST_RANKS
from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline
from whale_trainer.report.colours import ACTIVITIES, ink, kind_colours
from whale_trainer.report.lanes import lanes_of, representatives, spans_by_rank
from whale_trainer.report.markup import Markup, duration, number, tag
from whale_trainer.report.tiling import swatch
from whale_trainer.validation import counted

UNITS = 1000
MOST_SPANS = 12_000
"""Spans that are drawn; with more, fewer ranks are, so that the page stays small."""
MOST_LANES = 3
"""Of what travels at once; more lie over each other."""
NUM_TICKS = 8
ROOMY, DENSE = 16, 40
"""Ranks up to which rows are high, and up to which they are of middle height."""


@dataclass(frozen=True)
class Rows:
    """Heights in pixels of a row's parts, by how many rows there are and how many lanes they need."""

    compute: int
    lane: int
    gap: int
    lanes: int

    @property
    def height(self) -> int:
        return self.compute + self.lane * self.lanes + self.gap


def drawn_ranks(timeline: Timeline) -> list[int]:
    """The ranks with a row of their own; in a large plan ranks whose spans are alike stand for each other."""
    alike = _alike(timeline)
    most = MOST_RANKS
    ranks = representatives(alike, most)
    while most > 1 and sum(len(alike[rank]) for rank in ranks) > MOST_SPANS:
        most = min(most - 1, most * 7 // 8)
        ranks = representatives(alike, most)
    return ranks


def _alike(timeline: Timeline) -> dict[int, tuple[object, ...]]:
    """By rank with spans, what two ranks share that do the same."""
    by_rank = spans_by_rank(timeline)
    return {rank: tuple((s.activity, s.start_s, s.stop_s) for s in spans) for rank, spans in by_rank.items()}


def step_rows(
    timeline: Timeline, plan: Plan, ranks: Sequence[int], *, scale_s: float, name: str = "predicted"
) -> Markup:
    """The rows of `ranks` over `scale_s` seconds, with a time axis and the busy part of each rank."""
    by_rank = spans_by_rank(timeline)
    shown = {rank: by_rank.get(rank, [])[:MOST_SPANS] for rank in ranks}
    lanes = {rank: [min(lane, MOST_LANES) for lane in lanes_of(own)] for rank, own in shown.items()}
    compute, lane, gap = (20, 6, 8) if len(ranks) <= ROOMY else (13, 4, 5) if len(ranks) <= DENSE else (10, 3, 3)
    rows = Rows(compute, lane, gap, max((max(own, default=0) for own in lanes.values()), default=0))
    height = rows.height * max(1, len(ranks))
    groups = [
        _rank(rank, shown[rank], lanes[rank], i * rows.height + rows.gap / 2, rows, scale_s)
        for i, rank in enumerate(ranks)
    ]
    picture = tag(
        "svg",
        *groups,
        viewBox=f"0 0 {UNITS} {height}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"the {name} step of {counted(len(ranks), 'rank')}, {duration(timeline.step_s)}",
    )
    busy = timeline.busy_fractions
    colours = kind_colours(plan)
    names = [_name(plan, rank, colours) for rank in ranks]
    parts = [tag("span", f"{busy[rank]:.0%}" if rank < len(busy) else "", data_busy=rank) for rank in ranks]
    plot = tag("div", tag("div", *_ticks(scale_s), class_="ticks"), picture, tag("canvas"), class_="plot")
    density = "roomy" if len(ranks) <= ROOMY else "dense"
    return tag(
        "div",
        tag("div", *names, class_="names"),
        plot,
        tag("div", *parts, class_="busy"),
        class_=f"step {density}",
        data_step=name,
        data_scale_s=f"{scale_s:.9g}",
        style=f"--row:{rows.height}px;--height:{height}px;--compute:{rows.compute}px",
    )


def omitted(timeline: Timeline, plan: Plan, ranks: Sequence[int]) -> str:
    """What `step_rows` leaves out, in words; empty when that is nothing."""
    left_out = plan.num_ranks - len(ranks)
    lines = []
    if left_out:
        alike = _alike(timeline)
        are_told = {alike[rank] for rank in ranks if rank in alike} == set(alike.values())
        others = "do the same as one of these" if are_told else "are left out"
        lines.append(f"{len(ranks)} of {plan.num_ranks} ranks are drawn; the other {left_out} {others}.")
    by_rank = spans_by_rank(timeline)
    cut = [rank for rank in ranks if len(by_rank.get(rank, ())) > MOST_SPANS]
    if cut:
        lines.append(f"Of rank {cut[0]} the first {MOST_SPANS} of {len(by_rank[cut[0]])} spans are drawn.")
    return " ".join(lines)


def legend(timeline: Timeline) -> Markup:
    """The colours of what the step holds."""
    found = {span.activity for span in timeline.spans}
    entries = [
        tag("li", swatch(colour), activity.value) for activity, colour in ACTIVITIES.items() if activity in found
    ]
    return tag("ul", *entries, class_="legend")


def ticks(scale_s: float, count: int = NUM_TICKS) -> list[float]:
    """About `count` round times from 0 to the end of the scale, in seconds."""
    if not scale_s > 0:
        return [0.0]
    rough = scale_s / count
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [i * step for i in range(int(scale_s / step * 1.000001) + 1)]


def _ticks(scale_s: float) -> Iterator[Markup]:
    for at in ticks(scale_s):
        left = 100 * at / scale_s if scale_s > 0 else 0.0
        if left < 95:  # a later one would reach over the end
            yield tag("span", duration(at) if at else "0", style=f"left:{number(left, 3)}%")


def _name(plan: Plan, rank: int, colours: dict[str, str]) -> Markup:
    kind = plan.devices[rank].kind
    return tag("span", swatch(colours[kind]), tag("b", str(rank)), tag("span", kind, class_="more"), title=kind)


def _rank(rank: int, spans: Sequence[Span], lanes: Sequence[int], top: float, rows: Rows, scale_s: float) -> Markup:
    """The spans of a rank, in a group for each activity and lane."""
    track = tag("rect", class_="track", width=UNITS, height=rows.compute)
    placed = sorted(zip(spans, lanes, strict=True), key=lambda p: (list(Activity).index(p[0].activity), p[1]))
    groups = []
    for (activity, lane), members in groupby(placed, key=lambda p: (p[0].activity, p[1])):
        y = rows.compute + (lane - 1) * rows.lane + 1 if lane else 0
        height = rows.lane - 1 if lane else rows.compute
        bars = [_bar(span, y, height, scale_s) for span, _ in members]
        colour = ACTIVITIES[activity]
        groups.append(tag("g", *bars, data_activity=activity.value, fill=colour, stroke=colour, data_ink=ink(colour)))
    return tag("g", track, *groups, data_rank=rank, transform=f"translate(0 {number(top)})")


def _bar(span: Span, y: int, height: int, scale_s: float) -> Markup:
    scale = UNITS / scale_s if scale_s > 0 else 0.0
    return tag(
        "rect",
        x=number(span.start_s * scale, 4),
        y=y or None,
        width=number((span.stop_s - span.start_s) * scale, 4),
        height=height,
        data_label=span.label,
        data_start_s=f"{span.start_s:.7g}",
        data_stop_s=f"{span.stop_s:.7g}",
        data_bytes=f"{span.num_bytes:.0f}" if span.num_bytes else None,
    )
