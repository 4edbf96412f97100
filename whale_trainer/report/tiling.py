"""The tiling as SVG: a unit to the right is a layer, a unit downwards a sample, so that areas are layers x samples.

The drawing is stretched over the width of the page; labels lie over it as HTML, so that they keep their shape, and the
page's script hides those that do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from whale_trainer.planning.plan import Plan, Tile
from whale_trainer.report.colours import ink, kind_colours
from whale_trainer.report.markup import Markup, duration, joined, number, ranks_in_words, tag
from whale_trainer.validation import counted

LEAST_HEIGHT, MOST_HEIGHT = 240, 720
BAND_HEIGHT, SHARD_HEIGHT = 44, 24
"""Pixels that a tile, and a shard of one, have as long as the drawing is not too high."""
MOST_LABELS = 1500
"""Tiles up to which there are labels."""
USUAL_WIDTH = 1100
"""Pixels of the drawing on a desktop, for what depends on the size of a tile."""
LEAST_GAP = 2.2
"""Percent of a side between two of its numbers."""


def tiling(plan: Plan, seconds: Mapping[int, Mapping[str, float]]) -> Markup:
    """The drawing with its axes and legend; `seconds` are those of the passes of each tile, by `F` and `B`."""
    colours = kind_colours(plan)
    kinds = [device.kind for device in plan.devices]
    width, height = plan.num_layers, plan.micro_batch_size
    drawn = [_tile(plan, i, kinds, colours, seconds.get(i, {})) for i in range(len(plan.tiles))]
    picture = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
        data_layers=width,
        data_samples=height,
        role="img",
        aria_label=f"{counted(len(drawn), 'tile')} over {counted(width, 'layer')} and {counted(height, 'sample')}",
    )
    numbers_x = _axis("x", sorted({x for t in plan.tiles for x in t.layers}), width)
    numbers_y = _axis("y", sorted({y for t in plan.tiles for y in t.samples}), height)
    labels = tag("div", *_labels(plan, kinds, colours), class_="labels", aria_hidden="true")
    pixels = min(MOST_HEIGHT, max(LEAST_HEIGHT, _wanted_height(plan)))
    names = plan.layer_names
    ends = f"layers to the right, from {names[0]} to {names[-1]}" if width > 1 else f"one layer, {names[0]}"
    return joined(
        _legend(plan, colours),
        tag(
            "div",
            numbers_x,
            numbers_y,
            tag("div", picture, labels, class_="plot"),
            class_="tiling",
            style=f"--height:{pixels}px;--outline:{number(_outline(plan, pixels), 2)}px",
        ),
        tag("p", f"{ends}; samples of a micro-batch downwards. An area is a tile's part of the work.", class_="hint"),
    )


def _legend(plan: Plan, colours: Mapping[str, str]) -> Markup:
    counts = {kind: sum(device.kind == kind for device in plan.devices) for kind in colours}
    entries = [
        tag("li", swatch(colour), f"{counts[kind]} x {kind}", data_legend=kind) for kind, colour in colours.items()
    ]
    if any(len(tile.shards) > 1 for tile in plan.tiles):
        entries.append(tag("li", tag("i", class_="dashes"), "shards of a split tile, by weight"))
    return tag("ul", *entries, class_="legend")


def swatch(colour: str) -> Markup:
    return tag("i", class_="swatch", style=f"background:{colour}")


def _tile(
    plan: Plan, index: int, kinds: Sequence[str], colours: Mapping[str, str], seconds: Mapping[str, float]
) -> Markup:
    tile = plan.tiles[index]
    held = list(dict.fromkeys(kinds[rank] for rank in tile.ranks))
    x, y, width, height = tile.layers.start, tile.samples.start, len(tile.layers), len(tile.samples)
    whole = tag(
        "rect",
        class_="tile",
        x=x,
        y=y,
        width=width,
        height=height,
        fill=colours[held[0]],
        data_tile=index,
        data_layers=f"{tile.layers.start}-{tile.layers.stop}",
        data_samples=f"{tile.samples.start}-{tile.samples.stop}",
        data_ranks=",".join(map(str, tile.ranks)),
        data_weights=",".join(map(str, tile.weights)),
        data_kind=", ".join(held),
        data_tip=_tip(plan, index, kinds, seconds),
    )
    if len(tile.shards) == 1:
        return whole
    shards = [
        tag(
            "rect",
            class_="shard",
            x=x,
            y=top,
            width=width,
            height=part,
            fill=colours[kinds[shard.rank]],
            data_shard=index,
            data_rank=shard.rank,
            data_weight=shard.weight,
            data_kind=kinds[shard.rank],
        )
        for shard, (top, part) in zip(tile.shards, _strips(tile), strict=True)
    ]
    # the outline goes over its shards
    return joined(*shards, Markup(whole.replace('class="tile"', 'class="tile split"', 1)))


def _strips(tile: Tile) -> Iterator[tuple[float, float]]:
    """(top, height) of each shard of a tile, in samples, by weight."""
    total, height = sum(tile.weights), len(tile.samples)
    for before, weight in zip(accumulate(tile.weights, initial=0), tile.weights, strict=False):
        yield tile.samples.start + height * before / total, height * weight / total


def _tip(plan: Plan, index: int, kinds: Sequence[str], seconds: Mapping[str, float]) -> str:
    """What a tile is, a fact a line."""
    tile = plan.tiles[index]
    names = plan.layer_names[tile.layers.start : tile.layers.stop]
    listed = ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"
    lines = [
        f"tile {index}",
        f"{counted(len(names), 'layer')}: {tile.layers.start}-{tile.layers.stop}, {listed}",
        f"{len(tile.samples)} of {counted(plan.micro_batch_size, 'sample')}: {tile.samples.start}-{tile.samples.stop}",
    ]
    total = sum(tile.weights)
    for shard in tile.shards[:8]:
        share = "" if len(tile.shards) == 1 else f", {shard.weight}/{total} = {shard.weight / total:.1%}"
        lines.append(f"rank {shard.rank}: {kinds[shard.rank]} on {plan.devices[shard.rank].node}{share}")
    if len(tile.shards) > 8:
        lines.append(f"and {len(tile.shards) - 8} more of ranks {ranks_in_words(tile.ranks)}")
    words = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "of weights"}
    times = [f"{words[op]} {duration(seconds[op])}" for op in words if op in seconds]
    if times:
        lines.append(f"{', '.join(times)} a micro-batch")
    return "\n".join(lines)


def _labels(plan: Plan, kinds: Sequence[str], colours: Mapping[str, str]) -> Iterator[Markup]:
    """A label for each shard, and for a split tile one in case these do not fit."""
    if len(plan.tiles) > MOST_LABELS:
        return
    for index, tile in enumerate(plan.tiles):
        total = sum(tile.weights)
        of_shards = [
            tag(
                "span",
                tag("b", tag("span", "rank ", class_="word"), str(shard.rank)),
                tag("span", f"{shard.weight}/{total}" if len(tile.shards) > 1 else kinds[shard.rank], class_="more"),
                class_="label",
                style=_box(plan, tile, top, part) + f";color:{ink(colours[kinds[shard.rank]])}",
            )
            for shard, (top, part) in zip(tile.shards, _strips(tile), strict=True)
        ]
        if len(tile.shards) == 1:
            yield from of_shards
            continue
        even = len(set(tile.weights)) == 1
        label = tag(
            "span",
            tag("b", tag("span", "ranks ", class_="word"), ranks_in_words(tile.ranks)),
            tag("span", "" if even else ":".join(map(str, tile.weights)), class_="more"),
            class_="label whole",
            style=_box(plan, tile, tile.samples.start, len(tile.samples)),
        )
        yield tag("div", *(of_shards if len(tile.shards) <= 32 else ()), label, data_label=index)


def _box(plan: Plan, tile: Tile, top: float, height: float) -> str:
    """Where a label lies, in percent of the drawing."""
    right, down = 100 / plan.num_layers, 100 / plan.micro_batch_size
    sides = {
        "left": tile.layers.start * right,
        "top": top * down,
        "width": len(tile.layers) * right,
        "height": height * down,
    }
    return ";".join(f"{side}:{number(value, 3)}%" for side, value in sides.items())


def _axis(side: str, cuts: Sequence[int], length: int) -> Markup:
    """The positions of the cuts along a side, as far as they have room."""
    start = "left" if side == "x" else "top"
    kept: list[int] = []
    for cut in cuts:
        while kept and cut == length and (cut - kept[-1]) * 100 / length < LEAST_GAP:
            kept.pop()  # the end is always told
        if not kept or (cut - kept[-1]) * 100 / length >= LEAST_GAP:
            kept.append(cut)
    marks = [tag("span", str(cut), style=f"{start}:{number(100 * cut / length, 3)}%") for cut in kept]
    return tag("div", *marks, class_=f"axis {side}", aria_hidden="true")


def _wanted_height(plan: Plan) -> int:
    """Pixels for the tiles that lie above each other."""
    ends: list[tuple[int, int]] = []
    for tile in plan.tiles:
        wanted = max(BAND_HEIGHT, SHARD_HEIGHT * len(tile.shards))
        ends += [(tile.layers.start, wanted), (tile.layers.stop, -wanted)]
    return max(accumulate(change for _, change in sorted(ends)))


def _outline(plan: Plan, pixels: int) -> float:
    """Pixels of a tile's outline: an eighth of the thinnest tile, 2 at most, none below 4 pixels."""
    right, down = USUAL_WIDTH / plan.num_layers, pixels / plan.micro_batch_size
    thinnest = min(min(len(t.layers) * right, len(t.samples) * down) for t in plan.tiles)
    return min(2.0, thinnest / 8) if thinnest >= 4 else 0.0
